"""models/layers.py against plain autograd and PyTorch's own layers."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import layers, products
from models.layers import MASKED, LayerNorm, Linear, MultiHeadAttention, compute_dtype

BATCH = 3
QUERIES = 5
KEYS = 7
HEADS = 2
DIM = 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def attention_inputs(dtype: torch.dtype = torch.double) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns [q, k, v], a mask, and a gradient of the result.

    The mask hides some keys, and all of them from a query and in a row.
    """
    inputs = []
    for length in (QUERIES, KEYS, KEYS):
        inputs.append(torch.randn(BATCH, length, HEADS, DIM, dtype=dtype))
    gradient = torch.randn(BATCH, QUERIES, HEADS, DIM, dtype=dtype)

    mask = (torch.rand(BATCH, 1, QUERIES, KEYS) < 0.3).float() * MASKED
    mask[1, :, 2] = MASKED
    mask[2] = MASKED
    return inputs, mask, gradient


def gradients(function, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Returns the result of function(*inputs), and the gradients of the inputs."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    """Computes the textbook's; dropout multiplies its weights by `scale` [B, H, Tq, Tk]."""
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


# Attention


def test_attention_and_its_gradients_equal_autograds_in_float64(scale):
    """With dropout.

    test_transformer_model.py compares it without dropout, in both forms, with fairseq's.
    """
    inputs, mask, gradient = attention_inputs()
    factor = scale((BATCH, HEADS, QUERIES, KEYS), 0.3)

    expected = gradients(lambda *qkv: plain_attention(*qkv, mask, factor), inputs, gradient)
    got = gradients(lambda *qkv: layers.attention(*qkv, mask, 0.3), inputs, gradient)

    torch.testing.assert_close(got, expected, **EXACT)  # of equal types, too


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_without_any_key_give_numbers_and_not_nan(form, dtype, dropout):
    inputs, mask, gradient = attention_inputs(dtype)
    found = gradients(lambda *qkv: layers.attention(*qkv, mask, dropout), inputs, gradient)
    for value in found:
        assert value.dtype == dtype
        assert value.isfinite().all()


def errors(function, inputs: list[Tensor], gradient: Tensor, exact: list[Tensor]) -> list[float]:
    """Returns the errors of the result and the gradients in bfloat16, relative to `exact`."""
    found = []
    for value, right in zip(gradients(function, inputs, gradient), exact, strict=True):
        assert value.dtype == torch.bfloat16
        found.append(((value - right).norm() / right.norm()).item())
    return found


def test_attention_in_bfloat16_is_as_exact_as_the_usual(scale):
    """The usual attention under autocast.

    Its scores are in bfloat16, its softmax in float32, its weights in bfloat16 times a mask.
    """
    q, k, v, gradient = (torch.randn(2, 128, 4, 64).bfloat16() for _ in range(4))
    inputs = [q / 4, k, v]  # scores of a standard deviation of 2
    mask = torch.zeros(1)
    factor = scale((2, 4, 128, 128), 0.1)

    def usual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k).float(), -1).bfloat16()
        return torch.einsum("bhqk,bkhd->bqhd", weights * factor.bfloat16(), v)

    wide = [value.double() for value in inputs]
    exact = gradients(lambda *qkv: plain_attention(*qkv, mask, factor), wide, gradient.double())
    ours = errors(lambda *qkv: layers.attention(*qkv, mask, 0.1), inputs, gradient, exact)
    theirs = errors(usual, inputs, gradient, exact)

    for error, other in zip(ours, theirs, strict=True):
        assert error < other


# Layer norm


@pytest.mark.usefixtures("compiled")
def test_layer_norm_equals_pytorchs_in_float64():
    """In values and gradients."""
    x = torch.randn(4, 5, 8, dtype=torch.double)
    weight = torch.randn(8, dtype=torch.double)
    bias = torch.randn(8, dtype=torch.double)
    gradient = torch.randn(4, 5, 8, dtype=torch.double)
    x[0, 0] = 1.5  # no variance: eps decides, and the gradient has a factor of eps ** -0.5
    x[0, 1] += 1000  # E[x^2] - E[x]^2, which is for bfloat16, would lose digits

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parameters = {"weight": weight, "bias": bias}
        return torch.func.functional_call(LayerNorm(8), parameters, x)

    def pytorchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), weight, bias)

    expected = gradients(pytorchs, [x, weight, bias], gradient)
    found = gradients(ours, [x, weight, bias], gradient)
    for one, other in zip(found, expected, strict=True):
        largest = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * largest)


def test_layer_norm_in_bfloat16_is_as_exact_as_pytorchs():
    x = torch.randn(64, 768)
    gradient = torch.randn(64, 768).bfloat16()
    # A mean far larger than the spread: computed in bfloat16 all would be lost.
    inputs = [(20 + x).bfloat16()]
    norm = LayerNorm(768, eps=1e-12)

    def pytorchs(x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (768,)).bfloat16()

    wide = [inputs[0].double()]
    exact = gradients(lambda x: F.layer_norm(x, (768,)), wide, gradient.double())
    ours = errors(norm, inputs, gradient, exact)
    stock = errors(pytorchs, inputs, gradient, exact)

    for error, other in zip(ours, stock, strict=True):
        assert error < 1.01 * other


# Types


@pytest.mark.parametrize("kind", [Linear, LayerNorm, MultiHeadAttention])
def test_a_layer_computes_in_its_inputs_type(form, kind):
    """And its parameters stay float32."""
    leaf = torch.randn(2, 3, 8).bfloat16().requires_grad_()
    if kind is MultiHeadAttention:
        layer = kind(8, 2)
        result = layer(leaf, leaf, torch.zeros(1))
    else:
        layer = kind(8, 8) if kind is Linear else kind(8)
        result = layer(leaf)
    assert result.dtype == torch.bfloat16

    result.sum().backward()
    assert leaf.grad.dtype == torch.bfloat16
    for parameter in layer.parameters():
        if parameter.grad is not None:
            assert parameter.dtype == torch.float32
            assert parameter.grad.dtype == torch.float32


def test_the_compute_type_is_autocasts_where_it_is_on():
    x = torch.zeros(1)
    assert compute_dtype(x) == torch.float32
    assert compute_dtype(x.double()) == torch.double
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert compute_dtype(x) == torch.float32


@pytest.mark.xla
def test_the_compute_type_on_xla_is_that_of_xlas_autocast(mesh):
    x = torch.zeros(1)
    on_xla = x.to(mesh.device)
    assert compute_dtype(on_xla) == torch.float32
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert compute_dtype(on_xla) == torch.bfloat16
        assert compute_dtype(x) == torch.float32


# Dropout


@pytest.mark.parametrize("probability", [0.0001, 0.1])
def test_the_dropped_share_is_exactly_the_one_made_up_for(probability):
    share = layers.drop_share(probability)
    assert abs(share - probability) <= 1 / 2048
    assert share > 0

    shape = (4, 64, 256)
    masks = [layers.kept(shape, probability, torch.device("cpu")) for _ in range(16)]
    masks = torch.stack(masks)
    dropped = (~masks).double().mean().item()
    deviation = (share * (1 - share) / masks.numel()) ** 0.5
    assert abs(dropped - share) < 4 * deviation
    assert not torch.equal(masks[0], masks[1])


def correlations(masks: Tensor) -> Tensor:
    """Returns those of any two rows of `masks` [N, rows, columns]: [N * pairs]."""
    above = torch.ones(masks.shape[1], masks.shape[1], dtype=torch.bool).triu(1)
    return torch.cat([torch.corrcoef(rows)[above] for rows in masks])


def assert_as_independent(ours: Tensor, usual: Tensor) -> None:
    """Asserts that the rows of our masks correlate no more than those of the usual ones."""
    got = correlations(ours)
    expected = correlations(usual)
    assert abs(got.mean()) < 4 * expected.std() / len(got) ** 0.5 + 1e-4
    spread = 0.02 if len(got) > 1000 else 0.6
    assert abs(got.std() / expected.std() - 1) < spread
    assert got.abs().max() < 1.4 * expected.abs().max() + 0.01


SIZE = 256
CALLS = 8


@dataclass(frozen=True)
class Masks:
    """Ours of several calls, [calls, heads, rows, columns], and those of a generator."""

    ours: Tensor
    usual: Tensor  # [heads, rows, columns]


@pytest.fixture(scope="module")
def masks() -> Masks:
    torch.manual_seed(0)
    calls = []
    for _ in range(CALLS):
        calls.append(layers.kept((CALLS, SIZE, SIZE), 0.1, torch.device("cpu")).float())
    usual = (torch.rand(CALLS, SIZE, SIZE) >= 0.1).float()
    return Masks(torch.stack(calls), usual)


def test_rows_are_as_independent_as_with_rand(masks):
    assert_as_independent(masks.ours[0], masks.usual)


def test_columns_are_as_independent_as_with_rand(masks):
    assert_as_independent(masks.ours[0].mT, masks.usual.mT)


def test_calls_are_as_independent_as_with_rand(masks):
    first_heads = masks.ours[:, 0].flatten(1)
    assert_as_independent(first_heads[None], masks.usual.flatten(1)[None])


def test_heads_are_as_independent_as_with_rand(masks):
    heads = masks.ours[0].flatten(1)
    assert_as_independent(heads[None], masks.usual.flatten(1)[None])


def test_neighbours_are_as_independent_as_chance_has_them(masks):
    """In squares of 2 x 2: all sixteen patterns as often as chance has them."""
    ours = masks.ours[0]
    top_left = ours[:, ::2, ::2]
    top_right = ours[:, ::2, 1::2]
    bottom_left = ours[:, 1::2, ::2]
    bottom_right = ours[:, 1::2, 1::2]
    patterns = top_left * 8 + top_right * 4 + bottom_left * 2 + bottom_right
    observed = torch.bincount(patterns.flatten().long(), minlength=16).double()

    kept = torch.tensor([pattern.bit_count() for pattern in range(16)])
    share = layers.drop_share(0.1)
    expected = (1 - share) ** kept * share ** (4 - kept) * patterns.numel()
    chi_square = ((observed - expected).square() / expected).sum()
    assert chi_square < 37.7  # 15 degrees of freedom, 0.1 %


@pytest.mark.parametrize("kind", ["a tensor in bfloat16", "a row in float32"])
def test_dropout_on_xla_and_its_gradient_have_the_same_mask(kind, mesh):
    """And what is kept is scaled."""
    x = torch.randn(4, 64, 96).to(torch.bfloat16)
    if kind == "a row in float32":
        x = x[0, 0].float()
    leaf = x.to(mesh.device).requires_grad_()

    result = layers.Dropout(0.25)(leaf)
    result.sum().backward()

    result, gradient = torch.stack([result.detach(), leaf.grad]).cpu()
    dropped = result == 0
    assert result.dtype == x.dtype
    assert 0.1 < dropped.float().mean() < 0.4
    scaled = torch.where(dropped, 0.0, x.float() / 0.75)
    torch.testing.assert_close(result, scaled.to(x.dtype))
    factors = torch.where(dropped, 0.0, 1 / 0.75)
    torch.testing.assert_close(gradient, factors.to(x.dtype))


def test_attention_on_xla_and_its_gradient_have_the_same_mask(mesh):
    """And weights that are kept are scaled.

    With one key each of four queries has a weight of 1, or none, and v's gradient is the sum of
    the weights.
    """
    q = torch.randn(64, 4, 1, 2)
    k = torch.randn(64, 1, 1, 2)
    v = torch.randn(64, 1, 1, 2)
    on_xla = [x.to(mesh.device).requires_grad_() for x in (q, k, v)]

    result = layers.attention(*on_xla, torch.zeros(1).to(mesh.device), 0.25)
    result.sum().backward()

    both = torch.cat([result.detach(), on_xla[2].grad], 1).cpu()
    result, gradient = both.split([4, 1], 1)
    dropped = (result == 0).all(-1, keepdim=True)
    assert 0.1 < dropped.float().mean() < 0.4
    torch.testing.assert_close(result, torch.where(dropped, 0.0, v / 0.75))
    weights = torch.where(dropped, 0.0, 1 / 0.75)
    torch.testing.assert_close(gradient, weights.sum(1, keepdim=True).expand(v.shape))


def test_the_mask_on_xla_is_the_cpus_of_the_same_seed(monkeypatch, mesh):
    """With torch's own generator there is no such thing.

    Integers and the few float32 operations are the same.
    """
    seed = torch.tensor(0.3)
    monkeypatch.setattr(layers.torch, "rand", lambda shape, device: seed.to(device))
    expected = layers.kept((4, 2, 64, 64), 0.1, torch.device("cpu"))
    got = layers.kept((4, 2, 64, 64), 0.1, mesh.device).cpu()
    # A product and a sum may be rounded once (fused) or twice.
    assert (got == expected).double().mean() > 0.995


# Exact products


def equations_of_the_models() -> list[str]:
    """Returns the equations that models/ gives to products.einsum."""
    text = ""
    for path in Path(layers.__file__).parent.glob("*.py"):
        text += path.read_text()
    return sorted(set(re.findall(r'(?<!torch\.)einsum\(\s*"([a-z,]+->[a-z]+)"', text)))


@pytest.fixture
def exact_products(monkeypatch):
    """Products in exact float32, as on a TPU with --precision float32."""
    forms = "on XLA's CPU backend the TPU's forms are tested"
    assert torch.backends.cuda.matmul.fp32_precision == "none", forms
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    monkeypatch.setattr(products, "NATIVE_DEVICES", ())
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


def test_the_models_have_equations():
    assert len(equations_of_the_models()) >= 12


@pytest.mark.parametrize("equation", equations_of_the_models())
def test_exact_products_are_einsums(equation, exact_products):
    """And their gradients, too."""
    operands, result = equation.split("->")
    terms = operands.split(",")
    letters = sorted(set("".join(terms)))
    sizes = dict(zip(letters, (2, 3, 4, 5, 6, 7), strict=False))

    def drawn(term: str) -> Tensor:
        return torch.randn([sizes[letter] for letter in term])

    inputs = [drawn(term) for term in terms]
    upstream = drawn(result)

    expected = gradients(functools.partial(torch.einsum, equation), inputs, upstream)
    found = gradients(functools.partial(products.einsum, equation), inputs, upstream)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
