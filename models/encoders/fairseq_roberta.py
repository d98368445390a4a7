"""RoBERTa in fairseq's files: --checkpoint is a folder of fairseq's release, with model.pt."""

from dataclasses import replace

from models import fairseq_folders
from models.encoders import roberta

ENCODER = replace(
    roberta.ENCODER,
    fine_tuning=replace(
        roberta.ENCODER.fine_tuning,
        checkpoint="",
    ),
    read_folder=fairseq_folders.read_folder,
    write_folder=fairseq_folders.write_folder,
)
