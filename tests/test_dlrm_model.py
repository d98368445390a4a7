"""Tests models/dlrm.py against torchrec's DLRM and DLRM_DCN, in plain PyTorch; on XLA it is in
test_dlrm.py."""

import functools
import json
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import dlrm_torchrec
from errors import InputError
from models.dlrm import DLRM, DotInteraction
from train import dlrm as train_dlrm

NUM_DENSE = 5
DIM = 8
ROWS = (11, 7, 3, 20)  # of each table
BOTTOM = (16, DIM)
TOP = (24, 12, 1)
CROSS_LAYERS = 2
CROSS_RANK = 6
NAMES = [f"f{table}" for table in range(len(ROWS))]
both_interactions = pytest.mark.parametrize("interaction", ["dot", "dcn"])


def torchrec_model(interaction: str) -> nn.Module:
    config = train_dlrm.Config(
        bottom=BOTTOM,
        top=TOP,
        interaction=interaction,
        cross=(CROSS_LAYERS, CROSS_RANK),
    )
    dataset = SimpleNamespace(features=NAMES, table_rows=ROWS, num_dense=NUM_DENSE)
    model = dlrm_torchrec.build(config, dataset)
    if interaction == "dcn":
        for bias in model.inter_arch.crossnet.bias:
            nn.init.normal_(bias)  # zero at the start: a sign or a place would not show
    return model


def forward_of(theirs: nn.Module, dense: Tensor, embedded: Tensor) -> Tensor:
    """Returns the logits of torchrec's model for embeddings that are looked up."""
    interacted = theirs.inter_arch(theirs.dense_arch(dense), embedded)
    return theirs.over_arch(interacted).squeeze(-1)


def our_model(theirs: nn.Module, interaction: str) -> DLRM:
    """Returns ours with torchrec's weights: strict, so that those of both have the same names and
    shapes."""
    model = DLRM(NUM_DENSE, len(ROWS), DIM, BOTTOM, TOP, interaction, CROSS_LAYERS, CROSS_RANK)
    weights = {}
    for name, value in theirs.state_dict().items():
        if not name.startswith("sparse_arch."):
            weights[name] = value
    model.load_state_dict(weights)
    return model.to(next(theirs.parameters()).dtype)


def step(
    forward: Callable, model: nn.Module, dense: Tensor, embedded: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Returns the logits, and the gradients of the embeddings and of the parameters but for
    tables."""
    embedded = embedded.detach().requires_grad_()
    logits = forward(dense, embedded)
    F.binary_cross_entropy_with_logits(logits, labels).backward()

    found = {"logits": logits.detach(), "embedded": embedded.grad}
    for name, parameter in model.named_parameters():
        if "sparse_arch" not in name:
            found[name] = parameter.grad
    model.zero_grad(set_to_none=True)
    return found


@both_interactions
def test_logits_and_all_gradients_equal_torchrecs_in_float64(interaction, form):
    theirs = torchrec_model(interaction).double()
    ours = our_model(theirs, interaction)
    dense = torch.randn(9, NUM_DENSE).double()
    embedded = torch.randn(9, len(ROWS), DIM).double()
    labels = (torch.arange(9) % 2).double()

    expected = step(functools.partial(forward_of, theirs), theirs, dense, embedded, labels)
    found = step(ours, ours, dense, embedded, labels)

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert expected["logits"].shape == (9,)


@pytest.mark.parametrize("tables", [1, 2, 5])
def test_compiled_and_native_interaction_agree(request, tables):
    interaction = DotInteraction(tables).double()
    dense = torch.randn(3, 4, dtype=torch.double)
    embedded = torch.randn(3, tables, 4, dtype=torch.double)

    native = interaction(dense, embedded)
    request.getfixturevalue("compiled")
    compiled = interaction(dense, embedded)

    torch.testing.assert_close(compiled, native, rtol=1e-12, atol=1e-12)
    pairs = tables * (tables - 1) // 2
    assert native.shape == (3, 4 + tables + pairs)


@pytest.mark.usefixtures("compiled")
@both_interactions
def test_logits_under_autocast_are_about_as_exact_as_torchrecs(interaction):
    """Ours are float32, torchrec's bfloat16."""
    theirs = torchrec_model(interaction)
    ours = our_model(theirs, interaction)
    dense = torch.randn(512, NUM_DENSE)
    embedded = torch.randn(512, len(ROWS), DIM)
    exact = our_model(theirs, interaction).double()(dense.double(), embedded.double())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        our_logits = ours(dense, embedded)
        their_logits = forward_of(theirs, dense, embedded)

    assert our_logits.dtype == torch.float32
    assert their_logits.dtype == torch.bfloat16
    error = (our_logits - exact).norm()
    their_error = (their_logits - exact).norm()
    assert error > 0  # autocast works
    assert error < 1.3 * their_error  # torchrec's DCN keeps the embeddings in float32
    assert error < 0.02 * exact.norm()


# As large as for Criteo's clicks: 13 dense features, 26 tables.
build_large = functools.partial(DLRM, 13, 26, 128, (512, 256, 128), (1024, 512, 1))


def test_dot_starts_as_facebookresearchs_dlrm():
    for module in build_large("dot").modules():
        is_linear = isinstance(module, nn.Linear)
        if not is_linear or module.in_features * module.out_features <= 10_000:
            continue

        std = math.sqrt(2 / (module.in_features + module.out_features))
        torch.testing.assert_close(module.weight.std().item(), std, rtol=0.02, atol=0)
        assert module.weight.abs().max() > 3 * std  # normal, not uniform
        bias_std = module.out_features**-0.5
        torch.testing.assert_close(module.bias.std().item(), bias_std, rtol=0.2, atol=0)


def test_dcn_starts_as_torchrecs():
    dcn = build_large("dcn", cross_rank=64)

    layer = dcn.dense_arch.model._mlp[1]._linear
    assert layer.weight.abs().max() <= layer.in_features**-0.5  # nn.Linear's own, uniform
    assert not any(bias.any() for bias in dcn.inter_arch.crossnet.bias)


SIZES = {
    "num_dense": 5,
    "num_tables": 4,
    "dim": 8,
    "bottom": (16, 8),
    "top": (24, 1),
    "interaction": "dot",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"bottom": (16, 7)},
            r"bottom is \[16, 7\]; its last size must be that of the embeddings, dim=8",
        ),
        ({"bottom": ()}, "dim=8"),
        ({"top": (24, 2)}, r"top is \[24, 2\]; .* the last one 1"),
        ({"top": (1,)}, "at least two sizes"),
        ({"num_tables": 0}, "num_tables is 0; it must be at least 1"),
        ({"bottom": (0, 8)}, "bottom is"),
        ({"interaction": "cat"}, "interaction is 'cat'; it must be 'dot' or 'dcn'"),
        ({"interaction": "dcn", "cross_rank": 0}, "cross_rank is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    sizes = SIZES | changes

    with pytest.raises(ValueError, match=message):
        DLRM(**sizes)


def test_without_torchrec_dlrm_is_a_sentence(monkeypatch):
    """As beside a torch that torchrec has no release for."""
    monkeypatch.setitem(sys.modules, "torchrec.models.dlrm", None)
    with pytest.raises(
        InputError, match="torchrec cannot be imported beside torch 2.*torchrec.txt"
    ):
        DLRM(13, 2, 16, bottom=[16], top=[8, 1], interaction="dot")


def test_embeddings_of_another_number_of_tables_are_refused():
    model = DLRM(**SIZES)

    with pytest.raises(ValueError, match=r"embedded is \[2, 3, 8\]; it must be \[batch, 4, 8\]"):
        model(torch.randn(2, 5), torch.randn(2, 3, 8))


# The benchmark that trains torchrec's model


def train_torchrecs(out: str, lr: float) -> list[dict]:
    """Trains torchrec's model in the benchmark, from one seed; returns its results."""
    options = dlrm_torchrec.Options(
        data="synthetic",
        batch_size=256,
        bottom="32,16",
        top="64,32,1",
        seeds="0",
        optimizer="adagrad",
        out=out,
        ours=False,
        lr=lr,
    )
    return dlrm_torchrec.main(options)["torchrec"]


def last_auc(results: list[dict]) -> float:
    return results[0]["epochs"][-1]["auc"]


def test_the_benchmarks_torchrec_learns(tmp_path):
    results = train_torchrecs(str(tmp_path / "bench.json"), lr=0.02)

    assert last_auc(results) > 0.77


def test_the_benchmarks_torchrec_does_not_learn_at_rate_0(tmp_path, monkeypatch):
    out = tmp_path / "bench.json"
    # Weights that do not move are the same after a few steps.
    monkeypatch.setattr(train_dlrm, "SYNTHETIC_TRAIN", 1024)

    results = train_torchrecs(str(out), lr=0.0)

    assert last_auc(results) < 0.65
    assert json.loads(out.read_text())["torchrec"] == results
