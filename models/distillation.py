"""The objective of DistilBERT: to predict masked tokens as a teacher does.

Sanh et al. 2019, arXiv:1910.01108, section 3. The teacher is a BERT, and some of its layers are the
student's initial weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from errors import InputError
from models import architectures, encoder_files, layers, masked_words, objectives
from models.encoders import bert  # noqa: F401 (the teacher's record, for a copy)

# Weights of the three losses, and the temperature of the first, from the authors'
# distillation/README.md.
SOFT = 5.0  # the teacher's predictions
HARD = 2.0  # the tokens that were masked
COSINE = 1.0  # the directions of the hidden states
TEMPERATURE = 2.0

LAYER = {  # module inside a layer of BERT -> of DistilBERT
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
OUTSIDE = {  # module outside of the layers of BERT -> of DistilBERT
    "bert.embeddings.word_embeddings": "distilbert.embeddings.word_embeddings",
    "bert.embeddings.position_embeddings": "distilbert.embeddings.position_embeddings",
    "bert.embeddings.LayerNorm": "distilbert.embeddings.LayerNorm",
    "cls.predictions.transform.dense": "vocab_transform",
    "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
    "cls.predictions.decoder": "vocab_projector",
}


def forward(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Computes what `objectives.forward` returns, "hidden" of all tokens included."""
    return masked_words.forward(model, batch, all_hidden=True)


def losses(
    result: dict[str, Tensor],
    words: Tensor,
    teacher: PreTrainedModel,
    batch: dict[str, Tensor],
    predicted: Tensor,
    tokens: Tensor,
) -> dict[str, Tensor]:
    """Returns what `objectives.losses` does, with a teacher.

    "soft" is the divergence from the teacher's predictions, a mean over the predicted tokens (in
    the authors' code over all tokens, which would need the head on all of them). "cosine" is
    1 - cosine of the hidden states, a mean over all tokens.

    Args:
        result: of the student's `forward`.
        words: its loss without a teacher.
        predicted: the number that a sum over the predicted tokens is divided by.
        tokens: the number that a sum over all tokens is divided by.
    """
    with torch.no_grad():
        taught = forward(teacher, batch)

    probabilities = F.softmax(taught["logits"].float() / TEMPERATURE, -1)
    divergence = layers.divergence(result["logits"] / TEMPERATURE, probabilities)
    # Times the temperature squared, so that the size of the gradients does not depend on it: Hinton
    # et al. 2015, section 2.
    soft = (divergence * batch["weights"]).sum() / predicted * TEMPERATURE**2

    is_token = batch["attention_mask"].float()  # 0 for padding
    hidden = result["hidden"].float()
    distances = 1 - F.cosine_similarity(hidden, taught["hidden"].float(), dim=-1)
    cosine = (distances * is_token).sum() / tokens

    loss = SOFT * soft + HARD * words + COSINE * cosine
    return {"loss": loss, "words": words, "soft": soft, "cosine": cosine}


def begin_with_layers(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Copies the weights of a BERT for masked words to a DistilBERT.

    Of the layers, every n-th is copied: 0, 2, 4, … as Sanh et al. 2019, section 3, say; their
    script takes 0, 2, 4, 7, 9 and 11 of 12. The teacher may have more positions, of which the first
    are copied.
    """
    layer_step = teacher.config.num_hidden_layers // student.config.n_layers
    modules = dict(OUTSIDE)  # of the teacher -> of the student
    for layer in range(student.config.n_layers):
        for of_teacher, of_student in LAYER.items():
            name = f"bert.encoder.layer.{layer * layer_step}.{of_teacher}"
            modules[name] = f"distilbert.transformer.layer.{layer}.{of_student}"

    taught = teacher.state_dict()
    weights = {}
    for of_teacher, of_student in modules.items():
        for kind in ("weight", "bias"):
            if f"{of_teacher}.{kind}" in taught:
                weights[f"{of_student}.{kind}"] = taught[f"{of_teacher}.{kind}"]
    positions = "distilbert.embeddings.position_embeddings.weight"
    weights[positions] = weights[positions][: architectures.positions(student)]
    student.load_state_dict(weights, strict=True)


def open_teacher(
    folder: str,
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: str,
    init_student: bool,
) -> PreTrainedModel:
    """Returns a BERT for masked words for `student` to learn from, frozen and in evaluation mode.

    Args:
        folder: local folder or hub id of the teacher.
        tokenizer: the one that the data was made with.
        data: the data's name, for messages.
        init_student: whether the student starts with the teacher's layers, see `begin_with_layers`.

    Raises:
        InputError: the teacher cannot be read, has other tokens, or does not fit the student.
    """
    checkpoint = encoder_files.open_checkpoint(folder, "bert")
    objectives.same_vocabulary(folder, checkpoint.tokenizer, tokenizer, data)
    config = checkpoint.config
    if config.hidden_size != student.config.dim:
        raise InputError(
            f"teacher {folder} has a width of {config.hidden_size}, "
            f"its student one of {student.config.dim}"
        )

    teacher = encoder_files.load(AutoModelForMaskedLM, config, checkpoint.source).model
    # Of the teacher and of the student.
    sizes = {
        "positions": (architectures.positions(teacher), architectures.positions(student)),
        "layers": (config.num_hidden_layers, student.config.n_layers),
    }
    for what, (of_teacher, of_student) in sizes.items():
        if of_teacher < of_student:
            raise InputError(
                f"teacher {folder} has {of_teacher} {what}, "
                f"fewer than its student, which has {of_student}"
            )
    if config.vocab_size != student.config.vocab_size:
        raise InputError(
            f"teacher {folder} has a vocabulary of {config.vocab_size}, "
            f"its student one of {student.config.vocab_size}"
        )

    if init_student:
        begin_with_layers(student, teacher)
    return teacher.requires_grad_(False).eval()
