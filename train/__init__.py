"""The scripts, and what they share."""

import os

# `import torch` loads every backend that is installed beside it. TorchTPU's takes ten seconds, and
# the chip, in each worker process, too, and where it fails, torch is not imported at all. So none
# is loaded before `--device tpu` asks for it, see train/common/torchtpu.py.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
