"""Compiles in a process of its own: libtpu may die of a program, and takes the process with it that
has loaded it.

    compiled = apart.compile(module, "v5e:2x4", "fast", libtpu.find())
    compiled.memory.needed, compiled.cost.flops, compiled.optimized        as of libtpu.Program

The process has the environment of this one, LIBTPU_INIT_ARGS included, and `variables`. It loads
libtpu and nothing of torch: starting it takes a second. Several may run at once, also with
different versions of libtpu.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from tpu.compiler import libtpu

ROOT = Path(__file__).resolve().parents[2]
# Files in the folder that the two processes share.
REQUEST = "request.json"
MODULE = "module.pb"
ANSWER = "answer.json"
OPTIMIZED = "optimized.pb"
PR_SET_PDEATHSIG = 1  # of Linux's prctl
NO_ROOM = 4  # exit code: the answer could not be written
LAST_LINES = 5  # of what a process has said before it died


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program, memory and cost per device, and the optimized
    HloModuleProto."""

    memory: libtpu.Memory
    cost: libtpu.Cost
    optimized: bytes


class CompilerDied(RuntimeError):
    """libtpu ended the process that compiled.

    Attributes:
        version: of libtpu.
        how: "SIGSEGV, stack overflow", or "exit code 1".
        output: what it wrote before.
    """

    def __init__(self, version: str, how: str, output: str):
        self.version = version
        self.how = how
        self.output = output
        super().__init__(f"libtpu {version} died while it compiled ({how})")


def compile(
    module: bytes,
    topology: str,
    effort: str,
    library: Path,
    variables: Mapping[str, str] | None = None,
) -> Compiled:
    """Compiles an HloModuleProto for all devices of a topology.

    Args:
        effort: as of libtpu.Topology.compile.
        library: the libtpu.so that compiles.
        variables: of the environment, besides those of this process; they win.
    Raises:
        InputError: this library does not know the topology, or cannot be loaded.
        libtpu.OutOfMemory, libtpu.CompilerError: as of libtpu.Topology.compile.
        CompilerDied: the process ended in another way.
    """
    try:
        return _compile(module, topology, effort, library, variables)
    except OSError as error:
        raise InputError(
            f"cannot write to {tempfile.gettempdir()}: {error.strerror}; "
            "make room, or set TMPDIR to another folder"
        ) from None


def _compile(
    module: bytes,
    topology: str,
    effort: str,
    library: Path,
    variables: Mapping[str, str] | None,
) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="compile-") as name:
        folder = Path(name)
        request = {"topology": topology, "effort": effort}
        (folder / MODULE).write_bytes(module)
        (folder / REQUEST).write_text(json.dumps(request))

        # What libtpu writes of its own goes with the folder, also where it dies.
        own = {"TPU_LIBRARY_PATH": str(library), "TMPDIR": name}
        environment = {**os.environ, **(variables or {}), **own}
        command = [sys.executable, "-m", "tpu.compiler.apart", name]
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )

        answer_path = folder / ANSWER
        if result.returncode == NO_ROOM:
            raise OSError(NO_ROOM, result.stderr.splitlines()[-1])
        if result.returncode or not answer_path.exists():
            output = result.stdout + result.stderr
            how = how_it_ended(result.returncode, output)
            raise CompilerDied(libtpu.version(library), how, output)

        answer = json.loads(answer_path.read_text())
        if answer["kind"] != "compiled":
            raise _error(answer)
        return Compiled(
            memory=libtpu.Memory(**answer["memory"]),
            cost=libtpu.Cost(**answer["cost"]),
            optimized=(folder / OPTIMIZED).read_bytes(),
        )


def how_it_ended(code: int, output: str) -> str:
    """Returns how a process ended, for people.

    Args:
        code: of subprocess, below 0 for a signal.
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    if "STACK OVERFLOW" in output:
        return f"{name}, stack overflow"
    return name


def last_words(error: CompilerDied) -> str:
    """Returns the last lines that a dead compiler has written, without its stack and what it says
    of core dumps."""
    kept = []
    for line in error.output.splitlines():
        line = line.strip()
        if line and not re.match(r"(PC: )?@ |https?://|.*\bRAW: ", line):
            kept.append(line)
    return "\n".join(kept[-LAST_LINES:])


def _error(answer: dict) -> Exception:
    """Returns the exception that the other process has caught."""
    if answer["kind"] == "out of memory":
        allocations = []
        for fields in answer["allocations"]:
            # JSON has made lists of them.
            candidates = tuple(tuple(candidate) for candidate in fields["candidates"])
            allocation = libtpu.Allocation(**fields)
            allocations.append(dataclasses.replace(allocation, candidates=candidates))
        return libtpu.OutOfMemory(
            topology=answer["topology"],
            needed=answer["needed"],
            capacity=answer["capacity"],
            allocations=allocations,
            report=answer["report"],
        )
    if answer["kind"] == "compiler error":
        return libtpu.CompilerError(answer["code"], answer["text"])
    return InputError(answer["text"])


def _answer(folder: Path) -> dict:
    """Compiles what a folder asks for; returns the answer, and writes the optimized module beside
    it."""
    request = json.loads((folder / REQUEST).read_text())
    try:
        with (
            libtpu.Topology(request["topology"]) as topology,
            topology.compile((folder / MODULE).read_bytes(), request["effort"]) as program,
        ):
            (folder / OPTIMIZED).write_bytes(program.optimized)
            return {
                "kind": "compiled",
                "memory": dataclasses.asdict(program.memory),
                "cost": dataclasses.asdict(program.cost),
            }
    except libtpu.OutOfMemory as error:
        allocations = [dataclasses.asdict(allocation) for allocation in error.allocations]
        return {
            "kind": "out of memory",
            "topology": request["topology"],
            "needed": error.needed,
            "capacity": error.capacity,
            "allocations": allocations,
            "report": error.report,
        }
    except libtpu.CompilerError as error:
        return {"kind": "compiler error", "code": error.code, "text": error.text}
    except InputError as error:
        return {"kind": "input", "text": str(error)}
    except MemoryError:
        return {
            "kind": "input",
            "text": "this machine has not enough memory to compile it; use one with more",
        }


def main() -> None:
    """Compiles what the folder of the command line asks for."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a dead compiler it would have gigabytes
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would read the answer
    folder = Path(sys.argv[1])
    try:
        answer = _answer(folder)
        (folder / ANSWER).write_text(json.dumps(answer))
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        sys.exit(NO_ROOM)


if __name__ == "__main__":
    main()
