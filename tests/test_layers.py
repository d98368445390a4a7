"""models/layers.py against plain autograd and PyTorch's own layers."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import layers, products
from models.layers import MASKED, LayerNorm, Linear, MultiHeadAttention, compute_dtype

BATCH, QUERIES, KEYS, HEADS, DIM = 3, 5, 7, 2, 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def attention_inputs(dtype: torch.dtype = torch.double) -> tuple[list[Tensor], Tensor, Tensor]:
    """([q, k, v], a mask that hides some keys of each row, a gradient of the result)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, length, HEADS, DIM) for length in (QUERIES, KEYS, KEYS, QUERIES)]
    *inputs, gradient = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    hidden = torch.rand(BATCH, 1, QUERIES, KEYS, generator=generator) < 0.3
    return inputs, hidden.float() * MASKED, gradient


def gradients(function, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """The result of function(*inputs), and the gradients of the inputs."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kept: Tensor | None, dropout: float) -> Tensor:
    """The textbook's, with a given dropout mask [B, H, Tq, Tk]."""
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) + mask, -1)
    if kept is not None:
        weights = weights * kept / (1 - layers.drop_share(dropout))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.usefixtures("compiled")
def test_attention_and_all_its_gradients_equal_autograds_in_float64(monkeypatch, dropout):
    inputs, mask, gradient = attention_inputs()
    mask[1, :, 2] = mask[2] = MASKED  # a query without any key, and a row
    kept = torch.rand(BATCH, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) >= dropout
    monkeypatch.setattr(layers, "kept", lambda *_: kept)
    if dropout:
        assert 0.1 < 1 - kept.double().mean() < 0.5, "some are dropped"
    plain = kept.double() if dropout else None
    expected = gradients(lambda q, k, v: plain_attention(q, k, v, mask, plain, dropout), inputs, gradient)
    got = gradients(lambda q, k, v: layers.attention(q, k, v, mask, dropout), inputs, gradient)
    torch.testing.assert_close(got, expected, **EXACT)  # of equal types, too
    if not dropout:  # PyTorch's kernel, which has no number for a query without any key
        mask[1, :, 2] = mask[2] = 0
        monkeypatch.setattr(layers, "NATIVE_DEVICES", ("cpu",))
        expected = gradients(lambda q, k, v: plain_attention(q, k, v, mask, None, 0.0), inputs, gradient)
        got = gradients(lambda *qkv: layers.attention(*qkv, mask), inputs, gradient)
        torch.testing.assert_close(got, expected, **EXACT)


def test_the_gradient_belongs_to_the_weights_that_the_forward_pass_dropped(form):
    # One key: the weight is 1 or dropped, so that v's gradient says which.
    q, k, v = (torch.randn(64, 1, 1, 2, dtype=torch.double, requires_grad=True) for _ in range(3))
    result = layers.attention(q, k, v, torch.zeros(1), dropout=0.25)
    result.sum().backward()
    dropped = (result == 0).all(-1).flatten()
    assert 4 < dropped.sum() < 32
    torch.testing.assert_close(v.grad[:, 0, 0, 0], torch.where(dropped, 0.0, 4 / 3).double())
    torch.testing.assert_close(result, torch.where(dropped[:, None, None, None], 0.0, v * 4 / 3))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.double, torch.float32, torch.bfloat16])
def test_queries_without_any_key_give_numbers_and_not_nan(form, dtype, dropout):
    inputs, mask, gradient = attention_inputs(dtype)
    mask[1] = MASKED  # every key of a row
    mask[0, :, 2] = MASKED  # of a query
    for value in gradients(lambda *qkv: layers.attention(*qkv, mask, dropout), inputs, gradient):
        assert value.dtype == dtype and value.isfinite().all()


def errors(function, inputs: list[Tensor], gradient: Tensor, exact: list[Tensor]) -> list[float]:
    """Of the result and the gradients in bfloat16, relative to `exact`."""
    got = gradients(function, inputs, gradient)
    assert all(value.dtype == torch.bfloat16 for value in got)
    return [((value - right).norm() / right.norm()).item() for value, right in zip(got, exact, strict=True)]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_in_bfloat16_is_no_less_exact_than_the_usual_under_autocast(monkeypatch, dropout):
    """Of scores in bfloat16, a softmax in float32, and weights in bfloat16 times a mask."""
    q, k, v, gradient = (torch.randn(2, 128, 4, 64).bfloat16() for _ in range(4))
    kept = torch.rand(2, 4, 128, 128) >= dropout
    monkeypatch.setattr(layers, "kept", lambda *_: kept)
    mask, inputs = torch.zeros(1), [q / 4, k, v]  # scores of a standard deviation of 2
    scale = kept / (1 - layers.drop_share(dropout))
    wide = [value.double() for value in inputs]
    exact = gradients(lambda q, k, v: plain_attention(q, k, v, mask, scale, 0.0), wide, gradient.double())

    def usual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k).float(), -1).bfloat16()
        return torch.einsum("bhqk,bkhd->bqhd", weights * scale.bfloat16(), v)

    ours = errors(lambda q, k, v: layers.attention(q, k, v, mask, dropout), inputs, gradient, exact)
    for error, other in zip(ours, errors(usual, inputs, gradient, exact), strict=True):
        assert error < other


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.double, 1e-12), (torch.float32, 2e-5)])
def test_layer_norm_equals_pytorchs_in_values_and_gradients(form, dtype, tolerance):
    ours, stock = LayerNorm(8).to(dtype), nn.LayerNorm(8).to(dtype)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    stock.load_state_dict(ours.state_dict())
    x, gradient = 3 * torch.randn(4, 5, 8, dtype=dtype) + 2, torch.randn(4, 5, 8, dtype=dtype)
    x[0, 0] = 1.5  # no variance: eps decides, and the gradient has a factor of eps ** -0.5
    for one, other in zip(*(gradients(norm, [x], gradient) for norm in (ours, stock)), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())
    found, expected = (torch.autograd.grad(norm(x), list(norm.parameters()), gradient) for norm in (ours, stock))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=10 * tolerance)


def test_layer_norm_in_bfloat16_is_no_less_exact_than_pytorchs(form):
    x, gradient = (torch.randn(64, 768) for _ in range(2))
    # A mean far larger than the spread: computed in bfloat16 all would be lost.
    inputs, gradient = [(20 + x).bfloat16()], gradient.bfloat16()
    norm = LayerNorm(768, eps=1e-12)
    exact = gradients(lambda x: F.layer_norm(x, (768,)), [inputs[0].double()], gradient.double())
    stock = errors(lambda x: F.layer_norm(x.float(), (768,)).bfloat16(), inputs, gradient, exact)
    for error, other in zip(errors(norm, inputs, gradient, exact), stock, strict=True):
        assert error < 1.01 * other


def test_a_layer_computes_in_the_type_of_its_input_and_its_parameters_stay_float32(form):
    x = torch.randn(2, 3, 8).bfloat16()
    for layer in (Linear(8, 8), LayerNorm(8), MultiHeadAttention(8, 2)):
        leaf = x.clone().requires_grad_()
        result = layer(leaf, leaf, torch.zeros(1)) if isinstance(layer, MultiHeadAttention) else layer(leaf)
        assert result.dtype == torch.bfloat16
        result.sum().backward()
        assert leaf.grad.dtype == torch.bfloat16
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in layer.parameters() if p.grad is not None)


def test_the_compute_type_is_autocasts_where_it_is_on(mesh):
    x = torch.zeros(1)
    assert compute_dtype(x) == torch.float32 and compute_dtype(x.double()) == torch.double
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert compute_dtype(x) == torch.float32
    on_xla = x.to(mesh.device)
    assert compute_dtype(on_xla) == torch.float32
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert (compute_dtype(on_xla), compute_dtype(x)) == (torch.bfloat16, torch.float32)


def test_multi_head_attention_equals_pytorchs_in_values_and_gradients(form):
    ours, stock = MultiHeadAttention(12, 3).double(), nn.MultiheadAttention(12, 3, batch_first=True).double()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    joined = {kind: [getattr(each, kind).detach() for each in projections] for kind in ("weight", "bias")}
    out = {f"out_proj.{name}": value for name, value in ours.out_proj.state_dict().items()}
    stock.load_state_dict(out | {f"in_proj_{kind}": torch.cat(values) for kind, values in joined.items()})
    x, memory = torch.randn(2, 5, 12, dtype=torch.double), torch.randn(2, 7, 12, dtype=torch.double)
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[0, :3] = True
    mask, gradient = hidden[:, None, None].float() * MASKED, torch.randn(2, 5, 12, dtype=torch.double)

    def pytorchs(x: Tensor, memory: Tensor) -> Tensor:
        return stock(x, memory, memory, key_padding_mask=hidden, need_weights=False)[0]

    got = gradients(lambda x, memory: ours(x, memory, mask), [x, memory], gradient)
    expected = gradients(pytorchs, [x, memory], gradient)
    torch.testing.assert_close(got, expected, **EXACT)
    assert not got[2][hidden].any(), "masked keys take no part at all"
    ours(x, memory, mask).backward(gradient)
    pytorchs(x, memory).backward(gradient)
    for kind in ("weight", "bias"):
        joined = torch.cat([getattr(projection, kind).grad for projection in projections])
        wanted = [getattr(stock, f"in_proj_{kind}").grad, getattr(stock.out_proj, kind).grad]
        torch.testing.assert_close([joined, getattr(ours.out_proj, kind).grad], wanted, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="a width of 10 does not divide into 4 heads"):
        MultiHeadAttention(10, 4)


def test_attention_on_xla_drops_weights_and_makes_up_for_them(mesh):
    ones = torch.ones(4, 64, 1, 4).to(mesh.device)
    zeros, none = torch.zeros_like(ones), torch.zeros(1).to(mesh.device)
    dropped = layers.attention(zeros, zeros, ones, none, 0.25).cpu()  # its share of the attention weights
    torch.testing.assert_close(dropped.mean().item(), 1.0, atol=0.03, rtol=0)
    assert len(dropped.unique()) > 10


@pytest.mark.parametrize("probability", [0.0001, 0.1, 0.3, 0.5])
def test_the_share_that_is_dropped_is_exactly_the_one_that_is_made_up_for(probability):
    share = layers.drop_share(probability)
    assert abs(share - probability) <= 1 / 2048 and share > 0
    masks = torch.stack([layers.kept((4, 64, 256), probability, torch.device("cpu")) for _ in range(16)])
    deviation = (share * (1 - share) / masks.numel()) ** 0.5
    assert abs((~masks).double().mean().item() - share) < 4 * deviation
    assert not torch.equal(masks[0], masks[1])


def correlations(masks: Tensor) -> Tensor:
    """Of any two rows: those of `masks` [N, rows, columns], [N * pairs]."""
    above = torch.ones(masks.shape[1], masks.shape[1], dtype=torch.bool).triu(1)
    return torch.cat([torch.corrcoef(rows)[above] for rows in masks])


def test_rows_columns_and_calls_are_as_independent_as_with_rand():
    size, count = 256, 8
    calls = [layers.kept((count, size, size), 0.1, torch.device("cpu")).float() for _ in range(count)]
    truly = (torch.rand(count, size, size) >= 0.1).float()
    own, each = calls[0], truly.flatten(1)[None]
    across = torch.stack([call[0].flatten() for call in calls])[None]  # the same places of several calls
    cases = {"rows": (own, truly), "columns": (own.mT, truly.mT), "calls": (across, each)}
    for kind, (ours, usual) in (cases | {"heads": (own.flatten(1)[None], each)}).items():
        got, expected = correlations(ours), correlations(usual)
        assert abs(got.mean()) < 4 * expected.std() / len(got) ** 0.5 + 1e-4, kind
        assert abs(got.std() / expected.std() - 1) < (0.02 if len(got) > 1000 else 0.6), kind
        assert got.abs().max() < 1.4 * expected.abs().max() + 0.01, kind
    # How many are dropped in a row, and in a column: as spread as a binomial.
    for axis in (1, 2):
        counts = (1 - own).sum(axis).flatten()
        assert abs(counts.var() / (size * 0.1 * 0.9) - 1) < 0.15
    # Neighbours in squares of 2 x 2: all sixteen patterns as often as chance has them.
    squares = own[:, ::2, ::2] * 8 + own[:, ::2, 1::2] * 4 + own[:, 1::2, ::2] * 2 + own[:, 1::2, 1::2]
    observed = torch.bincount(squares.flatten().long(), minlength=16).double()
    kept = torch.tensor([bin(pattern).count("1") for pattern in range(16)])
    share = layers.drop_share(0.1)
    chance = (1 - share) ** kept * share ** (4 - kept) * squares.numel()
    assert ((observed - chance).square() / chance).sum() < 37.7  # chi-square, 15 degrees of freedom, 0.1 %


def test_dropout_on_xla_scales_what_it_keeps_and_its_gradient_has_the_same_mask(mesh):
    x = torch.randn(4, 64, 96).to(torch.bfloat16)
    for case in (x, x.float(), x[0, 0].float()):
        own = case.to(mesh.device).requires_grad_()
        result = layers.Dropout(0.25)(own)
        result.sum().backward()
        result, gradient = result.detach().cpu(), own.grad.cpu()
        dropped = result == 0
        assert result.dtype == case.dtype and 0.1 < dropped.float().mean() < 0.4
        torch.testing.assert_close(result, torch.where(dropped, 0.0, case.float() / 0.75).to(case.dtype))
        torch.testing.assert_close(gradient, torch.where(dropped, 0.0, 1 / 0.75).to(case.dtype))


def test_the_mask_on_xla_is_the_cpus_of_the_same_seed(monkeypatch, mesh):
    """With torch's own generator there is no such thing; integers and the few float32 operations are the same."""
    drawn = torch.tensor(0.3)
    monkeypatch.setattr(layers.torch, "rand", lambda shape, device: drawn.to(device))
    expected = layers.kept((4, 2, 64, 64), 0.1, torch.device("cpu"))
    got = layers.kept((4, 2, 64, 64), 0.1, mesh.device).cpu()
    # A product and a sum may be rounded once (fused) or twice.
    assert (got == expected).double().mean() > 0.995


def test_exact_products_are_einsums_in_every_equation_of_the_models(mesh, request):
    """Where float32 is to be exact, as on a TPU with --precision float32; gradients, too."""
    text = "".join(path.read_text() for path in Path(layers.__file__).parent.glob("*.py"))
    equations = set(re.findall(r'(?<!torch\.)einsum\(\s*"([a-z,]+->[a-z]+)"', text))
    assert len(equations) >= 12
    assert torch.backends.cuda.matmul.fp32_precision == "none", "on XLA's CPU backend the TPU's forms are tested"
    request.addfinalizer(lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "none"))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for equation in sorted(equations):
        terms = equation.split("->")[0].split(",")
        sizes = dict(zip(sorted(set("".join(terms))), (2, 3, 4, 5, 6, 7), strict=False))
        plain = [torch.randn([sizes[i] for i in term]).requires_grad_() for term in terms]
        moved = [x.detach().to(mesh.device).requires_grad_() for x in plain]
        expected, found = torch.einsum(equation, *plain), products.einsum(equation, *moved)
        expected.square().sum().backward()
        found.square().sum().backward()
        for one, other in [(found, expected), *((x.grad, y.grad) for x, y in zip(moved, plain, strict=True))]:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
