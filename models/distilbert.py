"""The teacher of a DistilBERT (Sanh et al. 2019, arXiv:1910.01108): a BERT whose layers also start the student."""

from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from errors import InputError
from models import encoders, objectives

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


def begin_with_layers(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Copies the weights of a BERT for masked words to a DistilBERT, which takes every n-th of the layers.

    These are layers 0, 2, 4, … as Sanh et al. 2019, section 3, say; their script takes 0, 2, 4, 7, 9 and 11 of 12.
    The teacher may have more positions.
    """
    every = teacher.config.num_hidden_layers // student.config.n_layers
    names = OUTSIDE | {
        f"bert.encoder.layer.{i * every}.{theirs}": f"distilbert.transformer.layer.{i}.{ours}"
        for i in range(student.config.n_layers)
        for theirs, ours in LAYER.items()
    }
    teachers = teacher.state_dict()
    weights = {
        f"{ours}.{kind}": teachers[f"{theirs}.{kind}"]
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
        if f"{theirs}.{kind}" in teachers
    }
    places = "distilbert.embeddings.position_embeddings.weight"
    weights[places] = weights[places][: encoders.positions(student)]
    student.load_state_dict(weights, strict=True)


def open_teacher(
    folder: str, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: str, initialise: bool
) -> PreTrainedModel:
    """Returns a BERT for masked words for `student` to learn from, frozen and in evaluation mode.

    Args:
        folder: local folder or hub id of the teacher.
        tokenizer, data: the tokenizer that made the data, and the data's name for messages.
        initialise: whether the student starts with the teacher's layers, see `begin_with_layers`.

    Raises:
        InputError: the teacher cannot be read, has other tokens, or does not fit the student.
    """
    config, _, own = encoders.open_checkpoint(folder, "bert")
    objectives.same_vocabulary(folder, own, tokenizer, data)
    if config.hidden_size != student.config.dim:
        raise InputError(
            f"teacher {folder} has a width of {config.hidden_size}, its student one of {student.config.dim}"
        )
    teacher = encoders.load(AutoModelForMaskedLM, config, None, folder)
    sizes = {
        "positions": (encoders.positions(teacher), encoders.positions(student)),
        "layers": (config.num_hidden_layers, student.config.n_layers),
    }
    for what, (theirs, ours) in sizes.items():
        if theirs < ours:
            raise InputError(f"teacher {folder} has {theirs} {what}, fewer than its student, which has {ours}")
    if config.vocab_size != student.config.vocab_size:
        raise InputError(
            f"teacher {folder} has a vocabulary of {config.vocab_size}, its student one of {student.config.vocab_size}"
        )
    if initialise:
        begin_with_layers(student, teacher)
    return teacher.requires_grad_(False).eval()
