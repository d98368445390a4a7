"""Runs on Cloud TPUs, started, watched and stopped from another machine: `python3 -m tpu.launch`."""
