"""models/objectives.py, the modules of the objectives, and what they need of layers.py, against transformers'
models, which run their heads on every token, torch's losses and XLNet's code; on the CPU and as one program of XLA."""

import copy
import functools
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

# Model, kind of the rows, and places for predictions: more than most rows need, so that there are fillers.
OBJECTIVES = {
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
    batch = loading.as_tensors([rows_of(objective).example(row, np.random.default_rng(row)) for row in range(ROWS)])
    assert 0 < batch["weights"].mean() < 1 and 0 < batch["attention_mask"].float().mean() < 1
    return batch


def of_size(model_class: type, kind: str, objective: str, **settings) -> PreTrainedModel:
    """transformers' own model, for the rows of an objective."""
    config = encoders.new_configuration(kind, "tiny", rows_of(objective).text.tokenizer, LONGER)
    config.update(settings)
    return randomized(model_class(config))


def new(objective: str) -> PreTrainedModel:
    model_class, kind, _ = OBJECTIVES[objective]
    return of_size(model_class, "distilbert" if objective == "distillation" else kind, objective)


def teacher_of(objective: str) -> PreTrainedModel | None:
    return of_size(transformers.BertForMaskedLM, "bert", objective) if objective == "distillation" else None


def plain_losses(objective: str, model, teacher, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same from transformers' models as they are, with all their heads on all tokens."""
    inputs = {"input_ids": batch["input_ids"].long(), "attention_mask": batch["attention_mask"]}
    if objective in ("next sentence", "permutation"):
        inputs["token_type_ids"] = batch["token_type_ids"].long()
    predicted, labels = (
        torch.where(batch["weights"] > 0, batch["labels"].long(), -100),
        torch.full((ROWS, LENGTH), -100),
    )
    rows, places = torch.nonzero(batch["weights"], as_tuple=True)
    labels[rows, batch["positions"][rows, places].long()] = predicted[rows, places]
    if objective == "permutation":
        inputs["perm_mask"] = permutation.perm_mask(batch["order"], labels >= 0)
        inputs["target_mapping"] = F.one_hot(batch["positions"].long(), LENGTH).float()
        loss = model(**inputs, labels=predicted, use_mems=False).loss
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


def with_gradients(model: nn.Module, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts, and the gradient of the loss for each parameter that has one, by its name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = zip(names, torch.autograd.grad(parts["loss"], parameters, allow_unused=True), strict=True)
    parts = {name: part.detach() for name, part in parts.items()}
    return parts | {name: gradient for name, gradient in gradients if gradient is not None}


def step(model, teacher, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return with_gradients(model, objectives.losses(model, teacher, batch))


@every_objective
def test_losses_and_gradients_are_transformers_also_on_xla(objective, mesh):
    batch, model, teacher = batch_of(objective), new(objective), teacher_of(objective)
    expected = with_gradients(model, plain_losses(objective, model, teacher, batch))
    assert all(values.any() for values in expected.values())
    results = [step(fast(model), fast(teacher), batch)]
    if objective != "roberta":  # whose layers are BERT's
        on_device = [each and device.to_device(fast(each), mesh) for each in (model, teacher)]  # there may be none
        uploaded = {name: values.to(mesh.device) for name, values in batch.items()}
        # Strict: it raises where a value is read on the way, or an operation is the host's.
        results.append(device.compiled(step, mesh)(*on_device, uploaded))
    for found in results:
        assert_all_close(found, expected, rtol=1e-4, share=1e-5, atol=1e-6)


def test_a_teacher_gets_no_gradient():
    teacher = fast(teacher_of("distillation"))
    objectives.losses(fast(new("distillation")), teacher, batch_of("distillation"))["loss"].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def with_more_padding(objective: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch in rows of LONGER places with two more predictions each that do not count, and other labels and tokens
    wherever none counts."""
    more, left = LONGER - LENGTH, objective == "permutation"
    batch = {name: values.clone() for name, values in batch.items()}
    for name, value in (("positions", LENGTH - 1 if left else 3), ("labels", 0), ("weights", 0)):
        batch[name] = F.pad(batch[name], (2, 0), value=value)
    batch["labels"] = torch.where(batch["weights"] > 0, batch["labels"], 7)
    if left:
        batch["order"][batch["order"] == LENGTH] = LONGER
        batch["positions"] += more
    for name in ("input_ids", "attention_mask", "token_type_ids", "order"):
        if name in batch:
            filler = {"order": LONGER, "token_type_ids": 3 if left else 0}.get(name, 0)
            batch[name] = F.pad(batch[name], (more, 0) if left else (0, more), value=filler)
    tokens = torch.randint(20, 60, batch["input_ids"].shape, dtype=torch.int32)
    batch["input_ids"] = torch.where(batch["attention_mask"] > 0, batch["input_ids"], tokens)
    return batch


@every_objective
def test_neither_fillers_nor_padding_change_anything(objective):
    batch, model, teacher = batch_of(objective), fast(new(objective)), fast(teacher_of(objective))
    found = step(model, teacher, with_more_padding(objective, batch))
    assert_all_close(found, step(model, teacher, batch), rtol=1e-5, share=1e-6, atol=1e-6)


@every_objective
def test_the_mean_of_the_parts_of_a_batch_is_its_loss_whatever_numbers_of_tokens_they_have(objective):
    batch, model, teacher = batch_of(objective), fast(new(objective)), fast(teacher_of(objective))
    parts = [{name: values[row : row + 2] for name, values in batch.items()} for row in range(0, ROWS, 2)]
    parts[1]["weights"] = torch.zeros_like(parts[1]["weights"])
    batch["weights"] = torch.cat([part["weights"] for part in parts])
    counts = [objectives.counts(part) for part in parts]
    assert all(len({count[name].sum().item() for count in counts}) > 2 for name in ("predicted", "tokens"))

    found = []
    for part in parts:
        for name in counts[0]:
            part[name] = sum(count[name] for count in counts)
        found.append(with_gradients(model, objectives.losses(model, teacher, part, len(parts))))
    means = {name: sum(each[name] for each in found) / len(parts) for name in found[0]}
    assert_all_close(means, step(model, teacher, batch), rtol=1e-4, share=1e-5, atol=1e-6)


def test_a_batch_without_predictions_has_a_loss_of_nought():
    batch = batch_of("roberta")
    found = step(fast(new("roberta")), None, batch | {"weights": torch.zeros_like(batch["weights"])})
    assert found["loss"] == 0 and not any(value.any() for value in found.values())


def test_scores_are_sums_over_the_rows_that_count():
    batch, model = batch_of("next sentence"), fast(new("next sentence"))
    mask = torch.tensor([1.0, 1, 0, 1, 1, 0, 0, 1])
    kept = {name: values[mask > 0] for name, values in batch.items()}
    found, words = objectives.scores(model, batch | {"mask": mask}), objectives.losses(model, None, kept)["words"]
    predicted = kept["weights"].sum()
    assert found["predicted"] == predicted and found["rows"] == 5
    torch.testing.assert_close(found["loss"] / predicted, words, rtol=1e-5, atol=0)
    # The right answers are made of the model's own for the first prediction of each row, those that do not count, and
    # some of the rows.
    parts = objectives.forward(model, batch)
    right = batch["weights"] == 0
    right[:, 0] = True
    labels = torch.where(right, parts["logits"].argmax(-1), parts["logits"].argmin(-1))
    related = parts["related"].argmax(-1)
    related[[0, 2]] ^= 1  # row 2 does not count
    found = objectives.scores(model, batch | {"labels": labels, "next_sentence": related, "mask": mask})
    assert found["accuracy"] == 5 and found["next_sentence_accuracy"] == 4


# At a spread of 300 exp would overflow. In bfloat16 losses are as exact as in float32, gradients rounded to its 8 bits.
@pytest.mark.parametrize(("dtype", "spread", "atol"), [(torch.float32, 300.0, 1e-6), (torch.bfloat16, 3.0, 0.008)])
def test_losses_of_a_label_and_of_a_teacher_are_torchs_also_where_a_word_is_impossible(dtype, spread, atol):
    logits = (torch.randn(3, 5, 50) * spread).to(dtype).requires_grad_()
    labels = torch.randint(50, (3, 5), dtype=torch.int32)
    wanted = torch.randn(3, 5, 50).mul(3).index_fill(2, torch.tensor(7), -torch.inf).softmax(-1)
    exact = logits.double().log_softmax(-1)
    by_label = F.nll_loss(exact.transpose(1, 2), labels.long(), reduction="none")
    by_teacher = F.kl_div(exact, wanted.double(), reduction="none").sum(2)
    rounding, upstream = 2e-7 * logits.detach().abs().max().item(), torch.linspace(0.5, 1.5, 15).view(3, 5)
    for kind, found, expected in (
        ("label", layers.negative_log_likelihood(logits, labels), by_label),
        ("teacher", layers.divergence(logits, wanted), by_teacher),
    ):
        assert found.dtype == torch.float32 and expected.min() > 0.1, kind
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=rounding)
        ours, theirs = (
            torch.autograd.grad((each * upstream).sum(), logits, retain_graph=True)[0] for each in (found, expected)
        )
        assert theirs.abs().max() > 0.1 and ours.dtype == dtype, kind
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)


def test_a_student_begins_as_its_teacher_without_the_layers_between():
    batch = batch_of("distillation")
    teacher = of_size(transformers.BertForMaskedLM, "bert", "distillation", num_hidden_layers=6)
    student = of_size(transformers.DistilBertForMaskedLM, "distilbert", "distillation", n_layers=2)

    def encode(model: PreTrainedModel) -> Tensor:
        return model(input_ids=batch["input_ids"].long(), attention_mask=batch["attention_mask"]).logits

    before = copy.deepcopy(teacher.state_dict())
    distillation.begin_with_layers(student, teacher)
    assert equal(teacher.state_dict(), before)
    # The teacher as the student: of these layers alone, and without types of tokens.
    teacher.bert.encoder.layer = nn.ModuleList(teacher.bert.encoder.layer[i] for i in (0, 3))
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
    with pytest.raises(ValueError, match="head of a electra is not known"):
        objectives.forward(SimpleNamespace(config=transformers.ElectraConfig()), {})


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
    # All positions are named, and fillers have no weight.
    assert permutation.is_target(torch.arange(length).expand(50, -1), targets.float(), length).equal(targets)
    found = permutation.perm_mask(order, targets)
    assert found.dtype == torch.float32
    for mask, places, kind in zip(found, placed, kinds, strict=True):
        assert np.array_equal(mask, local_perm(places, kind == 1, kind == 2))
    order, targets = F.pad(order, (4, 0), value=length + 4), F.pad(targets, (4, 0))
    padded = permutation.perm_mask(order, targets)
    assert padded[:, :, :4].eq(1).all() and padded[:, 4:, 4:].equal(found)
    assert padded[:, :4, 4:].eq(0).all()  # rows of padding see something: no softmax over nothing
