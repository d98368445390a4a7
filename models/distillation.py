"""The objective of DistilBERT: a teacher's words (Sanh et al. 2019, arXiv:1910.01108, section 3).

The teacher is a BERT, whose layers also start the student.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from errors import InputError
from models import architectures, encoder_files, layers, objectives
from models.encoders import bert  # noqa: F401 (the teacher's record, for a copy)
from models.masked_words import forward

__all__ = ["begin_with_layers", "forward", "losses", "open_teacher"]

# Weights of the three losses, and the temperature of the first: its authors'
# distillation/README.md.
SOFT = 5.0
HARD = 2.0
COSINE = 1.0
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
OUTSIDE = {  # the same outside of the layers
    "bert.embeddings.word_embeddings": "distilbert.embeddings.word_embeddings",
    "bert.embeddings.position_embeddings": "distilbert.embeddings.position_embeddings",
    "bert.embeddings.LayerNorm": "distilbert.embeddings.LayerNorm",
    "cls.predictions.transform.dense": "vocab_transform",
    "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
    "cls.predictions.decoder": "vocab_projector",
}


def losses(
    result: dict[str, Tensor],
    words: Tensor,
    teacher: PreTrainedModel,
    batch: dict[str, Tensor],
    predicted: Tensor,
    parts: int,
) -> dict[str, Tensor]:
    """Returns what `objectives.losses` does, with a teacher.

    "soft" is a mean over the predicted tokens (in the authors' code over all tokens, which would
    need the head on all of them), and "cosine" is 1 - cosine of the hidden states over all tokens.

    Args:
        result: of the student's `forward`.
        words: its loss without a teacher.
        predicted: by what a sum over the predicted tokens is divided.
        parts: see `objectives.losses`.
    """
    with torch.no_grad():
        taught = objectives.forward(teacher, batch)

    wanted = F.softmax(taught["logits"].float() / TEMPERATURE, -1)
    divergence = layers.divergence(result["logits"] / TEMPERATURE, wanted)
    # Times T squared, so that the size of the gradients does not depend on T: Hinton et al. 2015,
    # section 2.
    soft = (divergence * batch["weights"]).sum() / predicted * TEMPERATURE**2

    real = batch["attention_mask"].float()
    apart = 1 - F.cosine_similarity(result["hidden"].float(), taught["hidden"].float(), dim=-1)
    tokens = real.sum()
    if parts > 1:
        tokens = batch["tokens"].sum() / parts
    cosine = (apart * real).sum() / tokens

    loss = SOFT * soft + HARD * words + COSINE * cosine
    return {"loss": loss, "words": words, "soft": soft, "cosine": cosine}


def begin_with_layers(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Copies the weights of a BERT for masked words to a DistilBERT: every n-th of the layers.

    These are layers 0, 2, 4, … as Sanh et al. 2019, section 3, say; their script takes 0, 2, 4, 7,
    9 and 11 of 12. The teacher may have more positions.
    """
    every = teacher.config.num_hidden_layers // student.config.n_layers
    modules = dict(OUTSIDE)  # of the teacher -> of the student
    for layer in range(student.config.n_layers):
        for theirs, ours in LAYER.items():
            name = f"bert.encoder.layer.{layer * every}.{theirs}"
            modules[name] = f"distilbert.transformer.layer.{layer}.{ours}"

    teachers = teacher.state_dict()
    weights = {}
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in teachers:
                weights[f"{ours}.{kind}"] = teachers[f"{theirs}.{kind}"]
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
        tokenizer, data: the tokenizer that made the data, and the data's name for messages.
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
    sizes = {
        "positions": (architectures.positions(teacher), architectures.positions(student)),
        "layers": (config.num_hidden_layers, student.config.n_layers),
    }
    for what, (theirs, ours) in sizes.items():
        if theirs < ours:
            raise InputError(
                f"teacher {folder} has {theirs} {what}, fewer than its student, which has {ours}"
            )
    if config.vocab_size != student.config.vocab_size:
        raise InputError(
            f"teacher {folder} has a vocabulary of {config.vocab_size}, "
            f"its student one of {student.config.vocab_size}"
        )
    if init_student:
        begin_with_layers(student, teacher)
    return teacher.requires_grad_(False).eval()
