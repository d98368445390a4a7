"""Tokens of sentences whose words have tags, in windows of at most so many tokens.

    encoded = Encoded(opened.train, tokenizer, max_length=128, labels=task.labels)
    encoded.tags(predicted)          # from one number a word, of each window, to tags a sentence

The first piece of a word has the word's label, all other tokens have none (Devlin et al. 2019,
5.3). A sentence that is too long is not cut: it goes on in another window, so that every word is
trained, and scored.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from data import sentences, tagging
from errors import InputError

NO_LABEL = -100  # of tokens that are no first piece of a word: transformers' and PyTorch's
# Sentences tokenized at once, see data/sentences.py.
CHUNK = 1000


class Encoded:
    """Tokenized windows, as a data set for `parallel_loader` with a plan of `lengths`.

    A word that the tokenizer makes nothing of, such as a control character, becomes its token for
    unknown words. All tokens lie in one flat array. The tokenizer is not kept.

    Args:
        given: the sentences of one split.
        tokenizer: one of transformers' fast tokenizers, see `separate_words`.
        max_length: most tokens of a window, special tokens included.
        labels: the names of the classes in their order; (): all words have label 0.
    Attributes:
        lengths: int32 [n], tokens of each window, special tokens included.
        sentence: int32 [n], the number of each window's sentence; windows of one are in order.
        words: int32 [n], words of each window; together those of all sentences.
        gold: the tags of each sentence, as given.
        split: how many sentences are in several windows.
        tokens: the sum of `lengths`.
        notes, source, left_out: those of the sentences; the notes also tell of windows.
    Raises:
        InputError: the tokenizer is not a fast one, or has no padding token; max_length is too
            small for its special tokens and one word, or more than its model takes; a word without
            a token, where the tokenizer has none for unknown words.
    """

    def __init__(
        self, given: "tagging.Sentences", tokenizer, max_length: int, labels: Sequence[str] = ()
    ):
        sentences.check_tokenizer(tokenizer, max_length, pairs=False)
        self.source = given.source
        self.left_out = given.left_out
        self.gold = given.tags
        self.notes = list(given.notes)
        self._pad = tokenizer.pad_token_id
        self._pads_left = tokenizer.padding_side == "left"
        is_xlnet = type(tokenizer).__name__.startswith("XLNet")  # see data/sentences.py
        has_types = is_xlnet or "token_type_ids" in tokenizer.model_input_names
        self._type_pad = sentences.XLNET_TYPE_PAD if is_xlnet else tokenizer.pad_token_type_id

        number_of = {name: number for number, name in enumerate(labels)}
        made = _Windows(tokenizer, max_length)
        for start in range(0, len(given), CHUNK):
            made.add(given.words[start : start + CHUNK], first=start)
        self.lengths = np.array([len(window.ids) for window in made.windows], np.int32)
        self.sentence = np.array([window.sentence for window in made.windows], np.int32)
        self.words = np.array([len(window.first_pieces) for window in made.windows], np.int32)
        self._starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        ids = chain.from_iterable(window.ids for window in made.windows)
        self._ids = np.fromiter(ids, np.int32, self.tokens)
        self._types = None
        if has_types:
            types = chain.from_iterable(window.types for window in made.windows)
            self._types = np.fromiter(types, np.uint8, self.tokens)
        self._labels = np.full(self.tokens, NO_LABEL, np.int32)
        for start, window in zip(self._starts, made.windows, strict=True):
            tags = self.gold[window.sentence][window.first_word :] if labels else ()
            for word, piece in enumerate(window.first_pieces):
                self._labels[start + piece] = number_of[tags[word]] if labels else 0

        self.split = len({window.sentence for window in made.windows if window.first_word})
        self.notes += made.notes(given.source)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray, shape: tuple[int]) -> dict[str, np.ndarray]:
        """Returns these windows as arrays of a fixed length (L,).

        Args:
            indices: int [B]; -1 is no window: a row of padding without a label, one of whose
                positions is attended to.
        Returns:
            "input_ids" int32 [B, L], padded on the tokenizer's padding side
            "attention_mask" int32 [B, L], 1 for tokens
            "token_type_ids" int32 [B, L], the tokenizer's own where it has any, else 0
            "labels" int32 [B, L], of first pieces of words; others NO_LABEL
        Raises:
            IndexError: a window that is not there.
            ValueError: a window that is longer than L.
        """
        indices = np.asarray(indices, np.int64)
        if indices.size and not -1 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"examples {indices.min()} to {indices.max()} of {len(self)}")
        (width,) = shape
        places = (len(indices), width)
        input_ids = np.full(places, self._pad, np.int32)
        attention_mask = np.zeros(places, np.int32)
        types = np.full(places, 0 if self._types is None else self._type_pad, np.int32)
        labels = np.full(places, NO_LABEL, np.int32)
        for row, index in enumerate(indices.tolist()):
            if index < 0:
                attention_mask[row, -1 if self._pads_left else 0] = 1
                continue
            size = int(self.lengths[index])
            if size > width:
                raise ValueError(
                    f"example {index} has {size} tokens, and the shape has {width} places"
                )
            start = self._starts[index]
            tokens = slice(start, start + size)
            columns = slice(width - size, width) if self._pads_left else slice(0, size)
            input_ids[row, columns] = self._ids[tokens]
            attention_mask[row, columns] = 1
            labels[row, columns] = self._labels[tokens]
            if self._types is not None:
                types[row, columns] = self._types[tokens]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": types,
            "labels": labels,
        }

    def of_words(self, index: int, row: np.ndarray) -> np.ndarray:
        """Returns what a row of a batch, [L] or [L, …], has at the first pieces of the words of
        window `index`."""
        size = int(self.lengths[index])
        start = self._starts[index]
        within = row[len(row) - size :] if self._pads_left else row[:size]
        return within[self._labels[start : start + size] != NO_LABEL]

    def of_sentences(self, of_windows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns for each sentence what its words have, from what the words of each window have,
        in the order of the windows."""
        parts: list[list[np.ndarray]] = [[] for _ in self.gold]
        for sentence, values in zip(self.sentence.tolist(), of_windows, strict=True):
            parts[sentence].append(values)
        return [np.concatenate(part) for part in parts]


class _Window:
    """Tokens of consecutive words of a sentence.

    Args:
        sentence: its number.
        first_word: the number of the window's first word in it.
        encoding: of the words, special tokens included.
    Attributes:
        first_pieces: for each word the number of its first piece among the tokens.
    """

    def __init__(self, sentence: int, first_word: int, encoding: Any):
        self.sentence = sentence
        self.first_word = first_word
        self.ids = encoding.ids
        self.types = encoding.type_ids
        self.first_pieces = list(_pieces(encoding.word_ids))


def _pieces(word_ids: Sequence[int | None]) -> dict[int, int]:
    """Returns, by the number of its first piece, how many pieces each word has."""
    found = {}
    before = None
    first = 0
    for piece, word in enumerate(word_ids):
        if word is None:
            before = None
            continue
        if word != before:
            first = piece
            found[first] = 0
        found[first] += 1
        before = word
    return found


class _Windows:
    """Makes windows of sentences.

    Attributes:
        windows: those made so far.
    """

    def __init__(self, tokenizer, max_length: int):
        self.windows: list[_Window] = []
        self._tokenizer = tokenizer
        self._room = max_length - tokenizer.num_special_tokens_to_add(pair=False)
        self._max_length = max_length
        self._unknown: list[str] = []  # words that the tokenizer makes nothing of
        self._split = 0  # sentences in several windows
        self._cut = 0  # words that are longer than a window

    def add(self, chunk: Sequence[list[str]], first: int) -> None:
        """Adds sentences, of which `first` is the number of the first."""
        encodings = self._encode(chunk)
        for number, (words, encoding) in enumerate(zip(chunk, encodings, strict=True), first):
            sizes = list(_pieces(encoding.word_ids).values())
            if len(sizes) < len(words):
                words = self._with_unknown(words, encoding)
                (encoding,) = self._encode([words])
                sizes = list(_pieces(encoding.word_ids).values())
            if sum(sizes) <= self._room:
                self.windows.append(_Window(number, 0, encoding))
                continue
            self._add_long(number, words, sizes)

    def _add_long(self, number: int, words: list[str], sizes: list[int]) -> None:
        """Adds a sentence in several windows, each as full as whole words make it."""
        self._cut += sum(size > self._room for size in sizes)
        starts = [0]
        filled = 0
        for word, size in enumerate(sizes):
            if filled and filled + size > self._room:
                starts.append(word)
                filled = 0
            filled += size
        self._split += len(starts) > 1
        for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
            (encoding,) = self._encode([words[start:end]], cut=True)
            self.windows.append(_Window(number, start, encoding))

    def _encode(self, chunk: Sequence[list[str]], cut: bool = False) -> list[Any]:
        """Returns the tokens of sentences; with `cut`, which a word longer than a window needs, at
        most those of a window."""
        return self._tokenizer(
            list(chunk),
            is_split_into_words=True,
            truncation=cut,
            max_length=self._max_length if cut else None,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        ).encodings

    def _with_unknown(self, words: list[str], encoding: Any) -> list[str]:
        """Returns the words with the token for unknown ones in place of those without a token."""
        has_token = set(encoding.word_ids)
        unknown = self._tokenizer.unk_token
        replaced = []
        for number, word in enumerate(words):
            if number in has_token:
                replaced.append(word)
                continue
            if unknown is None:
                raise InputError(
                    f"the tokenizer makes no token of the word {word!r}, and has none for unknown "
                    "words; remove the word"
                )
            self._unknown.append(word)
            replaced.append(unknown)
        return replaced

    def notes(self, source: str) -> list[str]:
        """Returns what the user should know of the windows."""
        about = f"{source}: " if source else ""
        notes = []
        if self._split:
            notes.append(
                f"{about}{self._split:,} sentences are longer than {self._max_length} tokens and "
                "are split into windows; every word counts"
            )
        if self._cut:
            notes.append(
                f"{about}{self._cut:,} words are longer than {self._max_length} tokens; their "
                "first tokens stand for them"
            )
        if self._unknown:
            notes.append(
                f"{about}{len(self._unknown):,} words have no token, such as "
                f"{self._unknown[0]!r}; they are taken for unknown ones"
            )
        return notes


def separate_words(tokenizer) -> None:
    """Lets a tokenizer begin each word of a list as one after a blank, as within a text.

    RoBERTa's would take the words of a list for parts of one word. So does run_ner.py of
    transformers by add_prefix_space=True.
    """
    before = tokenizer.backend_tokenizer.pre_tokenizer
    steps = [before]
    if isinstance(before, pre_tokenizers.Sequence):
        steps = list(before)
    for step in steps:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = True
    if getattr(tokenizer, "add_prefix_space", None) is False:
        tokenizer.add_prefix_space = True  # which save_pretrained writes
