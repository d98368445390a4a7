"""models/transformer.py against what fairseq computed (golden files), eagerly and on four XLA devices."""

import functools
import json
import re
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_xla
from model_helpers import GOLDEN, arrays, golden_transformer
from torch import Tensor

from data import wmt
from models.transformer import ARCHITECTURES, EOS, PAD, Architecture, Transformer, label_smoothed_loss
from train import transformer
from train.common import device, loading

STEPS = json.loads((GOLDEN / "numbers.json").read_text())["ten_steps"]
CONFIG = transformer.Config(lr=5e-3, warmup_updates=4, label_smoothing=0.1, precision="float32")
ADAM = transformer.ADAM | {"eps": 1e-9}  # of the recording
SMALL = Architecture(dim=16, ffn_dim=32, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0, max_positions=40)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return loading.as_tensors(arrays())


def step_batch(golden: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    return {part: golden[f"step{number}.{part}"] for part in ("source", "previous", "target")}


def sides(golden: dict[str, Tensor], name: str, side: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(source, previous, fairseq's logits, where previous has a token)."""
    name = name.removesuffix(".pt")
    source, previous, logits = (golden[f"{name}.{part}"] for part in (f"{side}.source", "previous", f"{side}.logits"))
    return source, previous, logits, previous != PAD


@pytest.mark.parametrize("name", ["trained.pt", "prenorm.pt"])
def test_logits_equal_fairseqs_also_on_xla_and_stay_near_in_bfloat16(mesh, golden, name):
    runs = {torch.device("cpu"): golden_transformer(name)}
    if name == "prenorm.pt":  # the ten steps have the other form on XLA
        model = device.to_device(golden_transformer(name), mesh)
        step = device.compiled(lambda model, source, previous: model(source, previous).detach(), mesh)
        runs[mesh.device] = functools.partial(step, model)
    for place, run in runs.items():
        for side in ("left", "right"):
            source, previous, expected, real = sides(golden, name, side)
            got = run(source.to(place), previous.to(place)).cpu()
            assert got.shape == expected.shape and got.dtype == torch.float32
            torch.testing.assert_close(got[real], expected[real], rtol=0, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = runs[torch.device("cpu")](source, previous)
        loss = label_smoothed_loss(got, torch.where(real, 4, PAD), 0.1)["loss"]
    assert got.dtype == torch.bfloat16 and loss.dtype == torch.float32
    error = (got.float() - expected)[real].norm() / expected[real].norm()
    assert 1e-4 < error < 0.02


def test_ten_steps_give_fairseqs_losses_gradients_and_learning_rates_also_compiled_on_four_devices(mesh, golden):
    assert mesh.num_devices == 4
    host, model = (golden_transformer("initial.pt").train() for _ in range(2))
    mesh = replace(mesh, kind="TPU v6 lite")  # so that short rows are packed, and the logits' gradient is written
    optimizer, model = torch.optim.Adam(host.parameters(), **ADAM), device.to_device(model, mesh)
    state = transformer.State(model, torch.optim.Adam(model.parameters(), **ADAM, foreach=False))
    device.init_optimizer_state(state.optimizer, mesh)
    step = device.compiled(transformer.train_step, mesh)  # one shape, strict
    for number, expected in enumerate(STEPS):
        batch, uploaded = step_batch(golden, number), {}
        for part, value in batch.items():
            room = (24 - value.shape[1], 0)
            uploaded[part] = device.upload(F.pad(value, room if part == "source" else room[::-1], value=PAD), mesh)
        optimizer.param_groups[0]["lr"] = transformer.learning_rate(CONFIG, number)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected["learning_rate"], rel=1e-12)
        device.set_lr(state.optimizer, optimizer.param_groups[0]["lr"])
        means = step(state, uploaded, CONFIG, mesh)
        sums = label_smoothed_loss(host(batch["source"], batch["previous"]), batch["target"], CONFIG.label_smoothing)
        assert sums["tokens"] == expected["tokens"]
        # fairseq's Adam adds eps before it corrects the bias of the second moment, torch's after: in step n fairseq's
        # eps is (1 - 0.98 ** n) ** -0.5 times torch's, 7 times at first. Beside gradients of 2e-3 that is nothing: the
        # losses differ by 1e-7 with either, by 1e-5 with an eps of 1e-6.
        for part in ("loss", "nll"):
            assert sums[part].item() == pytest.approx(expected[f"{part}_sum"], rel=2e-6)
            assert means[part].item() == pytest.approx(expected[f"{part}_sum"] / expected["tokens"], rel=2e-6)
        optimizer.zero_grad()
        (sums["loss"] / sums["tokens"]).backward()
        norm = torch.stack([parameter.grad.norm() for parameter in host.parameters()]).norm()
        assert norm.item() == pytest.approx(expected["gradient_norm"], rel=1e-5)
        optimizer.step()
    weights = (model.encoder.embed_tokens, model.decoder.embed_tokens, model.decoder.output_projection)
    assert len({id(module.weight) for module in weights}) == 1


def test_our_reader_gives_fairseqs_batches(golden):
    pairs = wmt.open_pairs(GOLDEN / "joint", "train")
    assert len(pairs) == 200 and len(pairs.source_dictionary) == 64
    assert pairs.source_dictionary is pairs.target_dictionary

    def rows(batch: dict) -> list:
        # fairseq sorts a batch by length and pads the source at the left.
        parts = [np.asarray(batch[part]) for part in ("source", "previous", "target")]
        return sorted([part[part != PAD].tolist() for part in row] for row in zip(*parts, strict=True))

    for number in range(10):
        expected = step_batch(golden, number)
        shape = expected["source"].shape[1], expected["target"].shape[1]
        ours = pairs.batch(np.arange(16 * number, 16 * number + 16), shape)
        assert rows(ours) == rows(expected)
    test = wmt.open_pairs(GOLDEN / "joint", "test")
    encoded = test.encode((GOLDEN / "text/test.en").read_text(encoding="utf-8").splitlines())
    for index, theirs in zip(golden["search.index"], golden["search.source"], strict=True):
        assert encoded[index].tolist() == theirs[theirs != PAD].tolist()


@pytest.mark.parametrize(("rows", "tokens", "packed"), [(32, 30, True), (24, 64, False), (8, 24, False)])
def test_packed_rows_have_the_logits_of_separate_rows_and_short_rows_of_a_device_are_packed(rows, tokens, packed, mesh):
    model, draw = golden_transformer("trained.pt"), torch.Generator().manual_seed(0)
    source, previous = (torch.randint(4, 64, (rows, n), generator=draw) for n in (tokens, tokens - 4))
    source[1::3, :5] = previous[1::3, 9:] = PAD
    expected, real = model(source, previous).detach(), previous != PAD
    sides = [side.reshape(rows // 4, -1) for side in (source, previous)]
    segments = [(torch.arange(side.shape[1]) * 4 // side.shape[1] + 1) * (side != PAD) for side in sides]
    found = model(*sides, *segments).detach().reshape(expected.shape)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)
    found = device.to_device(model, mesh)(*(device.upload(side, mesh) for side in (source, previous)), packing_parts=8)
    assert (f"f32[{rows // 4},4,120,120]" in torch_xla._XLAC._get_xla_tensors_hlo([found])) == packed
    torch.testing.assert_close(found.cpu()[real], expected[real], rtol=0, atol=1e-5)


def test_a_batch_with_empty_rows_has_finite_losses_and_gradients():
    model = Transformer(SMALL, 30, 30)
    source = torch.tensor([[5, 6, EOS], [PAD, PAD, PAD]])
    previous, target = torch.tensor([[EOS, 4], [PAD, PAD]]), torch.tensor([[4, EOS], [PAD, PAD]])
    sums = label_smoothed_loss(model(source, previous), target, 0.1)
    torch.testing.assert_close(sums, label_smoothed_loss(model(source[:1], previous[:1]), target[:1], 0.1))
    sums["loss"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    nothing = label_smoothed_loss(model(source[1:], previous[1:]), target[1:], 0.1)
    assert all(value == 0 for value in nothing.values())


def test_sizes_and_sentences_that_do_not_fit_are_refused():
    assert Transformer(replace(SMALL, share_embeddings="decoder"), 30, 20).decoder.embed_tokens.num_embeddings == 20
    with pytest.raises(ValueError, match="dictionaries of 30 and 20 words cannot share embeddings"):
        Transformer(SMALL, 30, 20)
    with pytest.raises(ValueError, match="a width of 16 does not divide into 3 heads"):
        Transformer(replace(SMALL, heads=3), 30, 30)
    model = Transformer(SMALL, 30, 30).eval()
    fits, too_long = torch.full((1, 40), 5), torch.full((1, 41), 5)
    assert model(fits, fits).isfinite().all()
    for source, previous in ((too_long, fits), (fits, too_long)):
        with pytest.raises(ValueError, match="41 tokens a sentence; the model has 40 positions"):
            model(source, previous)


@pytest.mark.parametrize(("tokens", "written"), [(6, False), (32, False), (32, True)])  # 32: summed in four parts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_label_smoothed_loss_and_gradient_equal_fairseqs_formula(dtype, tokens, written, form, request):
    logits = (5 * torch.randn(3, tokens, 11)).to(dtype)
    logits[0] += 1000  # exp would overflow
    target = torch.randint(2, 11, (3, tokens), dtype=torch.int32)
    target[1, 2:] = PAD
    target[2] = PAD
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    got = label_smoothed_loss(ours, target, 0.1, written)
    # fairseq's label_smoothed_nll_loss shares the smoothing out over the other 10 words, torch over all 11.
    flat = {"target": target.long().flatten(), "ignore_index": PAD, "reduction": "sum"}
    shares = (0.0, 0.1 * 11 / 10)
    nll, expected = (F.cross_entropy(theirs.double().flatten(0, 1), **flat, label_smoothing=share) for share in shares)
    assert got["tokens"] == tokens + 2
    torch.testing.assert_close((got["loss"].double(), got["nll"].double()), (expected, nll), rtol=1e-5, atol=1e-4)
    got["loss"].backward()
    expected.backward()
    tolerance = 1e-4 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    assert ours.grad.dtype == dtype and not ours.grad[2].any()
    if request.node.callspec.params["form"] == "compiled":  # whose backward passes are written out
        (first,) = torch.autograd.grad(label_smoothed_loss(ours, target, 0.1)["loss"] ** 2, ours, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


def test_sizes_are_fairseqs():
    """Counted by hand, with 32,768 words in one dictionary."""
    counts = {"transformer_iwslt_de_en": 48_320_512, "transformer_wmt_en_de": 60_915_712}
    counts |= {"transformer_vaswani_wmt_en_de_big": 209_911_808, "transformer_wmt_en_de_big": 209_911_808}
    for name, count in (counts | {"transformer_wmt_en_de_big_t2t": 209_915_904}).items():
        with torch.device("meta"):
            model = Transformer(ARCHITECTURES[name], 32_768, 32_768)
        assert sum(parameter.numel() for parameter in model.parameters()) == count, name


def test_weights_start_as_fairseqs():
    """Each kind of tensor, over all layers: mean and spread."""
    theirs = golden_transformer("initial.pt")
    ours = Transformer(theirs.arch, 64, 64)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    kinds = defaultdict(list)
    for (name, one), two in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        kinds[re.sub(r"\.layers\.\d+", "", name)].append((one.flatten(), two.flatten()))
    for name, pairs in kinds.items():
        own, other = map(torch.cat, zip(*pairs, strict=True))
        # 64 values of a uniform distribution, and up to 8,192: 5 standard errors.
        error = 5 / len(own) ** 0.5
        torch.testing.assert_close(own.mean(), other.mean(), rtol=0, atol=2 * error * other.std().item(), msg=name)
        torch.testing.assert_close(own.std(), other.std(), rtol=error, atol=0, msg=name)
    assert not ours.encoder.embed_tokens.weight[PAD].any()


def test_dropout_is_where_fairseq_has_it():
    source, previous = torch.tensor([[5, 6, 7, EOS]]), torch.tensor([[EOS, 4, 9]])
    for kind in (None, "dropout", "attention_dropout", "activation_dropout"):
        model = Transformer(replace(SMALL, **{kind: 0.5}) if kind else SMALL, 30, 30).train()
        difference = (model(source, previous) - model(source, previous)).abs().max()
        assert difference > 1e-3 if kind else difference == 0
        model.eval()
        assert torch.equal(model(source, previous), model(source, previous))
