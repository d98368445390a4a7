"""Rows of text with tokens to predict: masked tokens (BERT, RoBERTa, DistilBERT), a permutation (XLNet).

Rows come from data/text.py; every epoch masks them anew, since the generator that the loader gives depends on the epoch
(dynamic masking: Liu et al. 2019, "RoBERTa", section 4.1, https://arxiv.org/abs/1907.11692). Every array has a fixed
shape: T = text.length places per row, P = `predictions` places for predicted tokens, so that the language-model head
runs on P places and not on T. Token type, position and weight of a place are explained at each class.
"""

import math
import string
from typing import Protocol

import numpy as np

from data import text
from data.vocabulary import continues_word
from errors import InputError

MASKED = 0.15  # of a row's tokens are predicted: Devlin et al. 2019, section 3.1; RoBERTa has the same
MASK, KEEP = 0.8, 0.1  # become the mask token, stay as they are; the rest becomes a random token. The same section
UNRELATED = 0.5  # of the pairs have a second segment from elsewhere. Devlin et al. 2019, section 3.1, task 2
PARTIAL = 6  # one token of K = 6 is predicted: Yang et al. 2019, sections 2.3 and 3.1
LONGEST_SPAN = 5  # tokens; section 3.1
TOLERANCE = 0.1  # a second segment from elsewhere may be so much longer or shorter than the one that it replaces, …
TRIES = 10  # … or else up to so many rows are searched for one


class Rows(Protocol):
    """The rows that data/text.py offers: `tokenizer`, `length` of a row with its special tokens, and rows without them.

    `pairs` says that a row leaves room for three special tokens, not two. `row` gives tokens [n], unsigned integers,
    and where its sentences start, integers [k], the first of which is 0.
    """

    tokenizer: object
    length: int
    pairs: bool

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class MaskedText:
    """Rows with masked tokens to predict, after Devlin et al. 2019, "BERT", https://arxiv.org/abs/1810.04805.

    15 % of the tokens are predicted, special and unknown ones never: 80 % of them become the mask token, 10 % a random
    token that is not special, 10 % stay. 15 % is the mean: a row has the whole number above or below, at least 1 and at
    most `predictions`, which should therefore be a little more than 15 % of T. An example is

        input_ids, attention_mask, token_type_ids   int32 [T]: <cls> A <sep> of type 0, B <sep> of type 1, then padding
        positions   int32 [P], increasing, then 0 for fillers
        labels      int32 [P], the token that was there; 0 for fillers
        weights     float32 [P], 1 for a prediction and 0 for a filler
        next_sentence   int32 [], 0 if B follows A and 1 if it is from elsewhere; only if asked for

    Args:
        text: see `Rows`; for `next_sentence` its rows must be `pairs`.
        predictions: P, at most T.
        whole_words: all pieces of a word are predicted, or none (the BERT authors' "whole word masking" of 2019). A
            word that is longer than what is left of the 15 % is skipped, so a row of such words has no prediction.
        next_sentence: a row is cut in two where a sentence starts; half of the second segments are replaced, see
            `segments`. Without it, a row is one segment.
    Raises:
        InputError: a tokenizer without mask token, or that pads on the left; numbers or rows that do not fit.
    """

    def __init__(self, text: Rows, predictions: int, whole_words: bool, next_sentence: bool):
        _check(text, predictions, side="right")
        if next_sentence:
            _check_pairs(text, "next-sentence prediction")
        self.text, self.predictions, self.next_sentence = text, predictions, next_sentence
        self.length = text.length
        tokenizer = text.tokenizer
        self._pad, self._cls, self._sep = tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id
        self._mask = tokenizer.mask_token_id
        self._ordinary = _ordinary(tokenizer)
        self._replacements = np.flatnonzero(self._ordinary).astype(np.int32)
        self._continues = continues_word(tokenizer) if whole_words else None

    def __len__(self) -> int:
        return len(self.text)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns a row, masked; see the class."""
        ids = np.full(self.length, self._pad, np.int32)
        types = np.zeros(self.length, np.int32)
        ids[0] = self._cls
        if self.next_sentence:
            first, second, unrelated = segments(self.text, index, rng)
            start = len(first) + 2
            end = start + len(second) + 1
            ids[1 : start - 1] = first
            ids[start : end - 1] = second
            ids[start - 1] = self._sep
            types[start:end] = 1
        else:
            tokens, _ = self.text.row(index)
            end = len(tokens) + 2
            ids[1 : end - 1] = tokens
        ids[end - 1] = self._sep
        attention = np.zeros(self.length, np.int32)
        attention[:end] = 1
        _check_known(ids, self._ordinary, index)

        chosen = self._choose(ids[:end], rng)
        count = len(chosen)
        positions, labels, weights = _predictions(self.predictions, chosen, ids, filler=0)
        fate = rng.random(count)
        random = self._replacements[rng.integers(len(self._replacements), size=count)]
        ids[chosen] = np.where(fate < MASK, self._mask, np.where(fate < MASK + KEEP, labels[:count], random))
        example = {
            "input_ids": ids,
            "attention_mask": attention,
            "token_type_ids": types,
            "positions": positions,
            "labels": labels,
            "weights": weights,
        }
        if self.next_sentence:
            example["next_sentence"] = np.array(unrelated, np.int32)
        return example

    def _choose(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draws the places to predict, increasing."""
        ordinary = self._ordinary[ids]
        candidates = np.flatnonzero(ordinary)
        count = _share(len(candidates), MASKED, self.predictions, rng)
        if self._continues is None:
            return np.sort(rng.permutation(candidates)[:count])
        # A piece whose predecessor is not predictable (a row may be cut within a word) begins a word as well.
        starts = ordinary.copy()
        starts[1:] &= ~(self._continues[ids[1:]] & ordinary[:-1])
        words = np.flatnonzero(starts[candidates])
        sizes = np.diff(words, append=len(candidates)).tolist()
        words = words.tolist()
        chosen: list[int] = []
        for word in rng.permutation(len(words)).tolist():
            if len(chosen) + sizes[word] <= count:
                chosen.extend(range(words[word], words[word] + sizes[word]))
                if len(chosen) == count:
                    break
        chosen.sort()
        return candidates[chosen] if chosen else candidates[:0]


class PermutedText:
    """Rows whose tokens are predicted in a random order, after Yang et al. 2019, "XLNet", arxiv.org/abs/1906.08237.

    About one token of six is predicted, in spans of 1 to 5 tokens that begin with a word, each in a context of six
    times its length (sections 2.3 and 3.1; `_sample_mask` of the authors' data_utils.py, whose spans count tokens as
    well, and which adds single tokens to have enough); all others are seen by every token. <sep> and <cls> are never
    predicted, nor other special tokens. Half of the second segments are from elsewhere (section 2.5, without predicting
    which); there is no memory of the row before, since rows are shuffled. An example is

        input_ids        int32 [T]: padding, A <sep> B <sep> <cls>; targets are not masked: the query stream hides them
        attention_mask   int32 [T], 0 for padding, which is on the left
        token_type_ids   int32 [T]: 0 for A and its <sep>, 1 for B and its <sep>, 2 for <cls>, 3 for padding
        order            int32 [T]: place in the permutation of targets, <sep> and <cls>, 0 to T - 1, all different;
                         -1 for what every token sees, T for padding. See models/permutation.py
        positions        int32 [P], increasing, then T - 1 for fillers: that is <cls>, never a target, because the query
                         stream adds up the queries of equal positions
        labels           int32 [P], the tokens at these positions; 0 for fillers
        weights          float32 [P], 1 for a prediction and 0 for a filler

    Args:
        text: see `Rows`; its rows must be `pairs`.
        predictions: P, at most T; the authors have 85 of 512.
    Raises:
        InputError: a tokenizer without mask token, or that pads on the right; numbers or rows that do not fit.
    """

    def __init__(self, text: Rows, predictions: int):
        _check(text, predictions, side="left")
        _check_pairs(text, "XLNet")
        self.text, self.predictions = text, predictions
        self.length = text.length
        tokenizer = text.tokenizer
        self._pad, self._cls, self._sep = tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id
        self._ordinary = _ordinary(tokenizer)
        self._starts = ~continues_word(tokenizer)
        # The authors' `_is_start_piece`: a span may begin with a punctuation mark, too.
        marks = np.array(tokenizer.convert_tokens_to_ids([mark for mark in string.punctuation if mark not in "'<=>"]))
        self._starts[marks[marks != tokenizer.unk_token_id]] = True

    def __len__(self) -> int:
        return len(self.text)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns a row and an order of its tokens; see the class."""
        length = self.length
        first, second, _ = segments(self.text, index, rng)
        real = slice(length - len(first) - len(second) - 3, length)
        start = length - len(second) - 2  # of the second segment
        ids = np.full(length, self._pad, np.int32)
        ids[real.start : start - 1] = first
        ids[start - 1] = self._sep
        ids[start:-2] = second
        ids[-2:] = self._sep, self._cls
        attention = np.zeros(length, np.int32)
        attention[real] = 1
        types = np.full(length, 3, np.int32)
        types[real.start : start] = 0
        types[start:-1] = 1
        types[-1] = 2
        _check_known(ids, self._ordinary, index)

        chosen = self._choose(ids[real], rng) + real.start
        order = np.full(length, length, np.int32)
        order[real] = -1
        placed = np.append(chosen, [start - 1, length - 2, length - 1])
        order[placed] = rng.permutation(length)[: len(placed)]
        positions, labels, weights = _predictions(self.predictions, chosen, ids, filler=length - 1)
        return {
            "input_ids": ids,
            "attention_mask": attention,
            "token_type_ids": types,
            "order": order,
            "positions": positions,
            "labels": labels,
            "weights": weights,
        }

    def _choose(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draws the places to predict, increasing: spans, then single tokens for what is missing."""
        size = len(ids)
        ordinary = self._ordinary[ids]
        count = _share(size, 1 / PARTIAL, min(self.predictions, int(ordinary.sum())), rng)
        # The first place at or after each where a word begins; `size` where none does.
        begins = np.where(self._starts[ids], np.arange(size), size)
        begins = np.minimum.accumulate(begins[::-1])[::-1].tolist()
        # Spans of length L have probability 1/L, as the authors' code has it.
        lengths = _SPANS[np.searchsorted(_SPANS_UPTO, rng.random(count), side="right")].tolist()
        shifts = rng.random(count).tolist()
        chosen = np.zeros(size, bool)
        place, left = 0, count
        for span, shift in zip(lengths, shifts, strict=True):
            span = min(span, left)
            before = int(shift * span * PARTIAL)  # of the context, the rest of which comes after the span
            if place + before >= size:
                break
            begin = begins[place + before]
            end = begin + span
            if end >= size:
                break
            chosen[begin:end] = True
            left -= span
            place = end + span * PARTIAL - before
            if not left or place >= size:
                break
        chosen &= ordinary
        missing = count - int(chosen.sum())
        if missing:
            chosen[rng.permutation(np.flatnonzero(ordinary & ~chosen))[:missing]] = True
        return np.flatnonzero(chosen)


_SPANS = np.arange(1, LONGEST_SPAN + 1)
_SPANS_UPTO = np.cumsum(1 / _SPANS / (1 / _SPANS).sum())[:-1]


def segments(text: Rows, index: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns two segments of together at most text.length - 3 tokens, and whether the second is from elsewhere.

    The row is cut where one of its sentences starts. In half of the cases its second part is replaced by neighbouring
    sentences of other rows drawn at random. They have as nearly the same length as there are, so that neither the
    padding nor a cut sentence gives them away. A row of one sentence is cut in the middle, and always has a second
    segment from elsewhere (as in the BERT authors' create_pretraining_data.py).
    """
    tokens, starts = text.row(index)
    single = len(starts) == 1
    cut = max(1, len(tokens) // 2) if single else int(starts[rng.integers(1, len(starts))])
    first, second = tokens[:cut], tokens[cut:]
    if not (single or rng.random() < UNRELATED):
        return first, second, False
    room = text.length - 3 - cut
    wanted = max(1, len(second))
    nearest = room + 1  # tokens more or fewer
    for _ in range(TRIES):
        other = (index + 1 + int(rng.integers(len(text) - 1))) % len(text)  # any but this one
        tokens, starts = text.row(other)
        begins = starts.astype(np.int64)
        sizes = np.append(begins[1:], len(tokens)) - begins[:, None]  # [k, k] from where a sentence starts to an end
        distances = np.where((sizes > 0) & (sizes <= room), np.abs(sizes - wanted), room + 1).ravel()
        if (distance := int(distances.min())) < nearest:
            nearest = distance
            best = np.flatnonzero(distances == distance)
            begin, end = divmod(int(best[rng.integers(len(best))]), len(begins))
            second = tokens[begins[begin] : begins[begin] + sizes[begin, end]]
        if nearest <= wanted * TOLERANCE:
            break
    if nearest > room:  # only sentences that are too long
        second = tokens[:room]
    return first, second, True


def _share(size: int, share: float, most: int, rng: np.random.Generator) -> int:
    """Rounds share x size up or down at random such that its mean is exact; at least 1 of a few, and at most `most`.

    fairseq's mask_tokens_dataset.py rounds in this way.
    """
    return min(max(1, int(share * size + rng.random())), size, most)


def _predictions(places: int, chosen: np.ndarray, ids: np.ndarray, filler: int) -> tuple[np.ndarray, ...]:
    """Returns (positions, labels, weights) [places] of the chosen places of a row."""
    count = len(chosen)
    positions = np.full(places, filler, np.int32)
    labels = np.zeros(places, np.int32)
    weights = np.zeros(places, np.float32)
    positions[:count] = chosen
    labels[:count] = ids[chosen]
    weights[:count] = 1
    return positions, labels, weights


def _ordinary(tokenizer) -> np.ndarray:
    """Returns, as bool [vocabulary], which tokens are not special."""
    ordinary = np.ones(len(tokenizer), bool)
    ordinary[tokenizer.all_special_ids] = False
    if not ordinary.any():
        raise InputError("the tokenizer has special tokens only; expected a trained one, which --tokenizer names")
    return ordinary


def _check_known(ids: np.ndarray, ordinary: np.ndarray, index: int) -> None:
    """Raises InputError for a token that the tokenizer does not have."""
    if ids.max() >= len(ordinary):
        raise InputError(
            f"row {index} has the token {ids.max()}, and its tokenizer {len(ordinary)} tokens, 0 to "
            f"{len(ordinary) - 1}: prepare the text again, with this tokenizer"
        )


def _check(text: Rows, predictions: int, side: str) -> None:
    tokenizer = text.tokenizer
    missing = [name for name in ("pad", "cls", "sep", "mask") if getattr(tokenizer, f"{name}_token_id") is None]
    if missing:
        raise InputError(
            f"the tokenizer has no {' and no '.join(missing)} token, which pretraining needs; prepare the text with "
            f"the tokenizer of a BERT, DistilBERT, RoBERTa or XLNet"
        )
    if tokenizer.padding_side != side:
        kinds = {"right": "masked tokens (BERT, DistilBERT, RoBERTa)", "left": "a permutation (XLNet)"}
        raise InputError(
            f"the tokenizer pads on the {tokenizer.padding_side}, but the rows of {kinds[side]} are padded on the "
            f"{side}; prepare the text with --kind and --tokenizer of the model that is trained"
        )
    if not 1 <= predictions <= text.length:
        raise InputError(
            f"predictions is {predictions}; expected 1 to {text.length}, the length of a row. 15 to 17 % of it is usual"
        )


def _check_pairs(text: Rows, what: str) -> None:
    if not text.pairs:
        raise InputError(f"{what} needs rows with room for two segments; prepare the text again with --pairs")
    if (special := text.tokenizer.num_special_tokens_to_add(pair=True)) != 3:
        raise InputError(
            f"the tokenizer puts {special} special tokens around a pair, but {what} has rows with 3; "
            f"RoBERTa is trained without next-sentence prediction"
        )
    if len(text) < 2:
        raise InputError(f"{what} takes second segments from other rows, but the text has {len(text)}; give more text")


def usual_predictions(kind: str, length: int) -> int:
    """Returns the predicted places of a row: 16 % of its tokens, XLNet's 17 %, rounded up."""
    percent = 17 if kind == "xlnet" else 16
    return math.ceil(length * percent / 100)


def open_rows(
    data: str, split: str, kind: str, predictions: int, whole_words: bool, next_sentence: bool, trial: tuple[int, int]
) -> MaskedText | PermutedText:
    """Opens the rows of a split with the masks of an objective: permutations for XLNet, masked words for the others.

    Args:
        data: folder that `make data DATASET=text` made, or "synthetic".
        split: train or valid.
        kind: of the model's tokenizer, one of KINDS in data/vocabulary.py.
        predictions: predicted places per row; 0: `usual_predictions`.
        trial: (tokens per row, seed) of the synthetic text.
    Raises:
        InputError: the folder is missing, damaged, or prepared for another kind.
    """
    if data == "synthetic":
        rows = text.SyntheticText(split, kind, trial[0], next_sentence, trial[1])
    else:
        rows = text.open_text(data, split)
        if rows.kind != kind and {rows.kind, kind} != {"bert", "distilbert"}:
            raise InputError(f"{data} was prepared with --kind {rows.kind}; this model needs --kind {kind}")
    predictions = predictions or usual_predictions(kind, rows.length)
    if kind == "xlnet":
        return PermutedText(rows, predictions)
    return MaskedText(rows, predictions, whole_words, next_sentence)
