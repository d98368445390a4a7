"""Several processes for tests, which need not import again what this one has imported."""

import os
import sys
import traceback
from collections.abc import Callable

from train.common import start_processes


def run(count: int, work: Callable[[int], None]) -> list[int]:
    """Calls work(index) in `count` forks of this process, with the variables that torchrun sets; of
    one process there are none. This process must not have started a thread.

    Returns:
        The status of each, as os.waitpid has it: 0 where `work` has returned.
    """
    port = start_processes.free_port()
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            if count > 1:
                os.environ |= start_processes.variables(index, count, port)
            _end_with(work, index)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def _end_with(work: Callable[[int], None], index: int) -> None:
    """Ends this process when `work` has returned, or after an error, which it prints."""
    code = 1
    try:
        work(index)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
