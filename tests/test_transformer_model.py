"""Compares models/transformer.py with what fairseq computed (golden files), eagerly and on four XLA
devices."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_xla
from model_helpers import GOLDEN, arrays, golden_transformer
from torch import Tensor

from data import wmt
from models import layers
from models.transformer import (
    ARCHITECTURES,
    EOS,
    PAD,
    Architecture,
    Transformer,
    label_smoothed_loss,
)
from train import transformer
from train.common import device, loading, sharding
from train.common.mesh import Layout

STEPS = json.loads((GOLDEN / "numbers.json").read_text())["ten_steps"]
CONFIG = transformer.Config(lr=5e-3, warmup_updates=4, label_smoothing=0.1, precision="float32")
ADAM = transformer.ADAM | {"eps": 1e-9}  # of the recording
SMALL = Architecture(
    dim=16,
    ffn_dim=32,
    heads=2,
    encoder_layers=2,
    decoder_layers=2,
    dropout=0.0,
    max_positions=40,
)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return loading.as_tensors(arrays())


def step_batch(golden: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Returns fairseq's batch of a step: "source", "previous" and "target"."""
    batch = {}
    for name in ("source", "previous", "target"):
        batch[name] = golden[f"step{number}.{name}"]
    return batch


# Logits


@dataclass
class Recorded:
    """A batch, and the logits that fairseq computed for it."""

    source: Tensor
    previous: Tensor
    logits: Tensor

    @property
    def real(self) -> Tensor:
        """Where `previous` has a token."""
        return self.previous != PAD


def recorded(golden: dict[str, Tensor], checkpoint: str, side: str) -> Recorded:
    """Returns the batch of a checkpoint whose sources are padded at one side."""
    name = checkpoint.removesuffix(".pt")
    return Recorded(
        source=golden[f"{name}.{side}.source"],
        previous=golden[f"{name}.previous"],
        logits=golden[f"{name}.{side}.logits"],
    )


def assert_logits(found: Tensor, batch: Recorded) -> None:
    assert found.shape == batch.logits.shape
    assert found.dtype == torch.float32
    real = batch.real
    torch.testing.assert_close(found[real], batch.logits[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("checkpoint", ["trained.pt", "prenorm.pt"])
def test_logits_equal_fairseqs(golden, checkpoint, side):
    batch = recorded(golden, checkpoint, side)
    model = golden_transformer(checkpoint)

    assert_logits(model(batch.source, batch.previous), batch)


def test_logits_on_xla_equal_fairseqs(mesh, golden):
    """With normalisation before the layers: the ten steps have the other form on XLA."""
    model = device.to_device(golden_transformer("prenorm.pt"), mesh)

    def forward(model: Transformer, source: Tensor, previous: Tensor) -> Tensor:
        return model(source, previous).detach()

    step = device.compiled(forward, mesh)
    for side in ("left", "right"):
        batch = recorded(golden, "prenorm.pt", side)
        found = step(model, batch.source.to(mesh.device), batch.previous.to(mesh.device))
        assert_logits(found.cpu(), batch)


@pytest.mark.parametrize("checkpoint", ["trained.pt", "prenorm.pt"])
def test_logits_in_bfloat16_stay_near_fairseqs(golden, checkpoint):
    batch = recorded(golden, checkpoint, "right")
    model = golden_transformer(checkpoint)
    real = batch.real

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(batch.source, batch.previous)
        loss = label_smoothed_loss(found, torch.where(real, 4, PAD), 0.1)["loss"]

    assert found.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    error = (found.float() - batch.logits)[real].norm() / batch.logits[real].norm()
    assert 1e-4 < error < 0.02


# Ten steps

# fairseq's Adam adds eps before it corrects the bias of the second moment, torch's after: in step n
# fairseq's eps is (1 - 0.98 ** n) ** -0.5 times torch's, 7 times at first. Beside gradients of 2e-3
# that is nothing: the losses differ by 1e-7 with either, by 1e-5 with an eps of 1e-6.


def test_ten_steps_have_fairseqs_losses_gradients_and_rates(golden):
    model = golden_transformer("initial.pt").train()
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)

    for number, expected in enumerate(STEPS):
        learning_rate = transformer.learning_rate(CONFIG, number)
        assert learning_rate == pytest.approx(expected["learning_rate"], rel=1e-12)
        optimizer.param_groups[0]["lr"] = learning_rate

        batch = step_batch(golden, number)
        logits = model(batch["source"], batch["previous"])
        sums = label_smoothed_loss(logits, batch["target"], CONFIG.label_smoothing)
        assert sums["tokens"] == expected["tokens"]
        assert sums["loss"].item() == pytest.approx(expected["loss_sum"], rel=2e-6)
        assert sums["nll"].item() == pytest.approx(expected["nll_sum"], rel=2e-6)

        optimizer.zero_grad()
        (sums["loss"] / sums["tokens"]).backward()
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        norm = torch.stack(norms).norm().item()
        assert norm == pytest.approx(expected["gradient_norm"], rel=1e-5)
        optimizer.step()


def uploaded(batch: dict[str, Tensor], mesh: device.Mesh) -> dict[str, Tensor]:
    """Returns a batch on the devices, in the one shape of the ten steps.

    Sources are padded at the left, as fairseq's are.
    """
    on_device = {}
    for name, value in batch.items():
        missing = 24 - value.shape[1]
        padding = (missing, 0) if name == "source" else (0, missing)
        on_device[name] = device.upload(F.pad(value, padding, value=PAD), mesh)
    return on_device


def test_ten_steps_compiled_on_four_devices_have_fairseqs_losses(mesh, golden):
    assert mesh.num_devices == 4
    # So that short rows are packed, and the logits' gradient is written.
    mesh = replace(mesh, kind="TPU v6 lite")
    model = device.to_device(golden_transformer("initial.pt").train(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), **ADAM, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    state = transformer.State(model, optimizer)
    step = device.compiled(transformer.train_step, mesh)  # one shape, strict

    for number, expected in enumerate(STEPS):
        batch = uploaded(step_batch(golden, number), mesh)
        device.set_lr(optimizer, transformer.learning_rate(CONFIG, number))

        means = step(state, batch, CONFIG, mesh)

        loss = expected["loss_sum"] / expected["tokens"]
        nll = expected["nll_sum"] / expected["tokens"]
        assert means["loss"].item() == pytest.approx(loss, rel=2e-6)
        assert means["nll"].item() == pytest.approx(nll, rel=2e-6)

    embedding = model.encoder.embed_tokens.weight
    assert model.decoder.embed_tokens.weight is embedding
    assert model.decoder.output_projection.weight is embedding


# Batches


def sorted_rows(batch: dict) -> list:
    """Returns the rows of a batch without their padding, in an order of their own.

    fairseq sorts a batch by length and pads the source at the left.
    """
    sides = [np.asarray(batch[name]) for name in ("source", "previous", "target")]
    rows = []
    for row in zip(*sides, strict=True):
        rows.append([tokens[tokens != PAD].tolist() for tokens in row])
    return sorted(rows)


def test_our_reader_gives_fairseqs_batches(golden):
    pairs = wmt.open_pairs(GOLDEN / "joint", "train")
    assert len(pairs) == 200
    assert len(pairs.source_dictionary) == 64
    assert pairs.source_dictionary is pairs.target_dictionary

    for number in range(10):
        expected = step_batch(golden, number)
        shape = (expected["source"].shape[1], expected["target"].shape[1])
        ours = pairs.batch(np.arange(16 * number, 16 * number + 16), shape)
        assert sorted_rows(ours) == sorted_rows(expected)


def test_our_reader_encodes_lines_as_fairseq(golden):
    test = wmt.open_pairs(GOLDEN / "joint", "test")
    lines = (GOLDEN / "text/test.en").read_text(encoding="utf-8").splitlines()

    encoded = test.encode(lines)

    for index, theirs in zip(golden["search.index"], golden["search.source"], strict=True):
        assert encoded[index].tolist() == theirs[theirs != PAD].tolist()


# Packed rows


@dataclass
class Rows:
    """Rows of which each third has padding, and the model's logits for each of them alone."""

    model: Transformer
    source: Tensor
    previous: Tensor
    expected: Tensor

    @property
    def real(self) -> Tensor:
        """Where `previous` has a token."""
        return self.previous != PAD


def rows_of_shape(rows: int, tokens: int) -> Rows:
    model = golden_transformer("trained.pt")
    draw = torch.Generator().manual_seed(0)
    source = torch.randint(4, 64, (rows, tokens), generator=draw)
    previous = torch.randint(4, 64, (rows, tokens - 4), generator=draw)
    source[1::3, :5] = PAD
    previous[1::3, 9:] = PAD

    expected = model(source, previous).detach()
    return Rows(model=model, source=source, previous=previous, expected=expected)


def four_in_a_row(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns four rows side by side, and the number of each token's row, from 1; 0: padding."""
    packed = tokens.reshape(len(tokens) // 4, -1)
    length = packed.shape[1]
    numbers = torch.arange(length) * 4 // length + 1
    return packed, numbers * (packed != PAD)


@pytest.mark.parametrize(("rows", "tokens"), [(32, 30), (24, 64), (8, 24)])
def test_packed_rows_have_the_logits_of_separate_rows(rows, tokens):
    given = rows_of_shape(rows, tokens)
    source, source_segments = four_in_a_row(given.source)
    previous, previous_segments = four_in_a_row(given.previous)

    found = given.model(source, previous, source_segments, previous_segments)

    found = found.detach().reshape(given.expected.shape)
    real = given.real
    torch.testing.assert_close(found[real], given.expected[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "tokens", "packed"), [(32, 30, True), (24, 64, False), (8, 24, False)]
)
def test_short_rows_of_a_device_are_packed(rows, tokens, packed, mesh):
    given = rows_of_shape(rows, tokens)
    model = device.to_device(given.model, mesh)
    source = device.upload(given.source, mesh)
    previous = device.upload(given.previous, mesh)

    found = model(source, previous, packing_parts=8)

    program = torch_xla._XLAC._get_xla_tensors_hlo([found])
    assert (f"f32[{rows // 4},4,120,120]" in program) == packed
    real = given.real
    torch.testing.assert_close(found.cpu()[real], given.expected[real], rtol=0, atol=1e-5)


# The gradient of the encoder's output


def test_the_memorys_gradient_is_finished_at_each_layer(mesh):
    """Once for each layer of the decoder, and for these two to the same bits."""
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, encoder_layers=1), 30, 30)
    model = device.to_device(model, mesh)
    batch = torch.randint(4, 30, (4, 6), generator=torch.Generator().manual_seed(0))
    source = device.upload(batch, mesh)
    target = device.upload(batch.flip(1), mesh)

    def gradients() -> tuple[list[Tensor], int]:
        loss = label_smoothed_loss(model(source, target), target, 0.1)["loss"]
        found = torch.autograd.grad(loss, list(model.parameters()))
        program = torch_xla._XLAC._get_xla_tensors_hlo([*found])
        return device.read(found), program.count(" opt-barrier(")

    try:
        layers.use_forms(clamp_weights=True, barrier=device.barrier())
        finished, barriers = gradients()
        layers.use_forms(clamp_weights=True)
        usual, none = gradients()
    finally:
        layers.use_forms(clamp_weights=True)

    assert (barriers, none) == (SMALL.decoder_layers, 0)
    for one, other in zip(finished, usual, strict=True):
        assert torch.equal(one, other)


def test_a_backward_pass_has_the_barrier_of_its_forward_pass():
    """Another model, built between the two, sets its own forms for the whole process."""
    finished = []
    x = torch.ones(2, requires_grad=True)
    try:
        layers.use_forms(clamp_weights=True, barrier=finished.extend)
        result = layers.finish_gradient(x)
    finally:
        layers.use_forms(clamp_weights=True)

    result.sum().backward()
    assert len(finished) == 1
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("layout", "finishes"),
    [("", True), ("data=2,model=2", False), ("data=4,model=1", True)],
)
def test_training_finishes_it_unless_devices_share_layers(layout, finishes, mesh):
    """They would add it up for each layer, and not once."""
    config = transformer.validate(transformer.TINY)
    arranged = sharding.arranged(mesh, Layout(mesh=layout))
    try:
        transformer.make_model(config, transformer.open_data(config), arranged)
        assert (layers.FORMS.barrier is not None) == finishes
    finally:
        layers.use_forms(clamp_weights=True)


# The loss


def test_a_batch_with_an_empty_row_has_the_loss_of_the_others():
    model = Transformer(SMALL, 30, 30)
    source = torch.tensor([[5, 6, EOS], [PAD, PAD, PAD]])
    previous = torch.tensor([[EOS, 4], [PAD, PAD]])
    target = torch.tensor([[4, EOS], [PAD, PAD]])

    sums = label_smoothed_loss(model(source, previous), target, 0.1)
    sums["loss"].backward()

    alone = label_smoothed_loss(model(source[:1], previous[:1]), target[:1], 0.1)
    torch.testing.assert_close(sums, alone)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_batch_of_an_empty_row_has_a_loss_of_0():
    model = Transformer(SMALL, 30, 30)
    source = torch.tensor([[PAD, PAD, PAD]])
    previous = torch.tensor([[PAD, PAD]])
    target = torch.tensor([[PAD, PAD]])

    sums = label_smoothed_loss(model(source, previous), target, 0.1)

    assert all(value == 0 for value in sums.values())


def logits_and_target(dtype: torch.dtype, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns logits [3, tokens, 11] and a target with a row of padding, and most of another."""
    logits = (5 * torch.randn(3, tokens, 11)).to(dtype)
    logits[0] += 1000  # exp would overflow
    target = torch.randint(2, 11, (3, tokens), dtype=torch.int32)
    target[1, 2:] = PAD
    target[2] = PAD
    return logits, target


def torchs_loss(logits: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    """Returns the sum of the cross-entropy in float64."""
    return F.cross_entropy(
        logits.double().flatten(0, 1),
        target.long().flatten(),
        ignore_index=PAD,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


# A loss of 32 tokens is summed in four parts.
@pytest.mark.parametrize(("tokens", "written"), [(6, False), (32, False), (32, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("form")
def test_label_smoothed_loss_and_gradient_equal_fairseqs_formula(dtype, tokens, written):
    logits, target = logits_and_target(dtype, tokens)
    ours = logits.clone().requires_grad_()
    theirs = logits.clone().requires_grad_()

    found = label_smoothed_loss(ours, target, 0.1, written)
    # fairseq's label_smoothed_nll_loss shares the smoothing out over the other 10 words, torch over
    # all 11.
    expected = torchs_loss(theirs, target, 0.1 * 11 / 10)
    nll = torchs_loss(theirs, target, 0.0)
    assert found["tokens"] == tokens + 2
    torch.testing.assert_close(found["loss"].double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found["nll"].double(), nll, rtol=1e-5, atol=1e-4)

    found["loss"].backward()
    expected.backward()
    tolerance = 1e-4 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    assert ours.grad.dtype == dtype
    assert not ours.grad[2].any()


@pytest.mark.parametrize("tokens", [6, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("compiled")
def test_a_second_derivative_of_the_compiled_loss_is_refused(dtype, tokens):
    """Its backward pass is written out."""
    logits, target = logits_and_target(dtype, tokens)
    logits.requires_grad_()

    loss = label_smoothed_loss(logits, target, 0.1)["loss"]
    (first,) = torch.autograd.grad(loss**2, logits, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# Sizes and initial weights


def test_dictionaries_of_two_sizes_may_share_in_the_decoder():
    model = Transformer(replace(SMALL, share_embeddings="decoder"), 30, 20)

    assert model.decoder.embed_tokens.num_embeddings == 20


def test_dictionaries_of_two_sizes_cannot_share_all():
    with pytest.raises(ValueError, match="dictionaries of 30 and 20 words cannot share embeddings"):
        Transformer(SMALL, 30, 20)


def test_a_width_that_does_not_divide_into_heads_is_refused():
    with pytest.raises(ValueError, match="a width of 16 does not divide into 3 heads"):
        Transformer(replace(SMALL, heads=3), 30, 30)


def test_sentences_longer_than_the_positions_are_refused():
    model = Transformer(SMALL, 30, 30).eval()
    fits = torch.full((1, 40), 5)
    too_long = torch.full((1, 41), 5)
    assert model(fits, fits).isfinite().all()

    message = "41 tokens a sentence; the model has 40 positions"
    with pytest.raises(ValueError, match=message):
        model(too_long, fits)
    with pytest.raises(ValueError, match=message):
        model(fits, too_long)


# Counted by hand, with 32,768 words in one dictionary.
SIZES = {
    "transformer_iwslt_de_en": 48_320_512,
    "transformer_wmt_en_de": 60_915_712,
    "transformer_vaswani_wmt_en_de_big": 209_911_808,
    "transformer_wmt_en_de_big": 209_911_808,
    "transformer_wmt_en_de_big_t2t": 209_915_904,
}


@pytest.mark.parametrize(("name", "count"), SIZES.items())
def test_sizes_are_fairseqs(name, count):
    with torch.device("meta"):
        model = Transformer(ARCHITECTURES[name], 32_768, 32_768)

    assert sum(parameter.numel() for parameter in model.parameters()) == count


def weights_by_kind(model: Transformer) -> dict[str, Tensor]:
    """Returns the values of each kind of tensor, over all layers."""
    flat = defaultdict(list)
    for name, value in model.state_dict().items():
        kind = re.sub(r"\.layers\.\d+", "", name)
        flat[kind].append(value.flatten())
    return {kind: torch.cat(values) for kind, values in flat.items()}


def test_weights_start_as_fairseqs():
    """Their mean and standard deviation are compared."""
    theirs = golden_transformer("initial.pt")
    ours = Transformer(theirs.arch, 64, 64)
    assert list(ours.state_dict()) == list(theirs.state_dict())

    their_weights = weights_by_kind(theirs)
    for kind, own in weights_by_kind(ours).items():
        other = their_weights[kind]
        # 64 values of a uniform distribution, and up to 8,192: 5 standard errors.
        error = 5 / len(own) ** 0.5
        near = 2 * error * other.std().item()
        torch.testing.assert_close(own.mean(), other.mean(), rtol=0, atol=near, msg=kind)
        torch.testing.assert_close(own.std(), other.std(), rtol=error, atol=0, msg=kind)

    assert not ours.encoder.embed_tokens.weight[PAD].any()


# Dropout


def two_passes(model: Transformer) -> tuple[Tensor, Tensor]:
    """Returns the logits of a sentence, computed twice."""
    source = torch.tensor([[5, 6, 7, EOS]])
    previous = torch.tensor([[EOS, 4, 9]])
    return model(source, previous), model(source, previous)


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_is_where_fairseq_has_it(kind):
    model = Transformer(replace(SMALL, **{kind: 0.5}), 30, 30)

    one, other = two_passes(model.train())
    assert (one - other).abs().max() > 1e-3

    one, other = two_passes(model.eval())
    assert torch.equal(one, other)


def test_a_model_without_dropout_computes_the_same_twice():
    model = Transformer(SMALL, 30, 30)

    one, other = two_passes(model.train())
    assert (one - other).abs().max() == 0

    one, other = two_passes(model.eval())
    assert torch.equal(one, other)
