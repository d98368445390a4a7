"""Which axis of the devices splits which parameter, for `--mesh data=4,model=2` of the scripts.

An encoder's record (models/encoders) and models/transformer.py have the tables.

Over "model", attention is split by heads and a feed-forward layer by its inner width, so that each
needs one all-reduce forward and one backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
The embedding of the vocabulary and the head that is tied to it are split by tokens of the
vocabulary, and each device computes its part of the loss. All else is whole on every device.
"""

from dataclasses import dataclass

# For each dimension of a parameter, the axis of the devices that splits it; None: it is whole.
Axes = tuple[str | None, ...]

OUT = ("model", None)  # a weight [out, in], by its outputs
IN = (None, "model")  # a weight [out, in], by its inputs
VECTOR = ("model",)  # a bias [out]
VOCABULARY = ("model", None)  # an embedding [vocabulary, H], by tokens


@dataclass(frozen=True)
class Rules:
    """How a model may be split; train/common/sharding applies them.

    Attributes:
        parameters: a pattern of the end of a parameter's name -> the axes of its dimensions.
        layer_lists: the names of the lists of layers.
        heads: attention heads, which the devices of "model" must divide.
        shared: a pattern, found anywhere in the name of a module whose input several projections
            share (query, key, value): their gradients are summed before the all-reduce; "": there
            are none.
        time_major: a pattern of the beginning of a module's name where its tensors are [T, B, …];
            "": there are none.
    """

    parameters: dict[str, Axes]
    layer_lists: tuple[str, ...]
    heads: int
    shared: str = ""
    time_major: str = ""
