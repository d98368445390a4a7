"""Softplus in place of DLRM's ReLU, in a file of its own: a process that needs it would import all
scripts with trials.py, which takes seconds."""

from collections.abc import Callable

import torch.nn.functional as F


def smooth_units(set_attribute: Callable = setattr) -> None:
    """Gives DLRM's networks softplus in place of ReLU: there rounding stays rounding.

    An input of a ReLU that is 0 but for rounding is on the one side or the other by the order of a
    sum, about once in 256 steps, and from there on two runs part.
    """
    from torchrec.modules.mlp import Perceptron

    set_attribute(Perceptron, "forward", lambda self, x: F.softplus(self._linear(x)))


# What a process begins with that has them, too.
SMOOTH_UNITS = """
import sys
sys.path.insert(0, "tests")
import smooth
smooth.smooth_units()
"""
