"""`python3 -m tpu.launch`."""

import sys

from tpu.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
