"""Any encoder of transformers, by --checkpoint, with BERT's recipe of fine-tuning.

A trial is a BERT.
"""

from dataclasses import replace

# A copy for auto takes these along. XLNet needs a module of its own, and has a copy of its own.
from models.encoders import bert, distilbert, roberta  # noqa: F401

ENCODER = replace(
    bert.ENCODER,
    architecture="",
    fine_tuning=replace(bert.ENCODER.fine_tuning, checkpoint=""),
)
