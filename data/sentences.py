"""Labelled sentences, what they are labelled with, and their tokens; GLUE's and a user's own alike.

    opened = glue.open_task("glue_data", "mrpc")          # or own_text.open_rows("reviews.csv", …)
    encoded = Encoded(opened.train, tokenizer, max_length=128)      # tokens, for the loader
    opened.task.score(logits, encoded.labels)                       # {"accuracy": …, "f1": …}

GLUE is read by glue.py, a user's own data by own_text.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from errors import InputError

XLNET_TYPE_PAD = 3  # token type of padding; 0 and 1 are the sentences, 2 is <cls>

# Examples tokenized at once. Python's lists of ints take about ten times the memory of the arrays.
CHUNK = 1000


@dataclass(frozen=True)
class Task:
    """What sentences are labelled with.

    Attributes:
        name: in the run's name and its first line.
        objective: one of targets.OBJECTIVES.
        labels: names of the classes or labels, in the order of the model's outputs; in a
            regression of the number, or () where it has no name.
        score: computes metrics from logits [n, outputs] and labels, see `Encoded`; raises
            ValueError for what cannot be scored.
        metrics: their names, in the order of `score`.
        columns: where the data have text and labels, as own_text.Columns: export/columns.json.
        found: what the first line of a run says of labels that are found in the data.
    """

    name: str
    objective: str
    labels: tuple[str, ...]
    score: Callable[[np.ndarray, np.ndarray], dict[str, float]]
    metrics: tuple[str, ...]
    columns: dict[str, Any]
    found: str = ""

    def check(self, labels: np.ndarray) -> None:
        """Raises ValueError for the labels of a split that cannot be evaluated: scores them against
        the logits of a model that is always right."""
        if self.objective == "classes":
            logits = np.eye(len(self.labels))[labels]
        elif self.objective == "multilabel":
            logits = labels - 0.5
        else:
            logits = labels[:, None]
        self.score(logits, labels)


@dataclass(frozen=True)
class Examples:
    """Labelled sentences, or pairs of them.

    Attributes:
        first: n sentences.
        second: n sentences, or None where an example is a single sentence.
        labels: int64 [n], classes; float32 [n, labels] of 0 and 1 in multilabel; or float32 [n],
            the numbers of a regression.
        skipped: broken rows that were left out; only QQP of GLUE may have any.
        source, left_out: the files that were read, and files of the same kind that were not; see
            data/splits.py.
    """

    first: list[str]
    second: list[str] | None
    labels: np.ndarray
    skipped: int = 0
    source: str = ""
    left_out: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class Splits:
    """A task with its examples.

    Attributes:
        train: None where a finished run is evaluated.
        eval: the examples of each split that is evaluated, by its name.
    """

    task: Task
    train: Examples | None
    eval: dict[str, Examples]


def check_unicode(text: str, column: str, where: str) -> None:
    """Raises InputError for half of a pair that JSON has escaped, such as \\ud83d: no tokenizer and
    no file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise InputError(
            f"{where} has a {column} with {half}, which is half of a character; "
            "correct or remove the row"
        ) from error


def call_datasets(what_failed: str, function: str, *arguments, **options) -> Any:
    """Calls a function of `datasets`; its errors become InputError, `what_failed` and one line."""
    import datasets  # takes two seconds, and text files do not need it

    try:
        return getattr(datasets, function)(*arguments, **options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(f"{what_failed}: {first_line}") from error


class Encoded:
    """Tokenized examples, as a data set for `parallel_loader` with a plan of `lengths`.

    A pair that is too long is cut token by token at its longer side (transformers'
    "longest_first", and run_glue's). All tokens lie in one flat array: 4 bytes per token, 5 with
    token types. The tokenizer is not kept.

    Args:
        examples: of one split.
        tokenizer: one of transformers' fast tokenizers.
        max_length: most tokens of an example, special tokens included.
    Attributes:
        lengths: int32 [n], tokens of each example after cutting, special tokens included.
        truncated: how many examples were cut.
        tokens: the sum of `lengths`.
        labels: int32 [n], classes; float32 [n, labels] in multilabel; float32 [n] in a regression.
        source, left_out: those of the examples.
    Raises:
        InputError: the tokenizer is not a fast one, or has no padding token; max_length is too
            small for its special tokens and one token per sentence, or more than its model takes.
    """

    def __init__(self, examples: Examples, tokenizer, max_length: int):
        check_tokenizer(tokenizer, max_length, pairs=examples.second is not None)
        self.source = examples.source
        self.left_out = examples.left_out
        are_floats = examples.labels.dtype.kind == "f"
        self.labels = examples.labels.astype(np.float32 if are_floats else np.int32)

        self._pad = tokenizer.pad_token_id
        self._pads_left = tokenizer.padding_side == "left"
        # transformers 5 (5.23.0) forgets XLNet's token types: its tokenizer names none, and pads
        # them with 0.
        is_xlnet = type(tokenizer).__name__.startswith("XLNet")
        has_types = is_xlnet or "token_type_ids" in tokenizer.model_input_names
        self._type_pad = XLNET_TYPE_PAD if is_xlnet else tokenizer.pad_token_type_id
        self._tokenize(examples, tokenizer, max_length, has_types)

    def _tokenize(self, examples: Examples, tokenizer, max_length: int, has_types: bool) -> None:
        """Sets the flat arrays of tokens and token types, and what is counted of them."""
        ids = [np.empty(0, np.int32)]
        types = [np.empty(0, np.uint8)]
        lengths = [np.empty(0, np.int32)]
        self.truncated = 0
        for start in range(0, len(examples), CHUNK):
            chunk = slice(start, start + CHUNK)
            encodings = tokenizer(
                examples.first[chunk],
                None if examples.second is None else examples.second[chunk],
                truncation="longest_first",
                max_length=max_length,
                return_attention_mask=False,
                return_token_type_ids=False,
            ).encodings
            rows = [encoding.ids for encoding in encodings]
            sizes = np.fromiter(map(len, rows), np.int32, len(rows))
            lengths.append(sizes)
            ids.append(np.fromiter(chain.from_iterable(rows), np.int32, sizes.sum()))
            if has_types:
                type_rows = (encoding.type_ids for encoding in encodings)
                types.append(np.fromiter(chain.from_iterable(type_rows), np.uint8, sizes.sum()))
            self.truncated += sum(bool(encoding.overflowing) for encoding in encodings)

        self.lengths = np.concatenate(lengths)
        self._starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self._ids = np.concatenate(ids)
        self._types = np.concatenate(types) if has_types else None
        self.tokens = len(self._ids)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray, shape: tuple[int]) -> dict[str, np.ndarray]:
        """Returns these examples as arrays of a fixed length (L,).

        Args:
            indices: int [B]; -1 is no example: a row of padding with label 0, one of whose
                positions is attended to. (A mean over no tokens is not finite, and times 0 it
                still is not.)
        Returns:
            "input_ids" int32 [B, L], padded on the tokenizer's padding side
            "attention_mask" int32 [B, L], 1 for tokens
            "token_type_ids" int32 [B, L], the tokenizer's own where it has any (XLNet: <cls> 2,
                padding 3), else 0
            "labels" as `labels`, [B] or [B, labels]
        Raises:
            IndexError: an example that is not there.
            ValueError: an example that is longer than L.
        """
        indices = np.asarray(indices, np.int64)
        if indices.size and not -1 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"examples {indices.min()} to {indices.max()} of {len(self)}")
        (width,) = shape
        rows = np.flatnonzero(indices >= 0)
        chosen = indices[rows]
        sizes = self.lengths[chosen].astype(np.int64)
        if sizes.max(initial=0) > width:
            row = int(sizes.argmax())
            raise ValueError(
                f"example {chosen[row]} has {sizes[row]} tokens, and the shape has {width} places"
            )

        # For all tokens of the batch, one example after the other: the token's number in its
        # example, where it is in the flat arrays, and where it goes in the flattened batch.
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        flat_indices = np.repeat(self._starts[chosen], sizes) + within
        first_column = width - sizes if self._pads_left else 0
        destinations = np.repeat(rows * width + first_column, sizes) + within

        def scatter(values: np.ndarray | int, fill: int) -> np.ndarray:
            array = np.full((len(indices), width), fill, np.int32)
            array.reshape(-1)[destinations] = values
            return array

        attention = scatter(1, fill=0)
        attention[indices < 0, -1 if self._pads_left else 0] = 1
        if self._types is None:
            types = np.zeros((len(indices), width), np.int32)
        else:
            types = scatter(self._types[flat_indices], fill=self._type_pad)
        labels = np.zeros((len(indices), *self.labels.shape[1:]), self.labels.dtype)
        labels[rows] = self.labels[chosen]
        return {
            "input_ids": scatter(self._ids[flat_indices], fill=self._pad),
            "attention_mask": attention,
            "token_type_ids": types,
            "labels": labels,
        }


def check_tokenizer(tokenizer, max_length: int, pairs: bool) -> None:
    """Raises InputError where a tokenizer cannot make examples of `max_length` tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"{type(tokenizer).__name__} is not a fast tokenizer; "
            "expected one with a tokenizer.json"
        )
    if tokenizer.pad_token_id is None:
        raise InputError(
            "the tokenizer has no padding token; expected one of an encoder, or set its pad_token"
        )

    sentences = 2 if pairs else 1
    least = tokenizer.num_special_tokens_to_add(pair=pairs) + sentences
    most = tokenizer.model_max_length
    if not least <= max_length <= most:
        raise InputError(
            f"max_length is {max_length}; "
            f"expected {least} (special tokens, and a token a sentence) to {most}, "
            "which is what the tokenizer's model takes"
        )
