"""models/dlrm.py against torchrec's DLRM and DLRM_DCN, in plain PyTorch; on XLA it is in test_dlrm.py."""

import functools
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import dlrm_torchrec
from models.dlrm import DLRM, DotInteraction
from train import dlrm as train_dlrm

NUM_DENSE, DIM, ROWS = 5, 8, (11, 7, 3, 20)
BOTTOM, TOP, LAYERS, RANK = (16, DIM), (24, 12, 1), 2, 6
NAMES = [f"f{table}" for table in range(len(ROWS))]
every_interaction = pytest.mark.parametrize("interaction", ["dot", "dcn"])


def torchrec_model(interaction: str) -> nn.Module:
    config = train_dlrm.Config(bottom=BOTTOM, top=TOP, interaction=interaction, cross=(LAYERS, RANK))
    model = dlrm_torchrec.build(config, SimpleNamespace(features=NAMES, table_rows=ROWS, num_dense=NUM_DENSE))
    for bias in model.inter_arch.crossnet.bias if interaction == "dcn" else ():
        nn.init.normal_(bias)  # zero at the start: a sign or a place would not show
    return model


def forward_of(theirs: nn.Module, dense: Tensor, embedded: Tensor) -> Tensor:
    """The logits of torchrec's model for embeddings that are looked up."""
    return theirs.over_arch(theirs.inter_arch(theirs.dense_arch(dense), embedded)).squeeze(-1)


def our_model(theirs: nn.Module, interaction: str) -> DLRM:
    """Ours with torchrec's weights: strict, so that those of both have the same names and shapes."""
    model = DLRM(NUM_DENSE, len(ROWS), DIM, BOTTOM, TOP, interaction, LAYERS, RANK)
    state = theirs.state_dict()
    model.load_state_dict({name: value for name, value in state.items() if not name.startswith("sparse_arch.")})
    return model.to(next(theirs.parameters()).dtype)


def step(forward, model: nn.Module, dense: Tensor, embedded: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The logits, and the gradients of the embeddings and of the parameters but for tables."""
    embedded = embedded.detach().requires_grad_()
    logits = forward(dense, embedded)
    F.binary_cross_entropy_with_logits(logits, labels).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if "sparse_arch" not in name}
    model.zero_grad(set_to_none=True)
    return {"logits": logits.detach(), "embedded": embedded.grad, **gradients}


@every_interaction
def test_logits_and_all_gradients_equal_torchrecs_in_float64(interaction, form):
    theirs = torchrec_model(interaction).double()
    ours = our_model(theirs, interaction)
    inputs = [torch.randn(9, NUM_DENSE), torch.randn(9, len(ROWS), DIM), torch.arange(9) % 2]
    inputs = [each.double() for each in inputs]
    expected = step(functools.partial(forward_of, theirs), theirs, *inputs)
    torch.testing.assert_close(step(ours, ours, *inputs), expected, rtol=1e-9, atol=1e-12)
    assert expected["logits"].shape == (9,)


@pytest.mark.parametrize("tables", [1, 2, 5])
def test_compiled_and_native_interaction_agree_for_any_number_of_tables(request, tables):
    interaction = DotInteraction(tables).double()
    dense, embedded = torch.randn(3, 4, dtype=torch.double), torch.randn(3, tables, 4, dtype=torch.double)
    native = interaction(dense, embedded)
    request.getfixturevalue("compiled")
    torch.testing.assert_close(interaction(dense, embedded), native, rtol=1e-12, atol=1e-12)
    assert native.shape == (3, 4 + tables + tables * (tables - 1) // 2)


@pytest.mark.usefixtures("compiled")
@every_interaction
def test_logits_are_float32_under_autocast_and_about_as_exact_as_torchrecs(interaction):
    theirs = torchrec_model(interaction)
    ours = our_model(theirs, interaction)
    dense, embedded = torch.randn(512, NUM_DENSE), torch.randn(512, len(ROWS), DIM)
    exact = our_model(theirs, interaction).double()(dense.double(), embedded.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ours(dense, embedded)
        stock = forward_of(theirs, dense, embedded)
    assert got.dtype == torch.float32 and stock.dtype == torch.bfloat16
    error, stock_error = (got - exact).norm(), (stock - exact).norm()
    assert 0 < error < 1.3 * stock_error  # autocast works, and torchrec's DCN keeps the embeddings in float32
    assert error < 0.02 * exact.norm()


def test_dot_starts_as_facebookresearchs_dlrm_and_dcn_as_torchrecs():
    build = functools.partial(DLRM, 13, 26, 128, (512, 256, 128), (1024, 512, 1))
    for module in build("dot").modules():
        if isinstance(module, nn.Linear) and module.in_features * module.out_features > 10_000:
            std = math.sqrt(2 / (module.in_features + module.out_features))
            torch.testing.assert_close(module.weight.std().item(), std, rtol=0.02, atol=0)
            assert module.weight.abs().max() > 3 * std  # normal, not uniform
            torch.testing.assert_close(module.bias.std().item(), module.out_features**-0.5, rtol=0.2, atol=0)
    dcn = build("dcn", cross_rank=64)
    layer = dcn.dense_arch.model._mlp[1]._linear
    assert layer.weight.abs().max() <= layer.in_features**-0.5  # nn.Linear's own, uniform
    assert not any(bias.any() for bias in dcn.inter_arch.crossnet.bias)


def test_sizes_that_do_not_fit_are_refused():
    sizes = {"num_dense": 5, "num_tables": 4, "dim": 8, "bottom": (16, 8), "top": (24, 1), "interaction": "dot"}
    for change, message in (
        ({"bottom": (16, 7)}, r"bottom is \[16, 7\]; its last size must be that of the embeddings, dim=8"),
        ({"bottom": ()}, "dim=8"),
        ({"top": (24, 2)}, r"top is \[24, 2\]; .* the last one 1"),
        ({"top": (1,)}, "at least two sizes"),
        ({"num_tables": 0}, "num_tables is 0; it must be at least 1"),
        ({"bottom": (0, 8)}, "bottom is"),
        ({"interaction": "cat"}, "interaction is 'cat'; it must be 'dot' or 'dcn'"),
        ({"interaction": "dcn", "cross_rank": 0}, "cross_rank is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            DLRM(**{**sizes, **change})
    with pytest.raises(ValueError, match=r"embedded is \[2, 3, 8\]; it must be \[batch, 4, 8\]"):
        DLRM(**sizes)(torch.randn(2, 5), torch.randn(2, 3, 8))


def test_the_yardstick_learns_and_without_a_learning_rate_does_not(tmp_path, monkeypatch):
    small = {"data": "synthetic", "batch_size": 256, "bottom": "32,16", "top": "64,32,1", "seeds": "0"}
    small |= {"optimizer": "adagrad", "out": str(tmp_path / "bench.json"), "ours": False}
    learnt = dlrm_torchrec.main(dlrm_torchrec.Options(**small, lr=0.02))["torchrec"]
    assert learnt[0]["epochs"][-1]["auc"] > 0.77
    monkeypatch.setattr(train_dlrm, "SYNTHETIC_TRAIN", 1024)  # weights that do not move are the same after a few steps
    still = dlrm_torchrec.main(dlrm_torchrec.Options(**small, lr=0.0))["torchrec"]
    assert still[0]["epochs"][-1]["auc"] < 0.65
    assert json.loads((tmp_path / "bench.json").read_text())["torchrec"] == still
