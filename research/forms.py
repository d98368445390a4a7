"""What the forms that the TPU's compiler rewards gain on each generation.

    python -m research.forms                   every form on v5e, v6e, v5p and v4
    python -m research.forms LayerNorm v6e     those with "LayerNorm" in their name or their step's
    python -m research.forms --print           only the table, of what is there

`make guards` installs libtpu. Steps of the scripts with two layers (ResNet: a block a stage) at
their published widths are compiled for one chip with effort full: our step as it is, and with one
form replaced by the usual one. The figures are kept in research/results/forms.json, the table in
docs/tpu/forms.md. Cycles are estimates, which leave out what docs/tpu/stock.md says.
"""

import os

if __name__ == "__main__":
    os.environ["XLA_IR_DEBUG"] = os.environ["XLA_HLO_DEBUG"] = "1"  # as in tpu/compiler/compile.py

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import InputError
from models import encoder_layers, encoders, layers, resnet, transformer
from research.tpu_cycles import CHIPS, ONE
from tpu.compiler import compile as compiling
from tpu.compiler import libtpu, results
from tpu.compiler.pages import DOCS, Row, compiled, memory, table, two_at_a_time

GENERATIONS = {"v5e": ONE, **CHIPS}  # a chip of each
FORM = "FORM"  # the environment variable that names what a compiling process replaces
KEPT = "as it is"
LAYERS = 2
# What the table reads of a report.
READ = ("libtpu", *results.SHORTAGE, *results.MEMORY, "cycles", "bytes_accessed")
GLUE = Row("GLUE, 128 x 128", "bert", "full", batch=128, task="mrpc")
SHORT = Row("GLUE, 256 x 64", "bert", "full", batch=256, task="mrpc", flags=("--lengths", "64"))
TRANSLATION = Row("Transformer base, 256 x 64", "transformer", "tpu", batch=256)
IMAGES = Row("ResNet, 128 x 224 px", "resnet50", "full", batch=128)


def native_norm(self: layers.LayerNorm, x: Tensor) -> Tensor:
    """Reads a row twice: for the mean, and for the variance."""
    wide = F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)
    return wide.to(layers.compute_dtype(x))


def usual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """Leaves the backward pass to autograd, which keeps weights, mask and dropped weights."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() + mask
    weights = torch.softmax(scores, -1).to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", layers.dropout(weights, dropout, True), v)


def usual_sums(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """Computes AttentionCore's gradients with the softmax's sums over the keys."""
    v, signed, _ = ctx.saved_tensors
    to_v = torch.einsum("bhqk,bqhd->bkhd", signed.clamp(min=0) * ctx.scale, gradient)
    to_weights = torch.einsum("bqhd,bkhd->bhqk", gradient, v).float()
    to_weights = torch.where(signed > 0, to_weights * ctx.scale, torch.zeros((), device=v.device))
    weights = signed.abs().float()
    sums = (weights * to_weights).sum(-1, keepdim=True)
    return (weights * (to_weights - sums)).to(v.dtype), to_v, None, None


def cast_at_once(ctx, scores: Tensor, v: Tensor, mask: Tensor, _: float) -> Tensor:
    """Computes AttentionCore without dropout, and nothing between softmax and cast."""
    signed = torch.softmax(scores.float() + mask, -1).to(v.dtype)
    ctx.scale = 1.0
    mixed = torch.einsum("bhqk,bkhd->bqhd", signed.clamp(min=0), v)
    ctx.save_for_backward(v, signed, mixed)
    return mixed


class AtOnce:
    """SumsOverWords for all tokens of a row at once."""

    @staticmethod
    def apply(logits: Tensor, _: bool) -> tuple[Tensor, Tensor]:
        return layers.log_normalizer(logits), logits.float().sum(2)


def other_gradient(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
    """Writes SumsOverWords' gradient where it is computed again, and the other way round."""
    ctx.written = not ctx.written
    return AS_IT_IS(ctx, *gradients)


AS_IT_IS = transformer.SumsOverWords.backward


def usual_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear` in the type of `x`."""
    if bias is not None:
        bias = bias.to(x.dtype)
    return F.linear(x, weight.to(x.dtype), bias)


def alone(*_) -> int:
    """Leaves each short row by itself."""
    return 1


def four_dimensions(
    self: resnet.PointwiseConv2d,
    in_channels: int,
    out_channels: int,
    stride: int = 1,
) -> None:
    """A weight [out, in, 1, 1], which the compiler stores with one row a tile."""
    nn.Module.__init__(self)
    self.stride = stride
    self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 1, 1))


def usual_gelu(self: encoder_layers.GELU, x: Tensor) -> Tensor:
    """Computes GELU by erf."""
    return F.gelu(x)


def usual_pointwise(self: resnet.PointwiseConv2d, x: Tensor) -> Tensor:
    """Convolves with the weight of `four_dimensions`."""
    return F.conv2d(x, self.weight, stride=self.stride)


@dataclass(frozen=True)
class Replacement:
    """What stands in the usual step in place of a form: an attribute of a module or a class."""

    owner: object
    name: str
    value: Callable


@dataclass(frozen=True)
class Form:
    """The step to look at, and what makes it the usual one."""

    step: Row
    replaced: tuple[Replacement, ...]


def form(step: Row, owner: object, name: str, value: Callable) -> Form:
    """Returns a form that one replacement makes the usual one."""
    return Form(step, (Replacement(owner, name, value),))


FORMS = {
    "LayerNorm: both moments in one reading": form(
        GLUE,
        layers.LayerNorm,
        "forward",
        native_norm,
    ),
    "attention keeps one tensor of scores": form(GLUE, layers, "attention", usual_attention),
    "the softmax's sums from the result": form(
        GLUE,
        layers.AttentionCore,
        "backward",
        staticmethod(usual_sums),
    ),
    "GELU by tanh": form(GLUE, encoder_layers.GELU, "forward", usual_gelu),
    "linear as one dot_general": form(GLUE, layers, "linear", usual_linear),
    "short rows side by side": form(SHORT, layers, "rows_together", alone),
    "short pairs side by side": form(TRANSLATION, transformer, "rows_together", alone),
    "softmax without dropout, clamped before its cast": form(
        TRANSLATION, layers.AttentionCore, "forward", staticmethod(cast_at_once)
    ),
    "sums over the words in parts of the tokens": form(
        TRANSLATION,
        transformer,
        "SumsOverWords",
        AtOnce,
    ),
    "the logits' gradient written on v6e, computed twice on the others": form(
        TRANSLATION, transformer.SumsOverWords, "backward", staticmethod(other_gradient)
    ),
    "BatchNorm in plain operations": form(
        IMAGES,
        resnet.BatchNorm,
        "forward",
        nn.BatchNorm2d.forward,
    ),
    "weights of 1x1 convolutions as matrices": Form(
        IMAGES,
        (
            Replacement(resnet.PointwiseConv2d, "__init__", four_dimensions),
            Replacement(resnet.PointwiseConv2d, "forward", usual_pointwise),
        ),
    ),
}


def compile_one(name: str) -> dict:
    """Compiles the step of the command line, small in depth, with a form replaced.

    Args:
        name: of the form; KEPT: none.
    Returns:
        The report.
    """
    published = encoders.published

    def shallow(model: str):
        config = published(model)
        config.num_hidden_layers = LAYERS
        return config

    encoders.published = shallow
    for arch, sizes in transformer.ARCHITECTURES.items():
        small = replace(sizes, encoder_layers=LAYERS, decoder_layers=LAYERS)
        transformer.ARCHITECTURES[arch] = small
    resnet.LAYERS["resnet50"] = (1, 1, 1, 1)

    if name != KEPT:
        for each in FORMS[name].replaced:
            # A form that has another name by now is an error, not a step as it is.
            getattr(each.owner, each.name)
            setattr(each.owner, each.name, each.value)
    return compiling.main()


def cell(usual: dict, ours: dict) -> str:
    """Returns cycles, bytes and memory: with the usual form -> with ours."""
    if "cycles" not in usual or "cycles" not in ours:
        return f"{memory(usual)} -> {memory(ours)}"

    share = ours["cycles"] / usual["cycles"]
    cycles = f"{usual['cycles'] / 1e6:.1f} -> {ours['cycles'] / 1e6:.1f}M ({share:.2f})"
    moved = f"{usual['bytes_accessed'] / 1e9:.1f} -> {ours['bytes_accessed'] / 1e9:.1f} GB"
    return f"{cycles}, {moved}, {memory(usual)} -> {memory(ours)} GiB"


def page(figures: dict) -> str:
    """Returns docs/tpu/forms.md, of {generation: {step: {form: record}}}."""
    rows = []
    for name, each in FORMS.items():
        cells = []
        for generation in GENERATIONS:
            records = figures.get(generation, {}).get(each.step.name, {})
            if name in records and KEPT in records:
                cells.append(cell(records[name], records[KEPT]))
            else:
                cells.append("not run")
        rows.append([name, each.step.name, *cells])

    of_one = next(iter(figures.values()))
    version = next(iter(of_one.values()))[KEPT]["libtpu"]
    return f"""# What each form gains on each generation

Written by `python -m research.forms`; do not edit. Estimates of libtpu {version} (effort full) for whole train steps of
two layers (ResNet: a block a stage) on one chip: with the usual form in one place -> as it is. GB are what operations
read and write, in on-chip memory as well as in HBM.

{table(["form", "step", *GENERATIONS], rows)}
"""


def arranged(figures: dict) -> dict:
    """Returns the figures in the order of the generations, of the steps and of their forms."""
    order_of_steps = dict.fromkeys(each.step.name for each in FORMS.values())
    order_of_forms = [KEPT, *FORMS]
    found = {}
    for generation, by_step in results.in_order(figures, GENERATIONS).items():
        found[generation] = {}
        for step, by_form in results.in_order(by_step, order_of_steps).items():
            found[generation][step] = results.in_order(by_form, order_of_forms)
    return found


def measure(names: list[str], generation: str, figures: dict, path: Path) -> None:
    """Compiles forms and the steps as they are for a generation; adds to figures, file and page."""
    rows = [FORMS[name].step for name in names]
    jobs = [(row, KEPT) for row in dict.fromkeys(rows)]
    jobs += list(zip(rows, names, strict=True))

    def one(job: tuple[Row, str]) -> dict:
        row, name = job
        variables = {FORM: name}
        return compiled(row, GENERATIONS[generation], "full", "research.forms", variables)

    with two_at_a_time() as pool:
        for (row, name), report in zip(jobs, pool.map(one, jobs), strict=True):
            records = figures.setdefault(generation, {}).setdefault(row.name, {})
            records[name] = results.record(report, READ)
            results.save(path, arranged(figures))
            (DOCS / "forms.md").write_text(page(figures))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="", help="part of a form's or step's name (all)")
    parser.add_argument("generation", nargs="?", choices=[*GENERATIONS], help="default: all")
    parser.add_argument("--print", action="store_true", help="compile nothing")
    options = parser.parse_args()
    part = options.name.lower()
    names = [name for name, each in FORMS.items() if part in f"{name}, {each.step.name}".lower()]
    if not names:
        known = ", ".join(FORMS)
        missing = f"no form or step has {options.name!r} in its name"
        parser.error(f"{missing}; there are the forms {known}")

    path = results.FOLDER / "forms.json"
    figures = results.load(path)
    if options.print:
        if not figures:
            raise InputError(f"{path} has no figures yet: leave --print out")
        text = page(figures)
        (DOCS / "forms.md").write_text(text)
        print(text)
        return

    libtpu.installed(libtpu.NEWEST)  # rather than an error of each
    generations = [options.generation] if options.generation else [*GENERATIONS]
    for generation in generations:
        measure(names, generation, figures, path)


if __name__ == "__main__":
    if FORM in os.environ:
        sys.exit(0 if compile_one(os.environ[FORM]).get("fits", True) else 1)
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
