"""Which of the operations that scripts use most run on XLA, and what to write for the others.

    run      python -m bench.operations

writes docs/operations.md from CASES. tests/test_operations.py runs them, so each verdict is true.
The page shows the substitutes' code as it stands here: after a change write the page again.
"""

import argparse
import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import ops

from train.common import device
from train.common.xla import backend as xla
from train.common.xla.backend import fallback_counts

PAGE = Path(__file__).parent.parent / "docs/operations.md"
INTRODUCTION = """\
# Which operations run on XLA

Written by `python -m bench.operations`; do not edit.

Look an operation up before you build a step on it; where the last column has something, write that. Measured with
torch_xla 2.9.0 on XLA's CPU backend in float32: tests/test_operations.py runs operations and substitutes, forward and
backward, and compares them with eager PyTorch. replication_pad1d, replication_pad2d (both `F.pad`), max_unpool2d and
max_unpool3d need no substitute.

| on XLA | operations | means |
|---|---|---|
{verdicts}

torch_xla's `elu_backward` takes the input for the output (it ignores `is_result`): where x < 0 the gradient of ELU and
CELU is x + 1 in place of exp(x), on all devices. On a TPU the backward of `F.interpolate`, nearest and bilinear, is a
custom call. (Both read in aten_xla_type.cpp of 2.9.0.) `ops` is torchvision.ops; inputs: {shapes}.

"""

# ---- substitutes, which the page shows in full ---------------------------------------------------


def resize(image, size, **how):
    """F.interpolate of images [N, C, H, W] as a matrix product an axis; PyTorch makes the weights, on the host."""
    for axis, new in zip((2, 3), size, strict=True):
        old = image.shape[axis]
        weights = F.interpolate(torch.eye(old)[None, None], (old, new), **how)[0, 0].to(image)
        image = torch.tensordot(image, weights, ([axis], [0])).movedim(-1, axis)
    return image


def grid_sample(image, grid):
    """F.grid_sample, bilinear with zeros outside and align_corners=False, as four gathers."""
    height, width = image.shape[2:]
    place = ((grid + 1) * torch.tensor([width, height]).to(grid) - 1) / 2
    corner, total = place.detach().floor(), 0
    for dx, dy in (0, 0), (1, 0), (0, 1), (1, 1):
        x, y = corner[..., 0] + dx, corner[..., 1] + dy
        weight = (1 - (place[..., 0] - x).abs()) * (1 - (place[..., 1] - y).abs())
        weight = weight * ((x >= 0) & (x < width) & (y >= 0) & (y < height))
        index = (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).long().flatten(1)
        pixels = image.flatten(2).gather(2, index[:, None].expand(-1, image.shape[1], -1))
        total = total + pixels.unflatten(2, grid.shape[1:3]) * weight[:, None]
    return total


def roi_align(image, boxes, size):
    """torchvision's roi_align(image, [boxes], size, sampling_ratio=2) of one image [1, C, H, W]."""
    extent = torch.tensor(image.shape[:1:-1]).to(boxes)  # width, height
    low, span = boxes[:, None, :2], (boxes[:, None, 2:] - boxes[:, None, :2]).clamp(min=1)
    steps = (torch.arange(2 * size, device=boxes.device) + 0.5) / (2 * size)
    x, y = (low + steps[:, None] * span).clamp(min=0).minimum(extent - 1).unbind(-1)
    place = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), -1)
    samples = grid_sample(image.expand(len(boxes), -1, -1, -1), (2 * place + 1) / extent - 1)
    return F.avg_pool2d(samples, 2)


def kept_boxes(boxes, scores, threshold):
    """1 for each box that torchvision's nms keeps, otherwise 0. The graph grows with the number of boxes."""
    order = scores.argsort(descending=True)
    overlap = ops.box_iou(boxes[order], boxes[order]) > threshold
    later, kept = torch.arange(len(boxes), device=boxes.device), torch.ones_like(order)
    for place in range(len(boxes)):
        kept = torch.where(overlap[place] & (kept[place] > 0) & (later > place), 0, kept)
    return torch.zeros_like(kept).scatter(0, order, kept)


def unique_inverse(ids):
    """The `inverse` of torch.unique for ids [N]: the rank of each id among the different ones."""
    ordered, order = ids.sort()
    rank = F.pad((ordered[1:] != ordered[:-1]).long().cumsum(0), (1, 0))
    return torch.zeros_like(rank).scatter(0, order, rank)


MEANING = {
    "lowered": "part of the step's graph, with the results and gradients of eager PyTorch",
    "falls back": (
        "the host computes it, in the middle of each step: a strict step stops and names it"
    ),
    "backward falls back": "the same for its gradient; evaluation is not concerned",
    "reads a value": (
        "its shape depends on a number of the device: a strict step stops and names the line"
    ),
    "refuses": "raises an error",
    "**wrong gradient**": "lowered; **no strict step notices it**",
}
LOWERED, FALLS, BACKWARD, READS, REFUSES, WRONG = MEANING

_random = torch.Generator().manual_seed(0)
_sizes = {
    "signal": (2, 4, 6),
    "image": (2, 4, 6, 6),
    "volume": (2, 3, 4, 4, 4),
    "kernel": (4, 4, 3, 3),
    "grid": (2, 5, 5, 2),
    "x": (5, 4),
    "y": (5, 4),
    "query": (2, 2, 3, 4),
    "table": (8, 4),
    "gain": (4,),
}
INPUTS = {name: torch.randn(size, generator=_random) for name, size in _sizes.items()}
INPUTS |= {
    "boxes": torch.tensor([[0.3, 0.2, 4.1, 3.7], [0.5, 0.4, 4.3, 3.9], [2.2, 1.6, 5.4, 5.3]]),
    "scores": torch.tensor([0.3, 0.9, 0.7]),
    "bins": torch.tensor([-1.2, -0.3, 0.1, 0.9]),
    "ids": torch.randint(8, (2, 3), generator=_random),
    "labels": torch.tensor([3, 1, 0, 1, 2]),
    "each": torch.tensor([1, 0, 2, 1, 2]),
}


@dataclass(frozen=True)
class Case:
    """An operation of the page."""

    code: str  # an expression of INPUTS
    verdict: str = LOWERED
    instead: str = ""  # an expression that gives the same, forward and backward, and is lowered


CASES = {
    "Vision": [
        Case("F.pad(signal, (1, 2), mode='replicate')"),  # replication_pad1d
        Case("F.pad(image, (1, 2, 3, 0), mode='replicate')"),  # replication_pad2d
        Case("F.max_unpool2d(*F.max_pool2d(image, 2, return_indices=True), 2, output_size=(7, 6))"),
        Case("F.max_unpool3d(*F.max_pool3d(volume, 2, return_indices=True), 2)"),
        Case("F.conv_transpose2d(image, kernel, stride=2)"),
        Case("F.group_norm(image, 2, gain)"),
        Case("F.adaptive_avg_pool2d(image, 3)"),
        Case("F.adaptive_avg_pool2d(image, 4)", FALLS, "resize(image, (4, 4), mode='area')"),
        Case("F.interpolate(image, (8, 9))", BACKWARD, "resize(image, (8, 9))"),
        Case(
            "F.interpolate(image, (8, 9), mode='bilinear')",
            BACKWARD,
            "resize(image, (8, 9), mode='bilinear')",
        ),
        Case(
            "F.interpolate(image, (8, 9), mode='bicubic')",
            FALLS,
            "resize(image, (8, 9), mode='bicubic')",
        ),
        Case("F.grid_sample(image, grid, align_corners=False)", FALLS, "grid_sample(image, grid)"),
        Case(
            "ops.roi_align(image[:1], [boxes], 2, 1, 2)",
            FALLS,
            "roi_align(image[:1], boxes.detach(), 2)",
        ),
        Case(
            "F.one_hot(ops.nms(boxes, scores, 0.5), 3).sum(0)",
            FALLS,
            "kept_boxes(boxes, scores, 0.5)",
        ),
        Case(
            "F.unfold(image, 3)",
            FALLS,
            "F.conv2d(image, torch.eye(36).view(36, 4, 3, 3).to(image)).flatten(2)",
        ),
        Case(
            "F.channel_shuffle(image, 2)",
            FALLS,
            "image.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)",
        ),
        Case("F.elu(x)", WRONG, "torch.where(x > 0, x, x.clamp(max=0).expm1())"),
        Case(
            "F.selu(x)",
            WRONG,
            "1.0507010 * torch.where(x > 0, x, 1.6732632 * x.clamp(max=0).expm1())",
        ),
    ],
    "Text": [
        Case("F.embedding(ids, table, padding_idx=0)"),
        Case("F.scaled_dot_product_attention(query, query, query, is_causal=True)"),
        Case("F.layer_norm(x, (4,), gain)"),
        Case("F.gelu(x)"),
        Case("F.cross_entropy(x, labels - 1, ignore_index=-1, label_smoothing=0.1)"),
        Case("x.masked_fill(x > 0, -1)"),
        Case("x.cumsum(0)"),
        Case("x.sort(0)"),
        Case("x.topk(3, 0)"),
        Case("x.gather(1, labels[:, None])"),
        Case("torch.multinomial(F.one_hot(labels, 4).float(), 1)"),
        Case(
            "torch.multinomial(x.detach().softmax(1), 4).sort().values",
            FALLS,
            "(x.detach() - torch.empty_like(x).exponential_().log()).topk(4).indices.sort().values",
        ),
        Case("F.glu(x)", BACKWARD, "x[:, :2] * x[:, 2:].sigmoid()"),
        Case(
            "torch.view_as_real(torch.polar(x * x, y))",
            FALLS,
            "torch.stack([x * x * y.cos(), x * x * y.sin()], -1)",
        ),
        Case("x[x > 0].sum()", FALLS, "torch.where(x > 0, x, 0).sum()"),
        Case(
            "x.masked_select(x > 0).mean()",
            FALLS,
            "torch.where(x > 0, x, 0).sum() / (x > 0).sum()",
        ),
        Case(
            "x.repeat_interleave(each, 0)",
            FALLS,
            "x[(each.cumsum(0) <= torch.arange(6).to(each)[:, None]).sum(1)]",
        ),
        Case("F.one_hot(labels)", READS, "F.one_hot(labels, 4)"),
    ],
    "Recommendation": [
        Case("table.index_add(0, labels, x)"),
        Case("table.scatter_add(0, ids, x[:2, :3])"),
        Case("table.index_put((labels,), x, accumulate=True)"),
        Case("table.scatter_reduce(0, ids, x[:2, :3], 'amax')"),
        Case(
            "torch.zeros_like(x).scatter_reduce("
            "0, labels[:, None].expand(5, 4), y, 'mean', include_self=False)",
            FALLS,
            "torch.zeros_like(x).index_add(0, labels, y)"
            " / F.one_hot(labels, 5).sum(0).clamp(min=1)[:, None]",
        ),
        Case("F.embedding_bag(ids, table)", FALLS, "F.embedding(ids, table).mean(1)"),
        Case("F.embedding(ids, table, sparse=True)", REFUSES, "F.embedding(ids, table)"),
        Case("torch.unique(labels, return_inverse=True)[1]", FALLS, "unique_inverse(labels)"),
        Case("torch.bucketize(x, bins)", FALLS, "(bins < x[..., None]).sum(-1)"),
        Case("torch.isin(ids, labels)", FALLS, "(ids[..., None] == labels).any(-1)"),
        Case("torch.bincount(labels, minlength=4)", FALLS, "F.one_hot(labels, 4).sum(0)"),
        Case("torch.cdist(x, y)", BACKWARD, "(x[:, None] - y).square().sum(-1).sqrt()"),
        Case("x.median(0).values", FALLS, "x.sort(0).values[2]"),
        Case("F.huber_loss(x, y, delta=0.5)", FALLS, "0.5 * F.smooth_l1_loss(x, y, beta=0.5)"),
    ],
}


@dataclass(frozen=True)
class Outcome:
    """What an expression gives on a device."""

    verdict: str
    tensors: list[Tensor]  # results, then gradients; of an expression that raises: none


def run(code: str, place: torch.device) -> Outcome:
    """Evaluates an expression and its gradient on a device. What is lowered is not yet computed."""
    used = compile(code, code, "eval").co_names
    inputs = {}
    for name, value in INPUTS.items():
        if name in used:
            inputs[name] = value.clone().to(place)
    reals = [value.requires_grad_() for value in inputs.values() if value.is_floating_point()]

    fallbacks_before = fallback_counts()
    reads_before = xla.host_reads()
    try:
        results = eval(code, globals(), inputs)
        if isinstance(results, Tensor):
            results = [results]
        forward_falls_back = fallback_counts() != fallbacks_before
        for result in results:
            if result.requires_grad:
                numbers = torch.arange(1.0, result.numel() + 1).sin()
                result.backward(numbers.view(result.shape).to(place))
    except RuntimeError:
        return Outcome(REFUSES, [])

    tensors = [result.detach() for result in results]
    for real in reals:
        if real.grad is not None:
            tensors.append(real.grad.to_dense() if real.grad.is_sparse else real.grad)

    if forward_falls_back:
        return Outcome(FALLS, tensors)
    if fallback_counts() != fallbacks_before:
        return Outcome(BACKWARD, tensors)
    if xla.host_reads() != reads_before:
        return Outcome(READS, tensors)
    return Outcome(LOWERED, tensors)


def measure(mesh: device.Mesh) -> list[tuple[Case, str, str]]:
    """Returns each case with its verdict and its substitute's. All that is lowered is one graph."""
    cases = _all_cases()
    cpu = torch.device("cpu")
    expected = [run(case.code, cpu) for case in cases]

    outcomes = []
    substitutes = []
    for case in cases:
        outcomes.append(run(case.code, mesh.device))
        substitutes.append(run(case.instead or case.code, mesh.device))
    device.run_pending()  # nothing is read before

    measured = []
    rows = zip(cases, expected, outcomes, substitutes, strict=True)
    for case, wanted, outcome, substitute in rows:
        verdict = _verdict(outcome, wanted)
        substitute_verdict = _verdict(substitute, wanted)
        measured.append((case, verdict, substitute_verdict))
    return measured


def _all_cases() -> list[Case]:
    """Returns the cases of all fields, in the order of the page."""
    cases = []
    for of_field in CASES.values():
        cases += of_field
    return cases


def _verdict(outcome: Outcome, wanted: Outcome) -> str:
    """Returns the outcome's verdict, or WRONG where its tensors are not those of the CPU."""
    if outcome.verdict == REFUSES or _same(outcome.tensors, wanted.tensors):
        return outcome.verdict
    return WRONG


def _same(tensors: list[Tensor], wanted: list[Tensor]) -> bool:
    """Tells whether shapes, types and values, within float32's rounding, are those of the CPU."""
    if len(tensors) != len(wanted):
        return False
    for one, other in zip(device.read(tensors), wanted, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if not torch.allclose(one, other, rtol=1e-5, atol=1e-5):
            return False
    return True


def page() -> str:
    """Returns docs/operations.md."""
    parts = [_introduction()]
    for field, cases in CASES.items():
        parts.append(_section(field, cases))
    parts.append(_substitutes())
    return "".join(parts)


def _introduction() -> str:
    """Returns the page's top, with the number of operations of each verdict."""
    found = [case.verdict for case in _all_cases()]
    verdicts = []
    for verdict, meaning in MEANING.items():
        verdicts.append(f"| {verdict} | {found.count(verdict)} | {meaning} |")
    shapes = [f"{name} {[*value.shape]}" for name, value in INPUTS.items()]
    return INTRODUCTION.format(verdicts="\n".join(verdicts), shapes=", ".join(shapes))


def _section(field: str, cases: list[Case]) -> str:
    """Returns the table of a field's operations."""
    lines = [f"## {field}", "", "| operation | on XLA | instead |", "|---|---|---|"]
    for case in cases:
        instead = f"`{case.instead}`" if case.instead else ""
        lines.append(f"| `{case.code}` | {case.verdict} | {instead} |")
    return "\n".join(lines) + "\n\n"


def _substitutes() -> str:
    """Returns the code of the substitutes of more than a line."""
    functions = (resize, grid_sample, roi_align, kept_boxes, unique_inverse)
    code = "\n\n".join(inspect.getsource(function) for function in functions)
    return f"## Substitutes of more than a line\n\n```python\n{code}```\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    PAGE.write_text(page())
