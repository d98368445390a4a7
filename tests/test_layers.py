"""models/layers.py against plain autograd and PyTorch's own layers."""

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import layers, products
from models.layers import MASKED, LayerNorm, Linear, MultiHeadAttention, compute_dtype

BATCH, QUERIES, KEYS, HEADS, DIM = 3, 5, 7, 2, 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def attention_inputs(dtype: torch.dtype = torch.double) -> tuple[list[Tensor], Tensor, Tensor]:
    """([q, k, v], a mask that hides some keys, and all of a query and of a row, a gradient of the result)."""
    lengths = (QUERIES, KEYS, KEYS, QUERIES)
    *inputs, gradient = (torch.randn(BATCH, length, HEADS, DIM, dtype=dtype) for length in lengths)
    mask = (torch.rand(BATCH, 1, QUERIES, KEYS) < 0.3).float() * MASKED
    mask[1, :, 2] = mask[2] = MASKED
    return inputs, mask, gradient


def gradients(function, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """The result of function(*inputs), and the gradients of the inputs."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    """The textbook's; dropout multiplies its weights by `scale` [B, H, Tq, Tk]."""
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) + mask, -1)
    return torch.einsum("bhqk,bkhd->bqhd", weights * scale, v)


@pytest.fixture
def scale(monkeypatch, compiled):
    """scale(shape, dropout) of `plain_attention`, with the mask that attention draws, too."""

    def draw(shape: tuple[int, ...], dropout: float) -> Tensor:
        kept = torch.rand(shape) >= dropout
        monkeypatch.setattr(layers, "kept", lambda *_: kept)
        return kept.double() / (1 - layers.drop_share(dropout))

    return draw


def test_attention_with_dropout_and_all_its_gradients_equal_autograds_in_float64(scale):
    """test_transformer_model.py compares it without dropout, in both forms, with fairseq's."""
    inputs, mask, gradient = attention_inputs()
    factor = scale((BATCH, HEADS, QUERIES, KEYS), 0.3)
    expected = gradients(lambda *qkv: plain_attention(*qkv, mask, factor), inputs, gradient)
    got = gradients(lambda *qkv: layers.attention(*qkv, mask, 0.3), inputs, gradient)
    torch.testing.assert_close(got, expected, **EXACT)  # of equal types, too


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_without_any_key_give_numbers_and_not_nan(form, dtype, dropout):
    inputs, mask, gradient = attention_inputs(dtype)
    for value in gradients(lambda *qkv: layers.attention(*qkv, mask, dropout), inputs, gradient):
        assert value.dtype == dtype and value.isfinite().all()


def errors(function, inputs: list[Tensor], gradient: Tensor, exact: list[Tensor]) -> list[float]:
    """Of the result and the gradients in bfloat16, relative to `exact`."""
    got = gradients(function, inputs, gradient)
    assert all(value.dtype == torch.bfloat16 for value in got)
    return [((value - right).norm() / right.norm()).item() for value, right in zip(got, exact, strict=True)]


def test_attention_in_bfloat16_is_no_less_exact_than_the_usual_under_autocast(scale):
    """Of scores in bfloat16, a softmax in float32, and weights in bfloat16 times a mask."""
    q, k, v, gradient = (torch.randn(2, 128, 4, 64).bfloat16() for _ in range(4))
    mask, inputs = torch.zeros(1), [q / 4, k, v]  # scores of a standard deviation of 2
    factor = scale((2, 4, 128, 128), 0.1)
    wide = [value.double() for value in inputs]
    exact = gradients(lambda *qkv: plain_attention(*qkv, mask, factor), wide, gradient.double())

    def usual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k).float(), -1).bfloat16()
        return torch.einsum("bhqk,bkhd->bqhd", weights * factor.bfloat16(), v)

    ours = errors(lambda *qkv: layers.attention(*qkv, mask, 0.1), inputs, gradient, exact)
    for error, other in zip(ours, errors(usual, inputs, gradient, exact), strict=True):
        assert error < other


@pytest.mark.usefixtures("compiled")
def test_layer_norm_equals_pytorchs_in_values_and_gradients_in_float64():
    shapes = (4, 5, 8), (8,), (8,), (4, 5, 8)
    *inputs, gradient = (torch.randn(shape, dtype=torch.double) for shape in shapes)  # x, weight and bias
    inputs[0][0, 0] = 1.5  # no variance: eps decides, and the gradient has a factor of eps ** -0.5
    inputs[0][0, 1] += 1000  # E[x^2] - E[x]^2, which is for bfloat16, would lose digits

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(LayerNorm(8), {"weight": weight, "bias": bias}, x)

    expected = gradients(lambda x, weight, bias: F.layer_norm(x, (8,), weight, bias), inputs, gradient)
    for one, other in zip(gradients(ours, inputs, gradient), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * other.abs().max().item())


def test_layer_norm_in_bfloat16_is_no_less_exact_than_pytorchs():
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


@pytest.mark.parametrize("probability", [0.0001, 0.1])
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
    # Neighbours in squares of 2 x 2: all sixteen patterns as often as chance has them.
    squares = own[:, ::2, ::2] * 8 + own[:, ::2, 1::2] * 4 + own[:, 1::2, ::2] * 2 + own[:, 1::2, 1::2]
    observed = torch.bincount(squares.flatten().long(), minlength=16).double()
    kept = torch.tensor([bin(pattern).count("1") for pattern in range(16)])
    share = layers.drop_share(0.1)
    chance = (1 - share) ** kept * share ** (4 - kept) * squares.numel()
    assert ((observed - chance).square() / chance).sum() < 37.7  # chi-square, 15 degrees of freedom, 0.1 %


def test_dropout_on_xla_scales_what_it_keeps_and_its_gradient_has_the_same_mask(mesh):
    x = torch.randn(4, 64, 96).to(torch.bfloat16)
    for case in (x, x[0, 0].float()):
        own = case.to(mesh.device).requires_grad_()
        result = layers.Dropout(0.25)(own)
        result.sum().backward()
        result, gradient = torch.stack([result.detach(), own.grad]).cpu()
        dropped = result == 0
        assert result.dtype == case.dtype and 0.1 < dropped.float().mean() < 0.4
        torch.testing.assert_close(result, torch.where(dropped, 0.0, case.float() / 0.75).to(case.dtype))
        torch.testing.assert_close(gradient, torch.where(dropped, 0.0, 1 / 0.75).to(case.dtype))


def test_attention_on_xla_scales_weights_that_it_keeps_and_its_gradient_has_the_same_mask(mesh):
    # One key: each of four queries has a weight of 1, or none, and v's gradient is the sum of the weights.
    q, k, v = (torch.randn(64, length, 1, 2) for length in (4, 1, 1))
    *others, own = (x.to(mesh.device).requires_grad_() for x in (q, k, v))
    result = layers.attention(*others, own, torch.zeros(1).to(mesh.device), 0.25)
    result.sum().backward()
    result, gradient = torch.cat([result.detach(), own.grad], 1).cpu().split([4, 1], 1)
    dropped = (result == 0).all(-1, keepdim=True)
    assert 0.1 < dropped.float().mean() < 0.4
    torch.testing.assert_close(result, torch.where(dropped, 0.0, v / 0.75))
    torch.testing.assert_close(gradient, torch.where(dropped, 0.0, 1 / 0.75).sum(1, keepdim=True).expand(v.shape))


def test_the_mask_on_xla_is_the_cpus_of_the_same_seed(monkeypatch, mesh):
    """With torch's own generator there is no such thing; integers and the few float32 operations are the same."""
    drawn = torch.tensor(0.3)
    monkeypatch.setattr(layers.torch, "rand", lambda shape, device: drawn.to(device))
    expected = layers.kept((4, 2, 64, 64), 0.1, torch.device("cpu"))
    got = layers.kept((4, 2, 64, 64), 0.1, mesh.device).cpu()
    # A product and a sum may be rounded once (fused) or twice.
    assert (got == expected).double().mean() > 0.995


def test_exact_products_are_einsums_in_every_equation_of_the_models(monkeypatch, request):
    """Where float32 is to be exact, as on a TPU with --precision float32; gradients, too."""
    text = "".join(path.read_text() for path in Path(layers.__file__).parent.glob("*.py"))
    equations = set(re.findall(r'(?<!torch\.)einsum\(\s*"([a-z,]+->[a-z]+)"', text))
    assert len(equations) >= 12
    assert torch.backends.cuda.matmul.fp32_precision == "none", "on XLA's CPU backend the TPU's forms are tested"
    request.addfinalizer(lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "none"))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    monkeypatch.setattr(products, "NATIVE_DEVICES", ())
    for equation in sorted(equations):
        terms = equation.split("->")[0].split(",")
        sizes = dict(zip(sorted(set("".join(terms))), (2, 3, 4, 5, 6, 7), strict=False))
        inputs = [torch.randn([sizes[i] for i in term]) for term in terms]
        upstream = torch.randn([sizes[i] for i in equation.split("->")[1]])
        expected = gradients(functools.partial(torch.einsum, equation), inputs, upstream)
        found = gradients(functools.partial(products.einsum, equation), inputs, upstream)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m, e=equation: f"{e}: {m}")
