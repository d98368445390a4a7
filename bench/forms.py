"""What the forms that the TPU's compiler rewards gain on each generation: a step with each, and with the usual one.

    python -m bench.forms                   every form on v5e, v6e, v5p and v4; libtpu: `make guards` installs it
    python -m bench.forms LayerNorm v6e     those with "LayerNorm" in their name or their step's, on one of them

Steps of the scripts with two layers (ResNet: a block a stage) at their published widths, compiled for one chip with
effort full, our step as it is and with one form replaced. The figures are kept in docs/tpu/forms.json, the table in
docs/tpu/forms.md. Cycles are estimates, which leave out what docs/tpu/stock.md says.
"""

import os

if __name__ == "__main__":
    os.environ["XLA_IR_DEBUG"] = os.environ["XLA_HLO_DEBUG"] = "1"  # as in tpu/compiler/compile.py

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tpu_cycles import CHIPS, ONE
from errors import InputError
from models import encoder_layers, encoders, layers, resnet, transformer
from tpu.compiler import compile as compiling
from tpu.compiler import libtpu
from tpu.compiler.pages import DOCS, Row, compiled, load, memory, save, table, two_at_a_time

FORM = "FORM"  # the environment variable that names what a compiling process replaces
KEPT = "as it is"
LAYERS = 2
READ = ("libtpu", "fits", "needed", "memory", "cycles", "bytes_accessed")  # of a report, what the table needs
GLUE = Row("GLUE, 128 x 128", "bert", "full", 128, "mrpc")
SHORT = Row("GLUE, 256 x 64", "bert", "full", 256, "mrpc", ("--lengths", "64"))
TRANSLATION = Row("Transformer base, 256 x 64", "transformer", "tpu", 256)
IMAGES = Row("ResNet, 128 x 224 px", "resnet50", "full", 128)


def native_norm(self: layers.LayerNorm, x: Tensor) -> Tensor:
    """Two readings of a row, one for the mean and one for the variance."""
    wide = F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)
    return wide.to(layers.compute_dtype(x))


def usual_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
    """Autograd's backward pass keeps weights, their mask and what it leaves of them."""
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k).float() + mask, -1).to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", layers.dropout(weights, dropout, True), v)


def usual_sums(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """AttentionCore's backward pass with the softmax's sums over the keys."""
    v, signed, _ = ctx.saved_tensors
    to_v = torch.einsum("bhqk,bqhd->bkhd", signed.clamp(min=0) * ctx.scale, gradient)
    to_weights = torch.einsum("bqhd,bkhd->bhqk", gradient, v).float()
    to_weights = torch.where(signed > 0, to_weights * ctx.scale, torch.zeros((), device=v.device))
    weights = signed.abs().float()
    sums = (weights * to_weights).sum(-1, keepdim=True)
    return (weights * (to_weights - sums)).to(v.dtype), to_v, None, None


def cast_at_once(ctx, scores: Tensor, v: Tensor, mask: Tensor, _: float) -> Tensor:
    """AttentionCore's forward pass without dropout, with nothing between the softmax and its cast."""
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
    """SumsOverWords' gradient written where it is computed again, and the other way round."""
    ctx.written = not ctx.written
    return AS_IT_IS(ctx, *gradients)


AS_IT_IS = transformer.SumsOverWords.backward


def usual_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def alone(*_) -> int:
    """Short rows one by one."""
    return 1


def four_dimensions(self: resnet.PointwiseConv2d, in_channels: int, out_channels: int, stride: int = 1) -> None:
    """A weight [out, in, 1, 1], which the compiler stores with one row a tile."""
    nn.Module.__init__(self)
    self.stride = stride
    self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 1, 1))


# What replaces a form: the step to look at, and (where, name, replacement).
FORMS: dict[str, tuple[Row, list[tuple[object, str, Callable]]]] = {
    "LayerNorm: both moments in one reading": (GLUE, [(layers.LayerNorm, "forward", native_norm)]),
    "attention keeps one tensor of scores": (GLUE, [(layers, "attention", usual_attention)]),
    "the softmax's sums from the result": (GLUE, [(layers.AttentionCore, "backward", staticmethod(usual_sums))]),
    "GELU by tanh": (GLUE, [(encoder_layers.GELU, "forward", lambda self, x: F.gelu(x))]),
    "linear as one dot_general": (GLUE, [(layers, "linear", usual_linear)]),
    "short rows side by side": (SHORT, [(layers, "rows_together", alone)]),
    "short pairs side by side": (TRANSLATION, [(transformer, "rows_together", alone)]),
    "softmax without dropout, clamped before its cast": (
        TRANSLATION,
        [(layers.AttentionCore, "forward", staticmethod(cast_at_once))],
    ),
    "sums over the words in parts of the tokens": (TRANSLATION, [(transformer, "SumsOverWords", AtOnce)]),
    "the logits' gradient written on v6e, computed twice on the others": (
        TRANSLATION,
        [(transformer.SumsOverWords, "backward", staticmethod(other_gradient))],
    ),
    "BatchNorm in plain operations": (IMAGES, [(resnet.BatchNorm, "forward", nn.BatchNorm2d.forward)]),
    "weights of 1x1 convolutions as matrices": (
        IMAGES,
        [
            (resnet.PointwiseConv2d, "__init__", four_dimensions),
            (resnet.PointwiseConv2d, "forward", lambda self, x: F.conv2d(x, self.weight, stride=self.stride)),
        ],
    ),
}


def compile_one(form: str) -> dict:
    """Compiles the step of the command line, small in depth, with the form replaced; returns its report."""
    published = encoders.published

    def shallow(model: str):
        config = published(model)
        config.num_hidden_layers = LAYERS
        return config

    encoders.published = shallow
    for name, arch in transformer.ARCHITECTURES.items():
        transformer.ARCHITECTURES[name] = replace(arch, encoder_layers=LAYERS, decoder_layers=LAYERS)
    resnet.LAYERS["resnet50"] = (1, 1, 1, 1)
    for where, name, replacement in FORMS[form][1] if form != KEPT else ():
        getattr(where, name)  # a form that has another name by now is an error, not a step as it is
        setattr(where, name, replacement)
    return compiling.main()


def cell(usual: dict, ours: dict) -> str:
    """Cycles, bytes and memory: with the usual form -> with ours."""
    if "cycles" not in usual or "cycles" not in ours:
        return f"{memory(usual)} -> {memory(ours)}"
    cycles = f"{usual['cycles'] / 1e6:.1f} -> {ours['cycles'] / 1e6:.1f}M ({ours['cycles'] / usual['cycles']:.2f})"
    moved = f"{usual['bytes_accessed'] / 1e9:.1f} -> {ours['bytes_accessed'] / 1e9:.1f} GB"
    return f"{cycles}, {moved}, {memory(usual)} -> {memory(ours)} GiB"


def page(figures: dict) -> str:
    """docs/tpu/forms.md. `figures`: {generation: {step: {form: report}}}."""
    rows = []
    for form, (step, _) in FORMS.items():
        reports = [figures.get(chip, {}).get(step.name, {}) for chip in ("v5e", *CHIPS)]
        cells = [cell(each[form], each[KEPT]) if {form, KEPT} <= each.keys() else "not run" for each in reports]
        rows.append([form, step.name, *cells])
    version = next(each[KEPT]["libtpu"] for found in figures.values() for each in found.values())
    return f"""# What each form gains on each generation

Written by `python -m bench.forms`; do not edit. Estimates of libtpu {version} (effort full) for whole train steps of
two layers (ResNet: a block a stage) on one chip: with the usual form in one place -> as it is. GB are what operations
read and write, in on-chip memory as well as in HBM.

{table(["form", "step", "v5e", *CHIPS], rows)}
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="part of the forms' or their steps' names (default: all)")
    parser.add_argument("generation", nargs="?", choices=("v5e", *CHIPS), help="default: all")
    options = parser.parse_args()
    forms = [form for form, (row, _) in FORMS.items() if options.name.lower() in f"{form}, {row.name}".lower()]
    if not forms:
        parser.error(f"no form or step has {options.name!r} in its name; there are the forms {', '.join(FORMS)}")
    path = DOCS / "forms.json"
    figures = load(path)
    libtpu.installed(libtpu.NEWEST)  # rather than an error of each
    for generation in [options.generation] if options.generation else ("v5e", *CHIPS):
        topology, found = {"v5e": ONE, **CHIPS}[generation], figures.setdefault(generation, {})
        rows = dict.fromkeys(FORMS[form][0] for form in forms)
        jobs = [(row, KEPT) for row in rows] + [(FORMS[form][0], form) for form in forms]
        with two_at_a_time() as pool:
            variables = [{FORM: form} for _, form in jobs]
            rest = ([value] * len(jobs) for value in (topology, "full", "bench.forms"))
            reports = pool.map(compiled, [row for row, _ in jobs], *rest, variables)
            for (row, form), report in zip(jobs, reports, strict=True):
                found.setdefault(row.name, {})[form] = {key: report[key] for key in READ if key in report}
                save(path, figures)
                path.with_suffix(".md").write_text(page(figures))


if __name__ == "__main__":
    if FORM in os.environ:
        sys.exit(0 if compile_one(os.environ[FORM]).get("fits", True) else 1)
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
