"""Starts, watches and stops runs on Cloud TPUs from another machine: `python3 -m tpu.launch`."""
