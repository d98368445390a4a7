"""models/beam_search.py against fairseq's golden hypotheses, eagerly and as one program on four XLA devices."""

import copy
import json
from functools import partial

import pytest
import torch
from model_helpers import GOLDEN, arrays, golden_transformer
from torch import Tensor

from models import beam_search
from models.beam_search import CHUNK, search, top_k
from models.layers import MASKED
from models.transformer import EOS, PAD, Architecture, Transformer, rules
from train.common import device, sharding
from train.common.mesh import Layout
from train.common.xla import backend as xla
from train.common.xla.while_loop import WhileLoop

SEARCHES = json.loads((GOLDEN / "numbers.json").read_text())["searches"]


@pytest.fixture(scope="module")
def trained() -> Transformer:
    return golden_transformer("trained.pt")


@pytest.fixture(scope="module")
def sources() -> Tensor:
    return torch.from_numpy(arrays()["search.source"])


def limits(source: Tensor, most: int) -> Tensor:
    return torch.full((len(source),), most, dtype=torch.int32, device=source.device)


@pytest.mark.parametrize("settings", SEARCHES, ids=lambda one: f"beam{one['beam']}-{one['lenpen']}-{one['max_len_b']}")
def test_all_hypotheses_equal_fairseqs(trained, sources, settings):
    # fairseq's limit: one number for a batch, from its padded width.
    most = int(settings["max_len_a"] * sources.shape[1] + settings["max_len_b"])
    tokens, scores = search(trained, sources, limits(sources, most), settings["beam"], most + 1, settings["lenpen"])
    assert tokens.dtype == torch.int32
    for found, ours, hypotheses in zip(tokens.tolist(), scores.tolist(), settings["sentences"], strict=True):
        expected = [one["tokens"] + [PAD] * (tokens.shape[2] - len(one["tokens"])) for one in hypotheses]
        assert found == expected and len(found) == settings["beam"]
        assert ours == pytest.approx([one["score"] for one in hypotheses], rel=0, abs=1e-5)


@pytest.mark.usefixtures("compiled")
def test_in_bfloat16_the_best_hypotheses_stay_fairseqs(trained, sources, monkeypatch):
    """In the form that compiled devices run."""
    monkeypatch.setattr(beam_search, "NATIVE_DEVICES", ())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens, scores = search(trained, sources, limits(sources, 20), 4, 21)
    best = [hypotheses[0] for hypotheses in SEARCHES[0]["sentences"]]
    found = [row[row != PAD].tolist() for row in tokens[:, 0]]
    # A tie could turn out otherwise in another version of PyTorch; here all 12 are the same, scores 0.0015 off.
    assert sum(one == other["tokens"] for one, other in zip(found, best, strict=True)) >= 11
    assert scores.dtype == torch.float32
    expected = torch.tensor([hypothesis["score"] for hypothesis in best])
    assert 1e-5 < (scores[:, 0] - expected).abs().max() < 0.004  # 0.007 with logits in bfloat16


def test_one_program_serves_any_batch_of_a_shape_and_its_loop_ends_with_the_last_sentence(mesh, trained, sources):
    """Each layer lies on two devices, and the caches grow in the middle; a loop in Python has fairseq's hypotheses."""
    mesh = sharding.arranged(mesh, Layout("data=2,model=2"))
    model = device.to_device(copy.deepcopy(trained), mesh, rules)
    loop = WhileLoop(partial(beam_search.step, model, length_penalty=1.0), model)

    def python_loop(state: dict, reads: dict) -> dict:
        while bool(state["running"]):
            state = beam_search.step(trained, state, reads, 1.0)
        return state

    def translate(model: Transformer, source: Tensor, limit: Tensor, loop=loop) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the number of rounds, too."""
        ends = []

        def keep(state: dict, reads: dict) -> dict:
            ends.append(loop(state, reads))
            return ends[-1]

        return *search(model, source, limit, 4, 30, 1.0, keep), ends[-1]["time"]

    step = device.compiled(translate, mesh)  # strict: a fall-back to the host, or a read in the middle, raises
    rounds, compilations, found = [], [], []
    nothing = torch.full_like(sources, PAD)
    short = torch.where((sources != PAD).sum(1, keepdim=True) < 10, sources, PAD)  # the longer ones left out
    kept = (short != PAD).any(1)
    assert 0 < kept.sum() < len(short)
    for source in (sources, sources.flip(0), short, nothing):
        expected, expected_scores, time = translate(trained, source, limits(source, 29), python_loop)
        got = [each.cpu() for each in step(model, *(device.upload(x, mesh) for x in (source, limits(source, 29))))]
        compilations.append(xla.compilations())
        rounds.append(int(time))
        assert torch.equal(got[0], expected) and got[2] == time
        torch.testing.assert_close(got[1], expected_scores, rtol=0, atol=1e-5)
        found.append(expected)
    # Rows of padding only end at once, and keep no other waiting.
    assert torch.equal(found[2][kept], found[0][kept]) and (found[2][~kept] == PAD).all()
    assert (expected == PAD).all() and (expected_scores == MASKED).all()
    assert 25 >= rounds[0] == rounds[1] > rounds[2] > rounds[3] == 0
    assert len(set(compilations[1:])) == 1


def test_scores_are_those_of_the_forward_pass():
    # Separate dictionaries, normalisation before the layers; the forward pass has no cache.
    model, source = golden_transformer("prenorm.pt"), torch.from_numpy(arrays()["prenorm.left.source"])
    beam, penalty = 3, 0.6
    tokens, scores = search(model, source, limits(source, 12), beam, 13, penalty)
    hypotheses = tokens.flatten(0, 1)
    previous = torch.cat([torch.full_like(hypotheses[:, :1], EOS), hypotheses[:, :-1]], 1)
    previous = torch.where(hypotheses == PAD, PAD, previous)
    logits = model(source.repeat_interleave(beam, 0), previous).detach()
    each = logits.log_softmax(2).gather(2, hypotheses.long()[..., None])[..., 0]
    real = hypotheses != PAD
    expected = (each * real).sum(1) / real.sum(1) ** penalty
    torch.testing.assert_close(scores.flatten(), expected, rtol=1e-5, atol=1e-5)


def test_each_sentence_has_its_own_limit_and_nothing_else_changes_it(trained, sources, monkeypatch):
    """Neither padding nor others of the batch, nor that finished sentences are dropped."""
    rows, step = [], beam_search.step

    def counting(model, state, reads, length_penalty):
        rows.append(len(state["last"]))
        return step(model, state, reads, length_penalty)

    limit = torch.tensor([3, 20, 1, 7, 20, 5, 2, 8, 9, 4, 6, 20], dtype=torch.int32)
    right = torch.nn.utils.rnn.pad_sequence([row[row != PAD] for row in sources], batch_first=True, padding_value=PAD)
    assert (right != sources).any(), "fairseq pads at the left"
    monkeypatch.setattr(beam_search, "step", counting)
    tokens, scores = search(trained, right, limit, 4, 21)
    assert rows[0] == len(sources) and rows == sorted(rows, reverse=True) and rows[-1] <= len(sources) // 2
    lengths = (tokens != PAD).sum(2)
    assert (lengths <= limit[:, None] + 1).all()
    assert (lengths[limit < 7] == limit[limit < 7, None] + 1).all(), "cut off"
    for row, source in enumerate(sources):
        alone, alone_scores = search(trained, source[source != PAD][None], limit[row : row + 1], 4, 21)
        assert torch.equal(alone[0], tokens[row])
        torch.testing.assert_close(alone_scores[0], scores[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize("beam", [8, 40])
def test_a_beam_wider_than_what_there_is_to_say_leaves_places_empty(beam):
    # Five words that may stand first, and one word at most: five hypotheses.
    arch = Architecture(dim=16, ffn_dim=32, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0)
    model, source = Transformer(arch, 7, 7).eval(), torch.tensor([[4, 5, EOS], [6, 6, EOS]], dtype=torch.int32)
    for most, choices in ((0, 0), (1, 5), (2, 30)):
        tokens, scores = search(model, source, limits(source, most), beam, most + 1)
        for row in range(2):
            found = [tuple(words) for words in tokens[row, :choices].tolist()]
            assert len(set(found)) == min(choices, beam)
            assert all(EOS in words and words[0] not in (EOS, PAD) for words in found)
        assert (scores[:, :choices] > MASKED / 2).all()
        assert (tokens[:, choices:] == PAD).all() and (scores[:, choices:] == MASKED).all()


@pytest.mark.parametrize("k", [1, 4, 10])
def test_top_k_equals_torch_topk_around_the_size_where_chunks_begin_also_on_xla(mesh, k):
    """Equal scores may stand in another order."""
    for extra in (-1, 0, 1, 127, 128, 129, 1000):
        size = 2 * k * CHUNK + extra
        scores = torch.randn(4, size)
        scores[1], scores[2], scores[3, 1:] = scores[1].sign(), MASKED, MASKED
        for place in ("cpu", mesh.device) if (k, extra) == (4, 1000) else ("cpu",):
            values, places = (each.cpu() for each in top_k(scores.to(place), k))
            assert torch.equal(values, scores.topk(k, 1).values), extra
            assert torch.equal(scores.gather(1, places), values), extra
            assert all(len(row.unique()) == k for row in places), extra
