"""Cloud TPUs: compiling for them without one (compiler/), starting runs (launch/), checking a
machine (doctor.py)."""
