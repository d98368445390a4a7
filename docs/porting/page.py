"""Runs the pairs of this folder; writes docs/porting.md from them, and own_model.md from the script
that was ported.

    run      python -m docs.porting.page         what each half and the wrong variant give, then the page
             python -m docs.porting.page 4       one pair; CPU_NUM_DEVICES=4 gives it the four devices of the tests

A pair is a file with functions eager() and xla(mesh), whose bodies are the listings, wrong(mesh),
and constants: WRONG, the first part of the wrong variant's message, or what it returns (WRONG_X for
another one, wrong_x); RIGHT, what the halves return, where the text needs it; FRESH, where the
wrong variant needs a process of its own; OURS, files of this repository and a line of each. Its
docstring has three paragraphs: title, why, what goes wrong.
"""

import difflib
import html
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "porting.md"
OWN_MODEL = FOLDER / "own_model.md"
WIDTH = 120  # characters of the page's lines
INTRODUCTION = """\
# From PyTorch to TPUs

Written by `python -m docs.porting.page` from the files in [docs/porting](porting), which tests/test_porting.py runs; do
not edit. The halves of a pair give the same numbers (within 1e-6: float32 rounding); every message and number below is
what the wrong variant in the file gives.

Fifteen differences between a training script in eager PyTorch and one for XLA, in the order in which a port meets them.
`device`, `loading` and `checkpoint` are those of `train.common`: `make copy MODEL=bert TO=../mine` copies them with a
script. With `--device cpu` they are plain PyTorch, so that a debugger stops inside the step of a ported script, too.
Measured on four virtual devices of XLA's CPU backend with torch 2.9.0 and torch_xla 2.9.0; not run on a TPU.
"""

CLOSING = """\
## All of it in one script

[A script of one's own, before and after](porting/own_model.md): the diff of a training script of 82 lines.
"""
OWN_MODEL_TEXT = """\
# A script of one's own, before and after

Written by `python -m docs.porting.page`; do not edit. [own_model_before.py](own_model_before.py), 82 lines, is a script
as users of PyTorch write them: a Dataset, a DataLoader, AdamW, a cosine schedule by LambdaLR, an accuracy.
[own_model_after.py](own_model_after.py) is what [the guide](../porting.md) makes of it: {added} lines are new or
changed, in place of {removed}.

    python -m docs.porting.own_model_before
    python -m docs.porting.own_model_after

Both print the same, since the first one already shuffles by (seed, epoch), as `parallel_loader` does, and draws its
weights on the host:

    epoch 1  loss 1.3425  accuracy 0.7000
    epoch 2  loss 0.7159  accuracy 0.8400
    epoch 3  loss 0.5505  accuracy 0.8960
    epoch 4  loss 0.5613  accuracy 0.9160

On four virtual devices the 64 losses are at most 7e-6 apart (float32, summed in another order, through 64 updates of
AdamW; the test allows 5e-5), and the accuracies are the same number. One graph is compiled for training and one for
the evaluation, whose last batch of 58 images is padded to 64; nothing is compiled again or falls back to the host.

`device.setup(SEED, "float32", kind="cpu")` runs the ported script on plain PyTorch, with the same output. A loader that
is read to its end needs no `with`. Not shown: dropout, whose masks differ from the CPU's (12), and
checkpoints (15).
"""


def pairs() -> list[ModuleType]:
    """Imports every pair, in order."""
    return [_imported(path) for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))]


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"porting_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # worker processes and inspect look it up
    spec.loader.exec_module(module)
    return module


def outcome(function, *args) -> object:
    """Returns what a variant returns, or "Error: message" of what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fresh_outcome(pair: ModuleType) -> str:
    """Returns what the wrong variant prints in a process of its own, without set-up."""
    number = int(Path(pair.__file__).name[:2])
    wrong = f"page.pairs()[{number - 1}].wrong"
    code = f"from docs.porting import page; print(page.outcome({wrong}, None))"
    command = [sys.executable, "-c", code]
    root = FOLDER.parent.parent
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout


def wrongs(pair: ModuleType) -> dict[str, Callable]:
    """Returns the wrong variants by the names of their constants."""
    found = {}
    for name in vars(pair):
        if name.startswith("WRONG"):
            found[name] = getattr(pair, name.lower())
    return found


def listing(function) -> str:
    """Returns the body of a function without blank lines, which would end the table."""
    body = textwrap.dedent(inspect.getsource(function).partition(":\n")[2])
    return "\n".join(line for line in body.splitlines() if line)


def text(pair: ModuleType) -> list[str]:
    """Returns title, why, and what goes wrong, with the pair's numbers filled in."""
    values = {}
    for name, value in vars(pair).items():
        if name.isupper():
            values[name] = _code(str(value))

    paragraphs = []
    for paragraph in pair.__doc__.strip().split("\n\n"):
        line = " ".join(paragraph.split())
        paragraphs.append(line.format(**values))
    return paragraphs


def _code(value: str) -> str:
    return f"`` {value} ``" if "`" in value else f"`{value}`"


def section(number: int, pair: ModuleType) -> str:
    """Returns the Markdown of one difference."""
    title, why, wrong = text(pair)
    eager = html.escape(listing(pair.eager), quote=False)
    xla = html.escape(listing(pair.xla), quote=False)
    table = '<table><tr><th>eager PyTorch</th><th>XLA</th></tr><tr><td><pre lang="python">\n'
    table += f'{eager}\n</pre></td><td><pre lang="python">\n'
    table += f"{xla}\n</pre></td></tr></table>"
    name = Path(pair.__file__).name
    ours = "; ".join(f"[{file}](../{file}) {_code(line)}" for file, line in pair.OURS)
    after = f"**Otherwise:** {wrong} **Here:** {ours}. **Pair:** [{name}](porting/{name})"
    return f"## {number}. {title}\n\n{_filled(why)}\n\n{table}\n\n{_filled(after)}\n"


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """Returns the whole page."""
    sections = [section(number, pair) for number, pair in enumerate(pairs(), 1)]
    return "\n".join([INTRODUCTION, *sections, CLOSING])


def own_model_diff() -> list[str]:
    """Returns the lines that differ between the script before and after the port, with two lines around them."""
    before = (FOLDER / "own_model_before.py").read_text().splitlines()
    after = (FOLDER / "own_model_after.py").read_text().splitlines()
    diff = list(difflib.unified_diff(before, after, n=2, lineterm=""))
    return diff[2:]  # without the names of the files


def own_model_page() -> str:
    """Returns the page of the script that was ported."""
    lines = own_model_diff()
    signs = [line[0] for line in lines]
    words = OWN_MODEL_TEXT.format(added=signs.count("+"), removed=signs.count("-"))
    return "\n".join([words, "```diff", *lines, "```", ""])


def main(numbers: list[str]) -> None:
    """Runs the pairs, or those of these numbers; without numbers it writes the page."""
    from train.common import device

    mesh = device.setup(0, "float32")
    for number, pair in enumerate(pairs(), 1):
        if not numbers or str(number) in numbers:
            print(number, Path(pair.__file__).name)
            print("  eager", outcome(pair.eager))
            print("  xla  ", outcome(pair.xla, mesh))
            for name, function in wrongs(pair).items():
                found = fresh_outcome(pair) if hasattr(pair, "FRESH") else outcome(function, mesh)
                print(f"  {name.lower()} {str(found).splitlines()[0]}", flush=True)
    if not numbers:
        PAGE.write_text(page())
        OWN_MODEL.write_text(own_model_page())


if __name__ == "__main__":
    main(sys.argv[1:])
