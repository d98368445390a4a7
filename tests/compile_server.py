"""Compiles many command lines of tpu/compiler/compile.py, each in a process of its own that is
forked from this one.

Importing torch, torch_xla and the scripts takes 8 s of a core, which the guards would pay for each
of their steps. Here it is done once, and nothing else: devices, flags and libtpu are a forked
process's own, as in `make compile`.

Each line of the input is a request in JSON:

    {"arguments": […], "variables": {…}, "output": file, "errors": file}

Each line of the output is the exit code of its process.
"""

import json
import os
import sys
import traceback

# As when compile.py is the program; read when torch_xla is imported.
os.environ["XLA_IR_DEBUG"] = "1"
os.environ["XLA_HLO_DEBUG"] = "1"

import torchrec.models.dlrm  # noqa: F401, what a model's __init__ imports

from tpu.compiler import compile as compiling


def redirect(descriptor: int, path: str) -> None:
    """Sends what is written to a descriptor to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, descriptor)
    os.close(file)


def serve(request: dict) -> int:
    """Compiles in this process, which has been forked for it; returns the exit code."""
    os.environ.update(request["variables"])
    redirect(sys.stdout.fileno(), request["output"])
    redirect(sys.stderr.fileno(), request["errors"])
    try:
        return compiling.command(request["arguments"])
    except SystemExit as stopped:  # of the parser
        if isinstance(stopped.code, int):
            return stopped.code
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


def main() -> None:
    """Serves one request after the other until the input ends."""
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            code = serve(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
