"""All tests run on XLA's CPU backend with four virtual devices, so that every test sees sharding as a pod would.

The variables must be set before torch_xla is imported. Runs on other numbers of devices start processes of their own.
"""

import os
import signal

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's warnings about its own future
# A compiled program holds about 90 of the 65,530 memory maps that Linux gives a process: with the programs of all tests
# (2,048 are kept by default) it ends in a segmentation fault.
os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "100")

# A shell ignores it in what it runs in the background, and processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest


@pytest.fixture(scope="session", autouse=True)
def mesh():
    """Four devices, float32, strict. Set up before any test: a backward pass on the CPU before it breaks XLA's."""
    from train.common import device

    return device.setup(0, "float32")
