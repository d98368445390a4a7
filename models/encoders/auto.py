"""Any encoder of transformers, by --checkpoint, with BERT's recipe of fine-tuning.

A trial, which has no checkpoint, is a BERT.
"""

from dataclasses import replace

# A copy for auto takes these files along. XLNet is not among them: it needs a module of its own,
# which only a copy for xlnet has.
from models.encoders import bert, distilbert, roberta  # noqa: F401

ENCODER = replace(
    bert.ENCODER,
    architecture="",
    fine_tuning=replace(bert.ENCODER.fine_tuning, checkpoint=""),
    tagging=replace(bert.ENCODER.tagging, checkpoint=""),
)
