"""Questions, logits and a small model that are the same everywhere, for tests of train/squad.py.

tests/squad_golden.json has what other programs say of them. It was made once, outside of the
project, on what this file makes:

    "search"    postprocess_qa_predictions of transformers' examples/pytorch/question-answering/
                utils_qa.py, on `questions` and `windows_of`, with and without
                version_2_with_negative
    "metrics"   SQuAD's evaluate-v1.1.py (of the questions that have an answer) and
                evaluate-v2.0.py (with the null odds as na_prob, and 0 as na_prob_thresh), as the
                library `evaluate` carries them, on the predictions of "search"
    "pipeline"  pipeline("question-answering") of transformers 4.57.3 on the folder of `write_model`
"""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForQuestionAnswering, BertTokenizer

from data.squad import Question
from data.squad_answers import WindowLogits

_WORDS = (
    "The the a an dog cat's river-bank 1,969 Paris, blue (old) house. green! tree U.S. of in "
    "on and with seven eight, nine lakes hill; Anna"
)
WORDS = _WORDS.split()
COUNT = 400  # questions
TOKENS = 40  # of a window
PREFIX = 6  # <cls> and the question
PIECE = 30  # tokens of the context in a window
STEP = 20  # from one window to the next


def questions() -> list[Question]:
    """Returns questions on contexts of words, a third of them without an answer; some answers are
    an article or have punctuation."""
    draw = random.Random(1).random  # of which Python promises the same numbers for ever
    rows = []
    for number in range(COUNT):
        words = [WORDS[int(draw() * len(WORDS))] for _ in range(5 + int(draw() * 60))]
        context = " ".join(words)
        answers = []
        starts = []
        for _ in range(0 if draw() < 1 / 3 else 1 + int(draw() * 3)):
            first = int(draw() * len(words))
            last = min(first + int(draw() * 4), len(words) - 1)
            answers.append(" ".join(words[first : last + 1]))
            starts.append(len(" ".join(words[:first])) + (first > 0))
        rows.append(Question(f"q{number}", "what?", context, tuple(answers), tuple(starts)))
    return rows


def windows_of(number: int, row: Question) -> list[WindowLogits]:
    """Returns windows of a question's context with logits that favour its first answer, or <cls>
    where it has none, more or less."""
    draw = random.Random(1000 + number).random
    places = []  # of the words in the context
    start = 0
    for word in row.context.split(" "):
        places.append((start, start + len(word)))
        start += len(word) + 1

    windows = []
    for first in range(0, max(len(places) - PIECE + STEP, 1), STEP):
        piece = places[first : first + PIECE]
        offsets = np.full((TOKENS, 2), -1)
        offsets[PREFIX : PREFIX + len(piece)] = piece
        start = np.array([4 * draw() - 2 for _ in range(TOKENS)], np.float32)
        end = np.array([4 * draw() - 2 for _ in range(TOKENS)], np.float32)
        boost = 4 * draw()
        none = (2 if row.answers else 6) * draw()
        start[0] += none
        end[0] += none
        if row.answers:
            last = row.starts[0] + len(row.answers[0])
            start[offsets[:, 0] == row.starts[0]] += boost
            end[offsets[:, 1] == last] += boost
        windows.append(WindowLogits(start, end, offsets, cls=0))
    return windows


# ---- a small model -------------------------------------------------------------------------------

_VOCABULARY = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] ? . who what where is the a old young red blue dog cat bird "
    "house tree river in on by near sees likes finds seven eight nine today there big small long"
)
VOCABULARY = _VOCABULARY.split()


@dataclass(frozen=True)
class Asked:
    """A question for the small model; the words of a context are all different."""

    question: str
    context: str


ASKED = [
    Asked("who is in the house?", "the old dog sees a red bird near house."),
    Asked("what is red?", "a big red tree is by the river on seven."),
    Asked("where is the dog?", "the dog is in a house near blue river today."),
    Asked("who likes the bird?", "young cat likes bird there."),
    Asked("what finds nine?", "small old dog finds nine long blue river by the tree."),
]


def write_model(folder: Path) -> None:
    """Writes a BERT of two layers, with numbers that are the same everywhere, and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = BertTokenizer(vocab=vocabulary, model_max_length=48)
    settings = BertConfig(
        vocab_size=len(VOCABULARY),
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=48,
    )
    model = BertForQuestionAnswering(settings)
    first = 1
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            numbers = torch.arange(first, first + parameter.numel(), dtype=torch.float64)
            size = 4.0 if name.startswith("qa_outputs") else 1.0
            parameter.copy_(size * torch.sin(numbers * numbers * 0.7).view(parameter.shape))
            first += parameter.numel()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
