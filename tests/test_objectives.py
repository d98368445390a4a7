"""models/objectives.py, and what it needs of models/encoders.py, layers.py and permutation.py, against transformers'
models, which run their heads on every token, torch's losses and XLNet's code; on the CPU and as one program of XLA."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import equal
from model_helpers import assert_all_close, randomized, to_xla, with_gradients
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.pretraining import MaskedText, PermutedText
from data.text import SyntheticText
from models import distilbert, encoders, layers, objectives, permutation
from train.common import device, loading
from train.common.xla import backend as xla

# Model, kind of the rows, and places for predictions: more than most rows need, so that there are fillers.
OBJECTIVES = {
    "words": (transformers.BertForMaskedLM, "bert", 6),
    "next sentence": (transformers.BertForPreTraining, "bert", 6),
    "roberta": (transformers.RobertaForMaskedLM, "roberta", 6),
    "permutation": (transformers.XLNetLMHeadModel, "xlnet", 7),
    "distillation": (transformers.DistilBertForMaskedLM, "bert", 6),
}
ROWS, LENGTH, LONGER = 8, 32, 41
EXACT = {"rtol": 1e-5, "atol": 1e-5}  # of numbers of about 1, in float32

every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


@functools.cache
def rows_of(objective: str) -> MaskedText | PermutedText:
    _, kind, predictions = OBJECTIVES[objective]
    pairs = objective in ("next sentence", "permutation")
    rows = SyntheticText("valid", kind, LENGTH, pairs, rows=64)
    if objective == "permutation":
        return PermutedText(rows, predictions)
    return MaskedText(rows, predictions, whole_words=False, next_sentence=pairs)


def batch_of(objective: str) -> dict[str, Tensor]:
    batch = loading.stack([rows_of(objective).example(row, np.random.default_rng(row)) for row in range(ROWS)])
    assert 0 < batch["weights"].mean() < 1 and 0 < batch["attention_mask"].float().mean() < 1
    return batch


def new(objective: str, seed: int = 0) -> PreTrainedModel:
    """transformers' own model."""
    model_class, kind, _ = OBJECTIVES[objective]
    kind = "distilbert" if objective == "distillation" else kind
    torch.manual_seed(seed)
    return randomized(model_class(encoders.configuration(kind, "tiny", rows_of(objective).text.tokenizer, LONGER)))


def teacher_of(objective: str) -> PreTrainedModel | None:
    return new("words", seed=1) if objective == "distillation" else None


def fast(model: PreTrainedModel | None) -> PreTrainedModel | None:
    return encoders.fast_layers(copy.deepcopy(model)) if model is not None else None


def whole_row_labels(batch: dict[str, Tensor]) -> Tensor:
    """What transformers' models take as labels [B, T]: -100 where nothing is predicted."""
    labels = torch.full((ROWS, LENGTH), -100)
    rows, places = torch.nonzero(batch["weights"], as_tuple=True)
    labels[rows, batch["positions"][rows, places].long()] = batch["labels"][rows, places].long()
    return labels


def plain_losses(objective: str, model, teacher, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same from transformers' models as they are, with all their heads on all tokens."""
    inputs = {"input_ids": batch["input_ids"].long(), "attention_mask": batch["attention_mask"]}
    if objective in ("words", "next sentence", "permutation"):
        inputs["token_type_ids"] = batch["token_type_ids"].long()
    labels = whole_row_labels(batch)
    if objective == "permutation":
        labels = torch.where(batch["weights"] > 0, batch["labels"].long(), -100)
        inputs["perm_mask"] = permutation.perm_mask(batch["order"], whole_row_labels(batch) >= 0)
        inputs["target_mapping"] = F.one_hot(batch["positions"].long(), LENGTH).float()
        loss = model(**inputs, labels=labels, use_mems=False).loss
        return {"loss": loss, "words": loss}
    if objective == "next sentence":
        outputs = model(**inputs, labels=labels, next_sentence_label=batch["next_sentence"].long())
        related = F.cross_entropy(outputs.seq_relationship_logits, batch["next_sentence"].long())
        return {"loss": outputs.loss, "words": outputs.loss - related, "related": related}
    outputs = model(**inputs, labels=labels, output_hidden_states=True)
    if teacher is None:
        return {"loss": outputs.loss, "words": outputs.loss}
    taught = teacher(**inputs, output_hidden_states=True)  # of type 0 all, as the batch has it
    chosen, real = labels >= 0, batch["attention_mask"].bool()
    wanted, found = F.softmax(taught.logits[chosen] / 2.0, -1), F.log_softmax(outputs.logits[chosen] / 2.0, -1)
    soft = 2.0**2 * F.kl_div(found, wanted, reduction="batchmean")
    states = outputs.hidden_states[-1][real], taught.hidden_states[-1][real]
    cosine = F.cosine_embedding_loss(*states, torch.ones(len(states[0])))
    loss = 5 * soft + 2 * outputs.loss + 1 * cosine
    return {"loss": loss, "words": outputs.loss, "soft": soft, "cosine": cosine}


def step(model, teacher, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = objectives.losses(model, teacher, batch)
    return with_gradients(model, parts, parts["loss"])


@every_objective
def test_losses_and_gradients_are_transformers_also_on_xla(objective, mesh):
    batch, model, teacher = batch_of(objective), new(objective), teacher_of(objective)
    plain = plain_losses(objective, model, teacher, batch)
    expected = with_gradients(model, plain, plain["loss"])
    parts = {"distillation": ("soft", "cosine"), "next sentence": ("related",)}.get(objective, ())
    assert {name for name in expected if "." not in name} == {"loss", "words", *parts}
    assert all(values.any() for values in expected.values())
    named = dict(model.named_parameters())
    assert len(expected) - 2 - len(parts) >= len(named) - 2  # XLNet's last content stream is not read

    on_device = device.to_device(fast(model), mesh)
    theirs = device.to_device(fast(teacher), mesh) if teacher is not None else None
    uploaded = to_xla(batch, mesh)
    compiled = device.compiled(step, mesh)  # raises where a value is read on the way, or an operation is the host's
    reads = xla.host_reads()
    results = [step(fast(model), fast(teacher), batch), compiled(on_device, theirs, uploaded)]
    assert xla.host_reads() == reads
    for found in results:
        assert_all_close(found, expected, rtol=1e-4, share=1e-5, atol=1e-6)
    graphs = xla.compilations()
    compiled(on_device, theirs, uploaded)
    assert xla.compilations() == graphs


def test_a_teacher_gets_no_gradient():
    teacher = fast(new("words", seed=1))
    objectives.losses(fast(new("distillation")), teacher, batch_of("distillation"))["loss"].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def scores_of(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in objectives.scores(model, batch).items()}


def with_fillers(objective: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two more predictions a row that do not count, and other labels for those that did not."""
    batch, place = dict(batch), LENGTH - 1 if objective == "permutation" else 3
    for name, value in (("positions", place), ("labels", 20), ("weights", 0)):
        batch[name] = F.pad(batch[name], (2, 0), value=value)
    batch["labels"] = torch.where(batch["weights"] > 0, batch["labels"], 7)
    return batch


def with_padding(objective: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of LONGER places; tokens of all sorts in the new ones and in the padding that was there."""
    more, left = LONGER - LENGTH, objective == "permutation"
    batch = {name: values.clone() for name, values in batch.items()}
    if left:
        batch["order"][batch["order"] == LENGTH] = LONGER
        batch["positions"] += more
    for name in ("input_ids", "attention_mask", "token_type_ids", "order"):
        if name in batch:
            filler = {"order": LONGER, "token_type_ids": 3 if left else 0}.get(name, 0)
            batch[name] = F.pad(batch[name], (more, 0) if left else (0, more), value=filler)
    torch.manual_seed(0)
    tokens = torch.randint(20, 60, batch["input_ids"].shape, dtype=torch.int32)
    batch["input_ids"] = torch.where(batch["attention_mask"] > 0, batch["input_ids"], tokens)
    return batch


@pytest.mark.parametrize("change", [with_fillers, with_padding])
@every_objective
def test_neither_fillers_nor_padding_change_anything(objective, change):
    batch, model, teacher = batch_of(objective), fast(new(objective)), fast(teacher_of(objective))
    changed = change(objective, batch)
    assert changed["weights"].sum() == batch["weights"].sum()
    assert changed["input_ids"].shape != batch["input_ids"].shape or change is with_fillers
    assert_all_close(step(model, teacher, changed), step(model, teacher, batch), rtol=1e-5, share=1e-6, atol=1e-6)
    expected, found = (scores_of(model, part | {"mask": torch.ones(ROWS)}) for part in (batch, changed))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_predictions_has_a_loss_of_nought():
    batch = batch_of("words")
    found = step(fast(new("words")), None, batch | {"weights": torch.zeros_like(batch["weights"])})
    assert found["loss"] == 0 and not any(value.any() for value in found.values())


@pytest.mark.parametrize("objective", ["words", "next sentence", "permutation"])
def test_scores_are_sums_over_the_rows_that_count(objective):
    batch, model = batch_of(objective), new(objective)
    mask = torch.tensor([1.0, 1, 0, 1, 1, 0, 0, 1])
    kept = {name: values[mask > 0] for name, values in batch.items()}
    expected = scores_of(fast(model), kept | {"mask": torch.ones(5)})
    assert scores_of(fast(model), batch | {"mask": mask}) == pytest.approx(expected, rel=1e-5)
    assert expected["predicted"] == kept["weights"].sum()
    loss = objectives.losses(fast(model), None, kept)["words"]
    assert expected["loss"] / expected["predicted"] == pytest.approx(loss.item(), rel=1e-5)
    # The right answers are made of the model's own for some of the predictions, and for some of the rows.
    parts = objectives.forward(fast(model), batch)
    right = torch.zeros_like(batch["weights"])
    right[:, 0] = batch["weights"][:, 0]
    best, worst = parts["logits"].argmax(-1), parts["logits"].argmin(-1)
    labelled = batch | {"labels": torch.where(right > 0, best, worst), "mask": mask}
    if objective == "next sentence":
        labelled["next_sentence"] = parts["related"].argmax(-1)
        labelled["next_sentence"][[0, 2]] ^= 1  # row 2 does not count
    found = scores_of(fast(model), labelled)
    assert found["accuracy"] == right[mask > 0].sum() == 5
    if objective == "next sentence":
        assert found["next_sentence_accuracy"] == 4 and found["rows"] == 5


def logits_and_labels(dtype: torch.dtype, spread: float) -> tuple[Tensor, Tensor]:
    logits = (torch.randn(3, 5, 50, dtype=torch.float64) * spread).to(dtype).requires_grad_()
    return logits, torch.randint(50, (3, 5), dtype=torch.int32)


def assert_loss_and_gradient(found: Tensor, expected: Tensor, logits: Tensor, atol: float) -> None:
    """float32 losses of [B, T], and the gradient of their weighted sum."""
    assert found.dtype == torch.float32 and found.shape == (3, 5)
    rounding = 2e-7 * logits.detach().abs().max().item()
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=rounding)
    upstream = torch.linspace(0.5, 1.5, 15).view(3, 5)
    (ours,) = torch.autograd.grad((found * upstream).sum(), logits)
    (theirs,) = torch.autograd.grad((expected * upstream).sum(), logits)
    assert theirs.abs().max() > 0.1 and ours.dtype == logits.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)


# In bfloat16 losses are as exact as in float32; gradients are rounded to its 8 bits.
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 0.008)]


@pytest.mark.parametrize("spread", [1.0, 300.0])
@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
def test_negative_log_likelihood_is_torchs(dtype, atol, spread):
    logits, labels = logits_and_labels(dtype, spread)
    expected = F.cross_entropy(logits.double().transpose(1, 2), labels.long(), reduction="none")
    found = layers.negative_log_likelihood(logits, labels)
    assert expected.min() > 0.1 and found.isfinite().all()
    assert_loss_and_gradient(found, expected, logits, atol)


@pytest.mark.parametrize(("dtype", "atol"), PRECISIONS)
def test_divergence_is_torchs_also_where_a_word_is_impossible(dtype, atol):
    logits, _ = logits_and_labels(dtype, 3.0)
    wanted = torch.randn(3, 5, 50).mul(3).index_fill(2, torch.tensor(7), -torch.inf).softmax(-1)
    expected = F.kl_div(F.log_softmax(logits.double(), -1), wanted.double(), reduction="none").sum(2)
    assert expected.min() > 0.5 and (wanted == 0).any()
    assert_loss_and_gradient(layers.divergence(logits, wanted), expected, logits, atol)
    assert layers.divergence(logits, logits.detach().float().softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize(("depth", "taken"), [(4, [0, 2]), (2, [0, 1]), (6, [0, 3])])
def test_a_student_begins_as_its_teacher_without_the_layers_between(depth, taken):
    tokenizer, batch = rows_of("words").text.tokenizer, batch_of("words")
    settings = [encoders.configuration(kind, "tiny", tokenizer, LONGER) for kind in ("bert", "distilbert")]
    settings[0].num_hidden_layers, settings[1].n_layers = depth, 2
    classes = transformers.BertForMaskedLM, transformers.DistilBertForMaskedLM
    teacher, student = (randomized(kind(of)) for kind, of in zip(classes, settings, strict=True))

    def encode(model: PreTrainedModel) -> Tensor:
        return model(input_ids=batch["input_ids"].long(), attention_mask=batch["attention_mask"]).logits

    before = copy.deepcopy(teacher.state_dict())
    distilbert.begin_with_layers(student, teacher)
    assert equal(teacher.state_dict(), before)
    # The teacher as the student: of these layers alone, and without types of tokens.
    teacher.bert.encoder.layer = nn.ModuleList(teacher.bert.encoder.layer[i] for i in taken)
    teacher.bert.embeddings.token_type_embeddings.weight.data.zero_()
    expected = encode(teacher)
    assert expected.std() > 0.1
    torch.testing.assert_close(encode(student), expected, **EXACT)
    # Copies: what the student learns is not the teacher's.
    with torch.no_grad():
        student.distilbert.transformer.layer[0].attention.q_lin.weight.zero_()
    torch.testing.assert_close(encode(teacher), expected, **EXACT)
    assert student.vocab_projector.weight is student.distilbert.embeddings.word_embeddings.weight


def test_the_head_of_another_architecture_is_not_guessed():
    settings = transformers.ElectraConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=1, vocab_size=9)
    model = transformers.ElectraForMaskedLM(settings)
    with pytest.raises(ValueError, match="head of a electra is not known"):
        objectives.predict(model, torch.zeros(1, 2, 16))


def local_perm(order: np.ndarray, target: np.ndarray, functional: np.ndarray) -> np.ndarray:
    """XLNet's data_utils._local_perm in numpy, from where it has the permuted indices."""
    masked_or_func = target | functional
    rev_index = np.where(masked_or_func, order, -1)
    self_rev_index = np.where(target, rev_index, rev_index + 1)
    return ((self_rev_index[:, None] <= rev_index[None, :]) & masked_or_func).astype(np.float32)


def test_a_permutations_mask_is_that_of_xlnets_authors_and_nobody_sees_padding():
    rng, length = np.random.default_rng(0), 24
    kinds = rng.choice([0, 1, 2], (50, length), p=[0.7, 0.2, 0.1])  # visible; targets; separators
    placed = np.stack([rng.permutation(length) for _ in kinds])
    order, targets = torch.from_numpy(np.where(kinds == 0, -1, placed)), torch.from_numpy(kinds == 1)
    found = permutation.perm_mask(order, targets)
    assert found.dtype == torch.float32 and permutation.perm_mask(order, targets, torch.bool).equal(found.bool())
    for mask, places, kind in zip(found, placed, kinds, strict=True):
        assert np.array_equal(mask, local_perm(places, kind == 1, kind == 2))
    order, targets = F.pad(order, (4, 0), value=length + 4), F.pad(targets, (4, 0))
    padded = permutation.perm_mask(order, targets)
    assert padded[:, :, :4].eq(1).all() and padded[:, 4:, 4:].equal(found)
    assert padded[:, :4, 4:].eq(0).all()  # rows of padding see something: no softmax over nothing


def test_targets_of_a_permutation_and_their_mapping():
    positions, weights = torch.tensor([[1, 3, 4], [0, 2, 4]], dtype=torch.int32), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    targets = permutation.is_target(positions, weights, 5)
    assert targets.tolist() == [[False, True, False, True, False], [True] + 4 * [False]]
    mapping = permutation.target_mapping(positions, 5)
    assert mapping.dtype == torch.float32 and mapping.equal(F.one_hot(positions.long(), 5).float())
    assert permutation.target_mapping(positions, 5, torch.bfloat16).dtype == torch.bfloat16
