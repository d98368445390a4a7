"""Which axis of the devices cuts which parameter, for `--mesh data=4,model=2` of the scripts. An
encoder's record (models/encoders) and models/transformer.py have the tables.

Over "model" attention is cut by heads and a feed-forward layer by its inner width, so that each
takes one all-reduce forward and one backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
The embedding of the vocabulary and the head that it is tied to are cut by words, and the loss is
computed on the parts. All else is whole on every device.
"""

from dataclasses import dataclass

OUT, IN, VECTOR = (
    ("model", None),
    (None, "model"),
    ("model",),
)  # of a weight [out, in], and of a bias


@dataclass(frozen=True)
class Rules:
    """How a model may be cut; see train/common/sharding."""

    parameters: dict[
        str, tuple
    ]  # how a parameter's name ends, as a pattern -> the axis that cuts each dimension
    layers: tuple[str, ...]  # the lists of layers
    heads: int  # what "model" must divide
    shared: str = ""  # pattern of the modules in which several products take the input
    time_major: str = ""  # pattern of the modules whose tensors are [T, B, …]
