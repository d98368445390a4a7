"""Rows of text with tokens to predict: masked (BERT, RoBERTa, DistilBERT) or permuted (XLNet).

Rows come from data/text.py. Every epoch masks them anew, since the loader's random generator
depends on the epoch (dynamic masking: Liu et al. 2019, "RoBERTa", section 4.1,
https://arxiv.org/abs/1907.11692). Every array has a fixed shape: T = text.length positions per row,
P = `predictions` slots for predicted tokens, so that the language-model head runs on P positions
and not on T. Each class explains its token types, positions and weights.
"""

import math
import string
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data import text
from data.vocabulary import continues_word
from errors import InputError

# Devlin et al. 2019, section 3.1; RoBERTa has the same.
MASKED = 0.15  # share of a row's tokens that is predicted
MASK = 0.8  # share of the predicted tokens that becomes the mask token
KEEP = 0.1  # share that stays; the rest becomes a random token
UNRELATED = 0.5  # share of the pairs whose second segment is from elsewhere: "task #2" there

# Yang et al. 2019, section 3.1, and for PARTIAL also 2.3.
PARTIAL = 6  # one of K = 6 tokens is predicted
LONGEST_SPAN = 5  # tokens

# Our own search for a second segment from elsewhere.
TOLERANCE = 0.1  # it may be longer or shorter by this share than the one that it replaces
TRIES = 10  # rows that are searched for one within the tolerance; then the best of them is taken


class TextRows(Protocol):
    """The rows that data/text.py offers.

    Attributes:
        tokenizer: one of transformers'.
        length: tokens of a row, its special tokens included.
        pairs: whether a row leaves room for three special tokens, not two.
    """

    tokenizer: object
    length: int
    pairs: bool

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a row's tokens, without special ones, and where its sentences start.

        They are unsigned integers [n], and integers [k], the first of which is 0.
        """


@dataclass(frozen=True)
class _Row:
    """A row with its special tokens, before anything is masked."""

    ids: np.ndarray  # int32 [T]
    types: np.ndarray  # int32 [T], token types
    end: int  # where padding begins
    unrelated: bool = False  # the second segment is from elsewhere


class MaskedText:
    """Rows with masked tokens to predict.

    After Devlin et al. 2019, "BERT", https://arxiv.org/abs/1810.04805. 15 % of the tokens are
    predicted, special and unknown ones never: 80 % of them become the mask token, 10 % a random
    token that is not special, 10 % stay. 15 % is the mean: a row has the whole number above or
    below, at least 1 and at most `predictions`, which should therefore be a little more than 15 %
    of T. An example is

        input_ids, attention_mask, token_type_ids
                        int32 [T]: <cls> A <sep> of type 0, B <sep> of type 1, then padding
        positions       int32 [P], increasing, then 0 for fillers
        labels          int32 [P], the token that was there; 0 for fillers
        weights         float32 [P], 1 for a prediction and 0 for a filler
        next_sentence   int32 [], 0 if B follows A and 1 if it is from elsewhere; only if asked for

    Args:
        text: see `TextRows`; for `next_sentence` its rows must be `pairs`.
        predictions: P, at most T.
        whole_words: all pieces of a word are predicted, or none (the BERT authors' "whole word
            masking" of 2019). A word that is longer than what is left of the 15 % is skipped, so a
            row of such words has no prediction.
        next_sentence: a row is cut in two where a sentence starts; half of the second segments are
            replaced, see `segments`. Without it, a row is one segment.
    Raises:
        InputError: a tokenizer without mask token, or that pads on the left; numbers or rows that
            do not fit.
    """

    def __init__(self, text: TextRows, predictions: int, whole_words: bool, next_sentence: bool):
        _check(text, predictions, side="right")
        if next_sentence:
            _check_pairs(text, "next-sentence prediction")
        self.text = text
        self.predictions = predictions
        self.next_sentence = next_sentence
        self.length = text.length
        tokenizer = text.tokenizer
        self._pad = tokenizer.pad_token_id
        self._cls = tokenizer.cls_token_id
        self._sep = tokenizer.sep_token_id
        self._mask = tokenizer.mask_token_id
        self._ordinary = _ordinary(tokenizer)
        self._replacements = np.flatnonzero(self._ordinary).astype(np.int32)
        self._continues = continues_word(tokenizer) if whole_words else None

    def __len__(self) -> int:
        return len(self.text)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns a row, masked; see the class."""
        if self.next_sentence:
            row = self._pair(index, rng)
        else:
            row = self._single(index)
        ids = row.ids
        attention = np.zeros(self.length, np.int32)
        attention[: row.end] = 1
        _check_known(ids, self._ordinary, index)

        chosen = self._choose(ids[: row.end], rng)
        predictions = _predictions(self.predictions, chosen, ids, filler=0)
        ids[chosen] = self._masked(ids[chosen], rng)
        example = {
            "input_ids": ids,
            "attention_mask": attention,
            "token_type_ids": row.types,
            **predictions,
        }
        if self.next_sentence:
            example["next_sentence"] = np.array(row.unrelated, np.int32)
        return example

    def _single(self, index: int) -> _Row:
        """Returns a row as one segment."""
        tokens, _ = self.text.row(index)
        end = len(tokens) + 2
        ids = np.full(self.length, self._pad, np.int32)
        ids[0] = self._cls
        ids[1 : end - 1] = tokens
        ids[end - 1] = self._sep
        return _Row(ids, types=np.zeros(self.length, np.int32), end=end)

    def _pair(self, index: int, rng: np.random.Generator) -> _Row:
        """Returns a row as two segments, the second of which may be from elsewhere."""
        first, second, unrelated = segments(self.text, index, rng)
        start = len(first) + 2  # of the second segment
        end = start + len(second) + 1
        ids = np.full(self.length, self._pad, np.int32)
        ids[0] = self._cls
        ids[1 : start - 1] = first
        ids[start - 1] = self._sep
        ids[start : end - 1] = second
        ids[end - 1] = self._sep

        types = np.zeros(self.length, np.int32)
        types[start:end] = 1
        return _Row(ids, types, end, unrelated)

    def _masked(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draws the input's tokens at the positions to predict.

        Each is the mask, the token itself, or a random one.
        """
        fate = rng.random(len(tokens))
        drawn = rng.integers(len(self._replacements), size=len(tokens))
        kept_or_random = np.where(fate < MASK + KEEP, tokens, self._replacements[drawn])
        return np.where(fate < MASK, self._mask, kept_or_random)

    def _choose(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draws the positions to predict, increasing."""
        ordinary = self._ordinary[ids]
        candidates = np.flatnonzero(ordinary)
        count = _share(len(candidates), MASKED, self.predictions, rng)
        if self._continues is None:
            return np.sort(rng.permutation(candidates)[:count])

        # A piece after a special or unknown token begins a word as well: a row may be cut within a
        # word.
        begins_word = ordinary.copy()
        begins_word[1:] &= ~(self._continues[ids[1:]] & ordinary[:-1])
        return candidates[_choose_words(begins_word[candidates], count, rng)]


def _choose_words(begins_word: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws words with at most `count` pieces in all, passing over words that are too long.

    Args:
        begins_word: bool [n], which pieces begin a word.
    Returns: the numbers of the drawn words' pieces, int64, increasing.
    """
    starts = np.flatnonzero(begins_word)
    sizes = np.diff(starts, append=len(begins_word)).tolist()
    starts = starts.tolist()
    chosen: list[int] = []
    for word in rng.permutation(len(starts)).tolist():
        if len(chosen) + sizes[word] <= count:
            chosen.extend(range(starts[word], starts[word] + sizes[word]))
            if len(chosen) == count:
                break
    chosen.sort()
    return np.array(chosen, np.int64)


class PermutedText:
    """Rows whose tokens are predicted in a random order.

    After Yang et al. 2019, "XLNet", https://arxiv.org/abs/1906.08237. About one token of six is
    predicted, in spans of 1 to 5 tokens that begin with a word, each in a context of six times its
    length (sections 2.3 and 3.1; `_sample_mask` of the authors' data_utils.py, whose spans count
    tokens as well, and which adds single tokens to have enough); all others are seen by every
    token. <sep> and <cls> are never predicted, nor other special tokens. Half of the second
    segments are from elsewhere (section 2.5, without predicting which); there is no memory of the
    row before, since rows are shuffled. An example is

        input_ids        int32 [T]: padding, A <sep> B <sep> <cls>; targets are not masked: the
                         query stream hides them
        attention_mask   int32 [T], 0 for padding, which is on the left
        token_type_ids   int32 [T]: 0 for A and its <sep>, 1 for B and its <sep>, 2 for <cls>, 3 for
                         padding
        order            int32 [T]: rank in the permutation of targets, <sep> and <cls>, 0 to T - 1,
                         all different; -1 for what every token sees, T for padding. See
                         models/permutation.py
        positions        int32 [P], increasing, then T - 1 for fillers: that is <cls>, never a
                         target, because the query stream adds up the queries of equal positions
        labels           int32 [P], the tokens at these positions; 0 for fillers
        weights          float32 [P], 1 for a prediction and 0 for a filler

    Args:
        text: see `TextRows`; its rows must be `pairs`.
        predictions: P, at most T; the authors have 85 of 512.
    Raises:
        InputError: a tokenizer without mask token, or that pads on the right; numbers or rows that
            do not fit.
    """

    def __init__(self, text: TextRows, predictions: int):
        _check(text, predictions, side="left")
        _check_pairs(text, "XLNet")
        self.text = text
        self.predictions = predictions
        self.length = text.length
        tokenizer = text.tokenizer
        self._pad = tokenizer.pad_token_id
        self._cls = tokenizer.cls_token_id
        self._sep = tokenizer.sep_token_id
        self._ordinary = _ordinary(tokenizer)

        # As in the authors' `_is_start_piece`, a span may also begin with a punctuation mark.
        self._begins_span = ~continues_word(tokenizer)
        punctuation = [sign for sign in string.punctuation if sign not in "'<=>"]
        ids = np.array(tokenizer.convert_tokens_to_ids(punctuation))
        self._begins_span[ids[ids != tokenizer.unk_token_id]] = True

    def __len__(self) -> int:
        return len(self.text)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns a row and an order of its tokens; see the class."""
        length = self.length
        first, second, _ = segments(self.text, index, rng)
        first_start = length - len(first) - len(second) - 3  # after the padding
        second_start = length - len(second) - 2
        ids = np.full(length, self._pad, np.int32)
        ids[first_start : second_start - 1] = first
        ids[second_start - 1] = self._sep
        ids[second_start:-2] = second
        ids[-2] = self._sep
        ids[-1] = self._cls
        _check_known(ids, self._ordinary, index)

        attention = np.zeros(length, np.int32)
        attention[first_start:] = 1
        types = np.full(length, 3, np.int32)
        types[first_start:second_start] = 0
        types[second_start:-1] = 1
        types[-1] = 2

        chosen = self._choose(ids[first_start:], rng) + first_start
        special = [second_start - 1, length - 2, length - 1]
        order = np.full(length, length, np.int32)
        order[first_start:] = -1
        ranked = np.append(chosen, special)
        order[ranked] = rng.permutation(length)[: len(ranked)]
        return {
            "input_ids": ids,
            "attention_mask": attention,
            "token_type_ids": types,
            "order": order,
            **_predictions(self.predictions, chosen, ids, filler=length - 1),
        }

    def _choose(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draws the positions to predict, increasing: spans, then single tokens to have enough."""
        ordinary = self._ordinary[ids]
        most = min(self.predictions, int(ordinary.sum()))
        count = _share(len(ids), 1 / PARTIAL, most, rng)
        chosen = self._choose_spans(ids, count, rng) & ordinary
        missing = count - int(chosen.sum())
        if missing:
            others = np.flatnonzero(ordinary & ~chosen)
            chosen[rng.permutation(others)[:missing]] = True
        return np.flatnonzero(chosen)

    def _choose_spans(self, ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draws spans of at most `count` tokens in all, from left to right.

        Each has a context of PARTIAL times its length: of a random part before the span, and the
        rest after it.

        Returns: which tokens are in a span, bool [n].
        """
        size = len(ids)
        # For each position the first one from there on where a span may begin; `size`: none.
        begins = np.where(self._begins_span[ids], np.arange(size), size)
        begins = np.minimum.accumulate(begins[::-1])[::-1].tolist()
        lengths = _SPANS[np.searchsorted(_SPANS_UPTO, rng.random(count), side="right")].tolist()
        shifts = rng.random(count).tolist()

        chosen = np.zeros(size, bool)
        position = 0  # where the context of the next span begins
        left = count  # tokens that may still be chosen
        for drawn_length, shift in zip(lengths, shifts, strict=True):
            length = min(drawn_length, left)
            before = int(shift * length * PARTIAL)  # of the context; the rest is after the span
            if position + before >= size:
                break
            begin = begins[position + before]
            end = begin + length
            if end >= size:
                break
            chosen[begin:end] = True
            left -= length
            position = end + length * PARTIAL - before
            if left == 0 or position >= size:
                break
        return chosen


# Spans of length L have a probability in proportion to 1/L, as in the authors' code.
_SPANS = np.arange(1, LONGEST_SPAN + 1)
_SPANS_UPTO = np.cumsum(1 / _SPANS / (1 / _SPANS).sum())[:-1]


def segments(
    text: TextRows, index: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns two segments of a row, and whether the second is from elsewhere.

    Together they have at most text.length - 3 tokens. The row is cut where one of its sentences
    starts. In half of the cases its second segment is replaced by neighbouring sentences of a row
    drawn at random. These have about the length of the replaced segment, so that neither the
    padding nor a cut sentence gives them away. A row of one sentence is cut in the middle, and
    always has a second segment from elsewhere (as in the BERT authors'
    create_pretraining_data.py).
    """
    tokens, starts = text.row(index)
    is_single = len(starts) == 1
    cut = max(1, len(tokens) // 2)
    if not is_single:
        cut = int(starts[rng.integers(1, len(starts))])
    first = tokens[:cut]
    second = tokens[cut:]
    if not (is_single or rng.random() < UNRELATED):
        return first, second, False

    wanted = max(1, len(second))
    room = text.length - 3 - cut
    return first, _from_elsewhere(text, index, wanted, room, rng), True


def _from_elsewhere(
    text: TextRows, index: int, wanted: int, room: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns neighbouring sentences of another row than `index`, of about `wanted` tokens.

    Of at most TRIES rows the best is taken. Where all sentences of these have more than `room`
    tokens, the last row's first tokens are returned.
    """
    too_far = room + 1
    nearest = too_far  # the smallest distance so far: tokens more or fewer than wanted
    for _ in range(TRIES):
        other = (index + 1 + int(rng.integers(len(text) - 1))) % len(text)
        tokens, starts = text.row(other)
        begins = starts.astype(np.int64)
        ends = np.append(begins[1:], len(tokens))
        sizes = ends - begins[:, None]  # [k, k] from where a sentence starts to where one ends
        fits = (sizes > 0) & (sizes <= room)
        distances = np.where(fits, np.abs(sizes - wanted), too_far).ravel()
        distance = int(distances.min())
        if distance < nearest:
            nearest = distance
            equals = np.flatnonzero(distances == distance)
            drawn = int(equals[rng.integers(len(equals))])
            begin, end = divmod(drawn, len(begins))
            found = tokens[begins[begin] : ends[end]]
        if nearest <= wanted * TOLERANCE:
            break

    if nearest > room:  # all sentences are too long
        return tokens[:room]
    return found


def _share(size: int, share: float, most: int, rng: np.random.Generator) -> int:
    """Rounds share x size up or down at random, so that its mean is exact.

    The result is at least 1, and at most `size` and `most`. fairseq's mask_tokens_dataset.py rounds
    in this way.
    """
    return min(max(1, int(share * size + rng.random())), size, most)


def _predictions(
    slots: int, chosen: np.ndarray, ids: np.ndarray, filler: int
) -> dict[str, np.ndarray]:
    """Returns "positions", "labels" and "weights", each [slots], of the chosen positions of a row.

    Slots that are left over are fillers, of weight 0 and at the position `filler`.
    """
    count = len(chosen)
    positions = np.full(slots, filler, np.int32)
    labels = np.zeros(slots, np.int32)
    weights = np.zeros(slots, np.float32)
    positions[:count] = chosen
    labels[:count] = ids[chosen]
    weights[:count] = 1
    return {"positions": positions, "labels": labels, "weights": weights}


def _ordinary(tokenizer) -> np.ndarray:
    """Returns, as bool [vocabulary], which tokens are not special."""
    ordinary = np.ones(len(tokenizer), bool)
    ordinary[tokenizer.all_special_ids] = False
    if not ordinary.any():
        raise InputError(
            "the tokenizer has special tokens only; expected a trained one, which --tokenizer names"
        )
    return ordinary


def _check_known(ids: np.ndarray, ordinary: np.ndarray, index: int) -> None:
    """Raises InputError for a token that the tokenizer does not have."""
    if ids.max() >= len(ordinary):
        raise InputError(
            f"row {index} has the token {ids.max()}, and its tokenizer {len(ordinary)} tokens, 0 "
            f"to {len(ordinary) - 1}: prepare the text again, with this tokenizer"
        )


def _check(text: TextRows, predictions: int, side: str) -> None:
    """Raises InputError where rows cannot be used for an objective that pads on this side."""
    tokenizer = text.tokenizer
    missing = []
    for name in ("pad", "cls", "sep", "mask"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            missing.append(name)
    if missing:
        listed = " and no ".join(missing)
        raise InputError(
            f"the tokenizer has no {listed} token, which pretraining needs; prepare the text with "
            "the tokenizer of a BERT, DistilBERT, RoBERTa or XLNet"
        )

    if tokenizer.padding_side != side:
        objectives = {
            "right": "masked tokens (BERT, DistilBERT, RoBERTa)",
            "left": "a permutation (XLNet)",
        }
        raise InputError(
            f"the tokenizer pads on the {tokenizer.padding_side}, but the rows of "
            f"{objectives[side]} are padded on the {side}; prepare the text with --kind and "
            "--tokenizer of the model that is trained"
        )

    if not 1 <= predictions <= text.length:
        raise InputError(
            f"predictions is {predictions}; "
            f"expected 1 to {text.length}, the length of a row. 15 to 17 % of it is usual"
        )


def _check_pairs(text: TextRows, what: str) -> None:
    """Raises InputError where rows cannot be cut into two segments; `what` needs them."""
    if not text.pairs:
        raise InputError(
            f"{what} needs rows with room for two segments; prepare the text again with --pairs"
        )
    special = text.tokenizer.num_special_tokens_to_add(pair=True)
    if special != 3:
        raise InputError(
            f"the tokenizer puts {special} special tokens around a pair, but {what} has rows with "
            "3; RoBERTa is trained without next-sentence prediction"
        )
    if len(text) < 2:
        raise InputError(
            f"{what} takes second segments from other rows, but the text has {len(text)}; "
            "give more text"
        )


def usual_predictions(kind: str, length: int) -> int:
    """Returns a row's slots for predicted tokens: 16 % of its tokens, XLNet's 17 %, rounded up."""
    percent = 17 if kind == "xlnet" else 16
    return math.ceil(length * percent / 100)


def open_rows(
    data: str,
    split: str,
    kind: str,
    predictions: int,
    whole_words: bool,
    next_sentence: bool,
    trial: tuple[int, int],
) -> MaskedText | PermutedText:
    """Opens the rows of a split with an objective: a permutation for XLNet, else masked tokens.

    Args:
        data: folder that `make data DATASET=text` made, or "synthetic".
        split: train or valid.
        kind: of the model's tokenizer, one of KINDS in data/vocabulary.py.
        predictions: predicted tokens per row; 0: `usual_predictions`.
        trial: (tokens per row, seed) of the synthetic text.
    Raises:
        InputError: the folder is missing, damaged, or prepared for another kind.
    """
    if data == "synthetic":
        length, seed = trial
        rows = text.SyntheticText(split, kind, length, next_sentence, seed)
    else:
        rows = text.open_text(data, split)
        if rows.kind != kind and {rows.kind, kind} != {"bert", "distilbert"}:
            raise InputError(
                f"{data} was prepared with --kind {rows.kind}; this model needs --kind {kind}"
            )

    if not predictions:
        predictions = usual_predictions(kind, rows.length)
    if kind == "xlnet":
        return PermutedText(rows, predictions)
    return MaskedText(rows, predictions, whole_words, next_sentence)
