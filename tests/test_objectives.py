"""Compares the objectives with transformers' models, which run their heads on every token.

What models/layers.py has for them is compared with torch's losses, and the permutations with
XLNet's code. Ours run on the CPU and as one program of XLA.
"""

import copy
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import equal
from model_helpers import assert_all_close, fast, randomized
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.pretraining import MaskedText, PermutedText
from data.text import SyntheticText
from models import distillation, encoders, layers, objectives, permutation
from train.common import device, loading


@dataclass(frozen=True)
class Objective:
    """What is pretrained, on which rows."""

    model_class: type
    rows: str  # the kind of the encoder whose rows they are
    predictions: int  # slots of a row: more than most rows need, so that there are fillers


OBJECTIVES = {
    "next sentence": Objective(transformers.BertForPreTraining, rows="bert", predictions=6),
    "roberta": Objective(transformers.RobertaForMaskedLM, rows="roberta", predictions=6),
    "permutation": Objective(transformers.XLNetLMHeadModel, rows="xlnet", predictions=7),
    "distillation": Objective(transformers.DistilBertForMaskedLM, rows="bert", predictions=6),
}
OF_PAIRS = ("next sentence", "permutation")  # whose rows have two sentences
ROWS = 8
LENGTH = 32
LONGER = 41
NO_LABEL = -100  # that transformers' losses leave out
EXACT = {"rtol": 1e-5, "atol": 1e-5}  # of numbers of about 1, in float32

every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


# Rows and models


@functools.cache
def rows_of(objective: str) -> MaskedText | PermutedText:
    settings = OBJECTIVES[objective]
    pairs = objective in OF_PAIRS
    rows = SyntheticText("valid", settings.rows, LENGTH, pairs, rows=64)
    if objective == "permutation":
        return PermutedText(rows, settings.predictions)
    return MaskedText(rows, settings.predictions, whole_words=False, next_sentence=pairs)


def batch_of(objective: str) -> dict[str, Tensor]:
    """Returns a batch that has fillers and padding."""
    rows = rows_of(objective)
    examples = [rows.example(number, np.random.default_rng(number)) for number in range(ROWS)]
    batch = loading.as_tensors(examples)
    assert 0 < batch["weights"].mean() < 1
    assert 0 < batch["attention_mask"].float().mean() < 1
    return batch


def of_size(model_class: type, kind: str, objective: str, **settings) -> PreTrainedModel:
    """Returns transformers' own model, for the rows of an objective."""
    config = encoders.new_configuration(kind, "tiny", rows_of(objective).text.tokenizer, LONGER)
    config.update(settings)
    return randomized(model_class(config))


def new(objective: str) -> PreTrainedModel:
    """Returns transformers' own model to pretrain."""
    settings = OBJECTIVES[objective]
    kind = "distilbert" if objective == "distillation" else settings.rows
    return of_size(settings.model_class, kind, objective)


def teacher_of(objective: str) -> PreTrainedModel | None:
    """Returns transformers' own model to learn from, if there is one."""
    if objective != "distillation":
        return None
    return of_size(transformers.BertForMaskedLM, "bert", objective)


# transformers' losses


@dataclass
class Plain:
    """A batch in the form that transformers' models take, with all their heads on all tokens."""

    inputs: dict[str, Tensor]
    of_slots: Tensor  # the label of each slot for a prediction [B, P]
    of_tokens: Tensor  # the label of each token [B, T]


def plain_batch(objective: str, batch: dict[str, Tensor]) -> Plain:
    inputs = {
        "input_ids": batch["input_ids"].long(),
        "attention_mask": batch["attention_mask"],
    }
    if objective in OF_PAIRS:
        inputs["token_type_ids"] = batch["token_type_ids"].long()

    of_slots = torch.where(batch["weights"] > 0, batch["labels"].long(), NO_LABEL)
    of_tokens = torch.full((ROWS, LENGTH), NO_LABEL)
    rows, slots = torch.nonzero(batch["weights"], as_tuple=True)
    positions = batch["positions"][rows, slots].long()
    of_tokens[rows, positions] = of_slots[rows, slots]
    return Plain(inputs=inputs, of_slots=of_slots, of_tokens=of_tokens)


def permutation_losses(model, plain: Plain, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = model(
        **plain.inputs,
        perm_mask=permutation.perm_mask(batch["order"], plain.of_tokens >= 0),
        target_mapping=F.one_hot(batch["positions"].long(), LENGTH).float(),
        labels=plain.of_slots,
        use_mems=False,
    ).loss
    return {"loss": loss, "words": loss}


def next_sentence_losses(model, plain: Plain, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    next_sentence = batch["next_sentence"].long()
    outputs = model(**plain.inputs, labels=plain.of_tokens, next_sentence_label=next_sentence)
    related = F.cross_entropy(outputs.seq_relationship_logits, next_sentence)
    return {"loss": outputs.loss, "words": outputs.loss - related, "related": related}


def distillation_losses(model, teacher, plain: Plain) -> dict[str, Tensor]:
    outputs = model(**plain.inputs, labels=plain.of_tokens, output_hidden_states=True)
    # Without types of tokens: all are of type 0, as in the batch.
    taught = teacher(**plain.inputs, output_hidden_states=True)

    predicted = plain.of_tokens >= 0
    wanted = F.softmax(taught.logits[predicted] / 2.0, -1)
    found = F.log_softmax(outputs.logits[predicted] / 2.0, -1)
    soft = 2.0**2 * F.kl_div(found, wanted, reduction="batchmean")

    real = plain.inputs["attention_mask"].bool()
    own_states = outputs.hidden_states[-1][real]
    their_states = taught.hidden_states[-1][real]
    cosine = F.cosine_embedding_loss(own_states, their_states, torch.ones(len(own_states)))

    loss = 5 * soft + 2 * outputs.loss + 1 * cosine
    return {"loss": loss, "words": outputs.loss, "soft": soft, "cosine": cosine}


def plain_losses(objective: str, model, teacher, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what `objectives.losses` does, from transformers' models as they are."""
    plain = plain_batch(objective, batch)
    if objective == "permutation":
        return permutation_losses(model, plain, batch)
    if objective == "next sentence":
        return next_sentence_losses(model, plain, batch)
    if objective == "distillation":
        return distillation_losses(model, teacher, plain)
    loss = model(**plain.inputs, labels=plain.of_tokens).loss
    return {"loss": loss, "words": loss}


# Losses of the objectives


def with_gradients(model: nn.Module, losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the losses, and the gradient of "loss" for each parameter that has one, by its
    name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(losses["loss"], parameters, allow_unused=True)

    found = {name: loss.detach() for name, loss in losses.items()}
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            found[name] = gradient
    return found


def step(model, teacher, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return with_gradients(model, objectives.losses(model, teacher, batch))


@every_objective
def test_losses_and_gradients_are_transformers_also_on_xla(objective, mesh):
    batch = batch_of(objective)
    model = new(objective)
    teacher = teacher_of(objective)
    expected = with_gradients(model, plain_losses(objective, model, teacher, batch))
    assert all(values.any() for values in expected.values())

    found = step(fast(model), fast(teacher), batch)
    assert_all_close(found, expected, rtol=1e-4, share=1e-5, atol=1e-6)

    if objective != "roberta":  # whose layers are BERT's
        model_on_device = device.to_device(fast(model), mesh)
        teacher_on_device = fast(teacher)
        if teacher_on_device is not None:
            device.to_device(teacher_on_device, mesh)
        uploaded = {name: values.to(mesh.device) for name, values in batch.items()}
        # Strict: it raises where a value is read within the step, or an operation is the host's.
        compiled_step = device.compiled(step, mesh)
        found = compiled_step(model_on_device, teacher_on_device, uploaded)
        assert_all_close(found, expected, rtol=1e-4, share=1e-5, atol=1e-6)


def test_a_teacher_gets_no_gradient():
    teacher = fast(teacher_of("distillation"))
    student = fast(new("distillation"))

    losses = objectives.losses(student, teacher, batch_of("distillation"))
    losses["loss"].backward()

    assert all(parameter.grad is None for parameter in teacher.parameters())


def with_fillers(batch: dict[str, Tensor], position: int) -> dict[str, Tensor]:
    """Returns the batch with two more predictions per row that do not count, of this position, and
    with other labels wherever none counts."""
    batch = dict(batch)
    for name, filler in (("positions", position), ("labels", 0), ("weights", 0)):
        batch[name] = F.pad(batch[name], (2, 0), value=filler)
    batch["labels"] = torch.where(batch["weights"] > 0, batch["labels"], 7)
    return batch


def with_more_padding(objective: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the batch in rows of LONGER tokens, with more fillers, and with other tokens in its
    padding."""
    more = LONGER - LENGTH
    fillers = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0}
    if objective == "permutation":  # XLNet pads at the left
        batch = with_fillers(batch, position=LENGTH - 1)
        batch["positions"] = batch["positions"] + more
        batch["order"] = torch.where(batch["order"] == LENGTH, LONGER, batch["order"])
        fillers |= {"token_type_ids": 3, "order": LONGER}
        padding = (more, 0)
    else:
        batch = with_fillers(batch, position=3)
        padding = (0, more)

    for name, filler in fillers.items():
        if name in batch:
            batch[name] = F.pad(batch[name], padding, value=filler)

    tokens = torch.randint(20, 60, batch["input_ids"].shape, dtype=torch.int32)
    batch["input_ids"] = torch.where(batch["attention_mask"] > 0, batch["input_ids"], tokens)
    return batch


@every_objective
def test_neither_fillers_nor_padding_change_anything(objective):
    batch = batch_of(objective)
    model = fast(new(objective))
    teacher = fast(teacher_of(objective))

    found = step(model, teacher, with_more_padding(objective, batch))

    expected = step(model, teacher, batch)
    assert_all_close(found, expected, rtol=1e-5, share=1e-6, atol=1e-6)


@every_objective
def test_the_mean_over_micro_batches_is_the_loss_of_the_batch(objective):
    """They have different numbers of tokens, and one of them has no prediction."""
    batch = batch_of(objective)
    model = fast(new(objective))
    teacher = fast(teacher_of(objective))
    batch["weights"][2:4] = 0
    micro_batches = []
    for row in range(0, ROWS, 2):
        micro_batches.append({name: values[row : row + 2] for name, values in batch.items()})

    counts = [objectives.counts(micro_batch) for micro_batch in micro_batches]
    for name in ("predicted", "tokens"):
        numbers = {count[name].sum().item() for count in counts}
        assert len(numbers) > 2, name

    found = []
    for micro_batch in micro_batches:
        for name in ("predicted", "tokens"):
            micro_batch[name] = sum(count[name] for count in counts)
        losses = objectives.losses(model, teacher, micro_batch, len(micro_batches))
        found.append(with_gradients(model, losses))

    means = {}
    for name in found[0]:
        means[name] = sum(values[name] for values in found) / len(found)
    assert_all_close(means, step(model, teacher, batch), rtol=1e-4, share=1e-5, atol=1e-6)


def test_a_batch_without_predictions_has_a_loss_of_0():
    batch = batch_of("roberta")
    batch["weights"] = torch.zeros_like(batch["weights"])

    found = step(fast(new("roberta")), None, batch)

    assert found["loss"] == 0
    assert not any(value.any() for value in found.values())


# Scores

COUNTED_ROWS = torch.tensor([1.0, 1, 0, 1, 1, 0, 0, 1])


def test_scores_are_sums_over_the_rows_that_count():
    batch = batch_of("next sentence")
    model = fast(new("next sentence"))

    found = objectives.scores(model, batch | {"mask": COUNTED_ROWS})

    kept = {name: values[COUNTED_ROWS > 0] for name, values in batch.items()}
    words = objectives.losses(model, None, kept)["words"]
    predicted = kept["weights"].sum()
    assert found["predicted"] == predicted
    assert found["rows"] == 5
    torch.testing.assert_close(found["loss"] / predicted, words, rtol=1e-5, atol=0)


def test_accuracies_are_of_the_rows_and_predictions_that_count():
    batch = batch_of("next sentence")
    model = fast(new("next sentence"))
    outputs = objectives.forward(model, batch)

    # The right answers are made of the model's own for the first prediction of each row, those that
    # do not count, and some of the rows.
    right = batch["weights"] == 0
    right[:, 0] = True
    logits = outputs["logits"]
    batch["labels"] = torch.where(right, logits.argmax(-1), logits.argmin(-1))
    next_sentence = outputs["related"].argmax(-1)
    next_sentence[[0, 2]] ^= 1  # row 2 does not count
    batch["next_sentence"] = next_sentence
    found = objectives.scores(model, batch | {"mask": COUNTED_ROWS})

    assert found["accuracy"] == 5
    assert found["next_sentence_accuracy"] == 4


# Losses of words


@dataclass
class Words:
    """Logits, labels, and a teacher's probabilities, in which a word is impossible."""

    logits: Tensor
    labels: Tensor
    wanted: Tensor


def drawn_words(dtype: torch.dtype, spread: float) -> Words:
    logits = (torch.randn(3, 5, 50) * spread).to(dtype).requires_grad_()
    labels = torch.randint(50, (3, 5), dtype=torch.int32)
    scores = torch.randn(3, 5, 50).mul(3).index_fill(2, torch.tensor(7), -torch.inf)
    return Words(logits=logits, labels=labels, wanted=scores.softmax(-1))


def assert_like_torchs(found: Tensor, expected: Tensor, logits: Tensor, atol: float) -> None:
    """Compares losses, and the gradients of the logits within `atol`."""
    assert found.dtype == torch.float32
    assert expected.min() > 0.1
    rounding = 2e-7 * logits.detach().abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=rounding)

    upstream = torch.linspace(0.5, 1.5, 15).view(3, 5)
    (ours,) = torch.autograd.grad((found * upstream).sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad((expected * upstream).sum(), logits)
    assert theirs.abs().max() > 0.1
    assert ours.dtype == logits.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)


# At a spread of 300 exp would overflow. In bfloat16 losses are as exact as in float32, gradients
# rounded to its 8 bits.
every_precision = pytest.mark.parametrize(
    ("dtype", "spread", "atol"), [(torch.float32, 300.0, 1e-6), (torch.bfloat16, 3.0, 0.008)]
)


@every_precision
def test_the_loss_of_a_label_is_torchs(dtype, spread, atol):
    words = drawn_words(dtype, spread)

    found = layers.negative_log_likelihood(words.logits, words.labels)

    exact = words.logits.double().log_softmax(-1)
    expected = F.nll_loss(exact.transpose(1, 2), words.labels.long(), reduction="none")
    assert_like_torchs(found, expected, words.logits, atol)


@every_precision
def test_the_loss_of_a_teacher_is_torchs(dtype, spread, atol):
    """A word is impossible for the teacher."""
    words = drawn_words(dtype, spread)

    found = layers.divergence(words.logits, words.wanted)

    exact = words.logits.double().log_softmax(-1)
    expected = F.kl_div(exact, words.wanted.double(), reduction="none").sum(2)
    assert_like_torchs(found, expected, words.logits, atol)


# Distillation


def teacher_of_six_layers() -> PreTrainedModel:
    return of_size(transformers.BertForMaskedLM, "bert", "distillation", num_hidden_layers=6)


def student_of_two_layers() -> PreTrainedModel:
    return of_size(transformers.DistilBertForMaskedLM, "distilbert", "distillation", n_layers=2)


def logits_of(model: PreTrainedModel) -> Tensor:
    batch = batch_of("distillation")
    input_ids = batch["input_ids"].long()
    return model(input_ids=input_ids, attention_mask=batch["attention_mask"]).logits


def test_a_student_begins_with_some_layers_of_its_teacher():
    teacher = teacher_of_six_layers()
    student = student_of_two_layers()
    before = copy.deepcopy(teacher.state_dict())

    distillation.begin_with_layers(student, teacher)

    assert equal(teacher.state_dict(), before)
    # The teacher as the student: of these layers alone, and without types of tokens.
    teacher.bert.encoder.layer = nn.ModuleList(teacher.bert.encoder.layer[i] for i in (0, 3))
    teacher.bert.embeddings.token_type_embeddings.weight.data.zero_()
    expected = logits_of(teacher)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(student), expected, **EXACT)


def test_what_a_student_learns_does_not_change_its_teacher():
    """It begins with copies of the weights."""
    teacher = teacher_of_six_layers()
    student = student_of_two_layers()
    expected = logits_of(teacher)
    distillation.begin_with_layers(student, teacher)

    with torch.no_grad():
        student.distilbert.transformer.layer[0].attention.q_lin.weight.zero_()

    torch.testing.assert_close(logits_of(teacher), expected, **EXACT)


def test_a_student_that_begins_with_layers_has_tied_weights():
    student = student_of_two_layers()

    distillation.begin_with_layers(student, teacher_of_six_layers())

    embedding = student.distilbert.embeddings.word_embeddings.weight
    assert student.vocab_projector.weight is embedding


def test_the_head_of_another_architecture_is_not_guessed():
    with pytest.raises(ValueError, match="head of a electra is not known"):
        objectives.forward(SimpleNamespace(config=transformers.ElectraConfig()), {})


# Permutations

VISIBLE = 0
TARGET = 1
SEPARATOR = 2
PERMUTED_LENGTH = 24


def local_perm(order: np.ndarray, target: np.ndarray, functional: np.ndarray) -> np.ndarray:
    """Computes XLNet's data_utils._local_perm in numpy, from where it has the permuted indices."""
    masked_or_func = target | functional
    rev_index = np.where(masked_or_func, order, -1)
    self_rev_index = np.where(target, rev_index, rev_index + 1)
    return ((self_rev_index[:, None] <= rev_index[None, :]) & masked_or_func).astype(np.float32)


@dataclass
class Permutations:
    """50 rows of tokens and their order of prediction."""

    kinds: np.ndarray  # of the tokens [50, T]: VISIBLE, TARGET or SEPARATOR
    ranks: np.ndarray  # permutations [50, T]
    order: Tensor  # as perm_mask takes it
    targets: Tensor  # bool


def drawn_permutations() -> Permutations:
    rng = np.random.default_rng(0)
    shape = (50, PERMUTED_LENGTH)
    kinds = rng.choice([VISIBLE, TARGET, SEPARATOR], shape, p=[0.7, 0.2, 0.1])
    ranks = np.stack([rng.permutation(PERMUTED_LENGTH) for _ in kinds])
    return Permutations(
        kinds=kinds,
        ranks=ranks,
        order=torch.from_numpy(np.where(kinds == VISIBLE, -1, ranks)),
        targets=torch.from_numpy(kinds == TARGET),
    )


def test_targets_are_the_positions_with_a_weight():
    """All positions are named, and fillers have no weight."""
    targets = drawn_permutations().targets
    positions = torch.arange(PERMUTED_LENGTH).expand(50, -1)

    found = permutation.is_target(positions, targets.float(), PERMUTED_LENGTH)

    assert found.equal(targets)


def test_a_permutations_mask_is_that_of_xlnets_authors():
    rows = drawn_permutations()

    found = permutation.perm_mask(rows.order, rows.targets)

    assert found.dtype == torch.float32
    for mask, ranks, kinds in zip(found, rows.ranks, rows.kinds, strict=True):
        assert np.array_equal(mask, local_perm(ranks, kinds == TARGET, kinds == SEPARATOR))


def test_in_a_permutation_nobody_sees_padding():
    rows = drawn_permutations()
    order = F.pad(rows.order, (4, 0), value=PERMUTED_LENGTH + 4)
    targets = F.pad(rows.targets, (4, 0))

    padded = permutation.perm_mask(order, targets)

    assert padded[:, :, :4].eq(1).all()
    assert padded[:, 4:, 4:].equal(permutation.perm_mask(rows.order, rows.targets))
    assert padded[:, :4, 4:].eq(0).all()  # rows of padding see something: no softmax over nothing
