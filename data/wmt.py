"""Sentence pairs to translate: a folder of make data or of fairseq-preprocess, and a toy language.

data/prepare/wmt.py turns parallel text into such a folder once, before training (make data
DATASET=wmt18). The folder has fairseq-preprocess' own layout, so fairseq-train takes it as it is:

    dict.en.txt dict.de.txt     symbols with their counts
    train.en-de.en.bin .idx     tokens of the source, memory-mapped
    train.en-de.de.bin .idx     tokens of the target
    valid.en-de.…  test.en-de.…
    valid.en valid.de …         text, against which translations are scored; only from make data
    tokenizer.json              byte-pair encoding, for text to translate; only from make data

Sentence pairs have `lengths` int32 [n, 2] and `batch(indices, shape)` instead of `example`, see
TranslationPairs. Special symbols are fairseq's: <s> 0, <pad> 1, </s> 2, which ends every sentence,
and <unk> 3.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from data import splits
from data.fairseq_format import BOS, EOS, PAD, SPECIALS, UNK, Dictionary, MmapTokens, write_mmap
from data.prepare.files import read_json
from data.remote import FINISHED, local_copy
from errors import InputError

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "UNK",
    "Chosen",
    "Codec",
    "Dictionary",
    "MmapTokens",
    "Sentences",
    "SyntheticPairs",
    "TranslationPairs",
    "open_pairs",
    "write_mmap",
]

Split = Literal["train", "valid", "test"]
PREPARE = "make data DATASET=wmt18 DATA="
_EXPECTED_FOLDER = f"expected one made by `{PREPARE}…` or by fairseq-preprocess"

# Patterns of the files that are copied from a URL.
FILES = (
    "*.idx",
    "*.bin",
    "*dict.*",
    "*tokenizer.json",
    "*report.json",
    "*valid.*",
    "*test.*",
    *FINISHED,
)


class Codec:
    """Turns sentences into tokens and back, with the dictionaries and the tokenizer of a folder.

    Attributes:
        source_language, target_language: such as "en" and "de".
        source_dictionary, target_dictionary: Dictionary; one object if their files are equal.
        tokenizer: tokenizers.Tokenizer of both languages; None in a folder of fairseq-preprocess.
        pieces: what the target's symbols are, one of fairseq_format.PIECES; found by the dictionary
            unless it is given.

    A worker process reads the files itself: none of these is pickled. They raise InputError if a
    file is not there.
    """

    def __init__(
        self, folder: str | Path, source_language: str, target_language: str, pieces: str = ""
    ):
        self.folder = Path(folder)
        self.source_language = source_language
        self.target_language = target_language
        self._given_pieces = pieces

    def _dictionary_path(self, language: str) -> Path:
        return self.folder / f"dict.{language}.txt"

    @cached_property
    def source_dictionary(self) -> Dictionary:
        return Dictionary.load(self._dictionary_path(self.source_language))

    @cached_property
    def target_dictionary(self) -> Dictionary:
        target = Dictionary.load(self._dictionary_path(self.target_language))
        return self.source_dictionary if target == self.source_dictionary else target

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        path = self.folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more exact
            raise InputError(f"{path} cannot be read: {error}; prepare the folder again") from error

    def __getstate__(self) -> dict:
        """Returns the attributes without those that are read from files when they are asked for."""
        state = {}
        for name, value in self.__dict__.items():
            if not isinstance(getattr(type(self), name, None), cached_property):
                state[name] = value
        return state

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Turns text of the source language into tokens, int64 [tokens] each, EOS last.

        Without a tokenizer (folders of fairseq-preprocess) the lines must be split as the folder's
        text was, into symbols with spaces between; symbols that the dictionary does not have become
        <unk>. A line in which nothing is visible (see `is_blank`) is EOS alone.
        """
        texts = ["" if is_blank(line) else line for line in lines]
        if self.tokenizer is None:
            return [_encode_symbols(self.source_dictionary, text) for text in texts]

        sentences = []
        for encoding in self.tokenizer.encode_batch_fast(texts):
            tokens = self._dictionary_ids[encoding.ids]
            sentences.append(np.append(tokens, EOS))
        return sentences

    @cached_property
    def _dictionary_ids(self) -> np.ndarray:
        """The dictionary's id of each of the tokenizer's: the same number after make data."""
        highest = max(self.tokenizer.get_vocab().values())  # ids may be left out
        ids = []
        for number in range(highest + 1):
            symbol = self.tokenizer.id_to_token(number)
            ids.append(self.source_dictionary.index(symbol))
        return np.array(ids, np.int64)

    def decode(self, ids: Sequence[int], unknown: str = SPECIALS[UNK]) -> str:
        """Turns tokens of the target language into text, up to the first EOS.

        Pieces are joined as fairseq's --remove-bpe does it: see `pieces`. <s> and <pad> are left
        out; `unknown` is written for <unk>, by default "<unk>", as fairseq-generate does.
        """
        return join_symbols(_symbols(self.target_dictionary, ids, unknown), self.pieces)

    @cached_property
    def pieces(self) -> str:
        if self._given_pieces:
            return self._given_pieces
        path = self._dictionary_path(self.target_language)
        return self.target_dictionary.pieces(str(path))

    def vocabulary_files(self) -> dict[str, bytes]:
        """Returns the files that a `Codec` needs in another folder: name -> content."""
        paths = [
            self._dictionary_path(self.source_language),
            self._dictionary_path(self.target_language),
        ]
        tokenizer = self.folder / "tokenizer.json"
        if tokenizer.exists():
            paths.append(tokenizer)
        return {path.name: path.read_bytes() for path in paths}

    def sentences(self, lines: Sequence[str]) -> "Sentences":
        """Returns text of the source language as a data set of sentences to translate."""
        return Sentences(self, lines)


class Sentences:
    """Sentences of the source language, without translations.

    Attributes:
        lengths: int32 [n, 1], tokens of each sentence, EOS included.
        unknown_share: the share of the words that are not in the dictionary, 0 to 1.
        decode: that of the codec.
    """

    def __init__(self, codec: Codec, lines: Sequence[str]):
        tokens = codec.encode(lines)
        sizes = [len(one) for one in tokens]
        self._tokens = np.concatenate([*tokens, np.empty(0, np.int64)])
        self._starts = np.cumsum(sizes, dtype=np.int64) - sizes
        self.lengths = np.array(sizes, np.int32).reshape(-1, 1)
        self.decode = codec.decode

        words = self._tokens[self._tokens != EOS]
        self.unknown_share = float((words == UNK).mean()) if len(words) else 0.0

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray, shape: tuple[int]) -> dict[str, np.ndarray]:
        """Returns {"source": int32 [B, S]}: tokens and EOS, then <pad>; an empty row for -1."""
        indices = np.asarray(indices)
        present = indices >= 0
        chosen = indices[present]
        sentences = _Ragged(self._tokens, self._starts[chosen], self.lengths[chosen, 0])
        rows = _Rows("source", sentences, present, width=shape[0])
        return {"source": rows.scatter(rows.tokens, fill=PAD)}


class Chosen:
    """The examples of a data set at the given indices: `lengths`, `batch` and their number."""

    def __init__(self, examples, indices: np.ndarray):
        self.examples = examples
        self.indices = np.asarray(indices, np.int64)
        self.lengths = examples.lengths[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: np.ndarray, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Returns the data set's batch of the examples with these numbers among the chosen ones.

        -1 is no example.
        """
        indices = np.asarray(indices, np.int64)
        own_indices = np.where(indices < 0, -1, self.indices[indices])
        return self.examples.batch(own_indices, shape)


class TranslationPairs(Codec):
    """One split of a folder of binarised sentence pairs, and its `Codec`.

    Attributes:
        lengths: int32 [n, 2], tokens of source and target, EOS included.
        source, left_out: what `open_pairs` finds, see data/splits.py.

    Raises InputError: see open_pairs.
    """

    source: str = ""
    left_out: Sequence[str] = ()

    def __init__(
        self,
        folder: str | Path,
        split: Split,
        source_language: str,
        target_language: str,
        pieces: str = "",
    ):
        super().__init__(folder, source_language, target_language, pieces)
        self.split = split
        source = self._open_tokens(source_language, check=True)
        target = self._open_tokens(target_language, check=True)
        if len(source) != len(target):
            raise InputError(
                f"{source.path} has {len(source)} sentences and {target.path} {len(target)}; "
                "expected as many, one pair each: make the folder again"
            )
        self._size = len(source)
        self._source_vocabulary = len(self.source_dictionary)
        self._target_vocabulary = len(self.target_dictionary)

    def _open_tokens(self, language: str, check: bool = False) -> MmapTokens:
        pair = f"{self.source_language}-{self.target_language}"
        return MmapTokens(self.folder / f"{self.split}.{pair}.{language}", check)

    @cached_property
    def _sides(self) -> tuple[MmapTokens, MmapTokens]:
        source = self._open_tokens(self.source_language)
        target = self._open_tokens(self.target_language)
        return source, target

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.stack([side.sizes for side in self._sides], axis=1)

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: np.ndarray, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Returns these pairs as arrays of a fixed shape (S, T).

        Args:
            indices: int [B], one pair per row; or [B, M], several pairs in each row, one after
                another. -1 is no pair.
        Returns:
            "source" int32 [B, S], tokens and EOS, then <pad>
            "target" int32 [B, T] likewise
            "previous" int32 [B, T], the decoder's input: EOS, and the target without its own EOS
            "source_segment" int32 [B, S] and "target_segment" int32 [B, T], only for `indices` [B,
                M]: 1, 2, … at the tokens of a row's first, second, … pair (column of `indices`), 0
                at padding
        Raises:
            ValueError: a row does not fit the shape.
            InputError: the tokens belong to another dictionary.
        """
        indices = _checked_indices(indices, len(self))
        present = indices >= 0
        chosen = indices[present]
        source_side, target_side = self._sides
        source = _sentences(source_side, chosen)
        target = _sentences(target_side, chosen)
        batch = _pair_batch(source, target, present, shape)
        self._check_ids(batch["source"], batch["target"])
        return batch

    def _check_ids(self, source: np.ndarray, target: np.ndarray) -> None:
        """Raises InputError if a token is in no dictionary: XLA would read another's embedding."""
        source_side, target_side = self._sides
        _check_ids(source, source_side.path, self._source_vocabulary)
        _check_ids(target, target_side.path, self._target_vocabulary)

    def references(self, unknown: str = SPECIALS[UNK]) -> list[str]:
        """Returns the target sentences, in order, for scoring.

        They are those of <split>.<language> if it is there, else the tokens decoded. Text that is
        split into pieces as the tokens are is joined.

        Raises InputError if the text has another number of lines, or a token of the split is in no
        dictionary.
        """
        source, target = self._sides
        self._check_ids(source.tokens, target.tokens)
        path = self.folder / f"{self.split}.{self.target_language}"
        if not path.exists():
            return [self.decode(target[index], unknown) for index in range(len(self))]

        lines = read_lines(path)
        if len(lines) != len(self):
            raise InputError(
                f"{path} has {len(lines)} lines, and there are {len(self)} pairs; "
                "make the folder again"
            )
        if self._is_split(lines):
            return [join_symbols(line.split(), self.pieces) for line in lines]
        return lines

    def _is_split(self, lines: list[str]) -> bool:
        """Returns whether lines of the target are its symbols, such as "Haus@@ tür".

        They are fairseq-preprocess' input then: its symbols are pieces, and each line gives the
        tokens of its sentence.
        """
        if self.tokenizer is not None or self.pieces == "words":
            return False
        _, target = self._sides
        for number, line in enumerate(lines):
            expected = target[number]
            symbols = line.split()
            if len(symbols) != len(expected) - 1:  # EOS is no symbol of the text
                return False
            tokens = [self.target_dictionary.index(symbol) for symbol in symbols]
            if tokens != expected[:-1].tolist():
                return False
        return True


def _checked_indices(indices: np.ndarray, size: int) -> np.ndarray:
    """Returns indices as int64; raises IndexError for one that is neither -1 nor below `size`."""
    indices = np.asarray(indices, np.int64)
    if indices.size and not -1 <= indices.min() <= indices.max() < size:
        raise IndexError(f"pairs {indices.min()} to {indices.max()} of {size}")
    return indices


def _check_ids(ids: np.ndarray, path: Path, vocabulary: int) -> None:
    """Raises InputError if a token of a file is not one of a dictionary of `vocabulary` symbols."""
    highest = ids.max(initial=0)
    if highest >= vocabulary or ids.min(initial=0) < 0:
        raise InputError(
            f"{path} has the token {highest}, and its dictionary {vocabulary} symbols; "
            "they do not belong together: make the folder again"
        )


def is_blank(line: str) -> bool:
    """Returns whether a line has only spaces, control and format characters: none are visible."""
    return all(_is_invisible(character) for character in line)


def _is_invisible(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) in ("Cc", "Cf")


def _encode_symbols(dictionary: Dictionary, line: str) -> np.ndarray:
    """Returns the tokens of a line of symbols with spaces between, int64 [tokens], EOS last."""
    ids = [dictionary.index(symbol) for symbol in line.split()]
    return np.array([*ids, EOS], np.int64)


def _symbols(dictionary: Dictionary, ids: Sequence[int], unknown: str) -> list[str]:
    """Returns the symbols of tokens up to the first EOS, without <s> and <pad>.

    `unknown` stands for <unk>.
    """
    flat = np.asarray(ids, np.int64).reshape(-1)  # also of [1, n], a batch of one sentence
    symbols = []
    for token in flat.tolist():
        if token == EOS:
            break
        if token == UNK:
            symbols.append(unknown)
        elif token not in (BOS, PAD):
            symbols.append(dictionary.symbols[token])
    return symbols


def join_symbols(symbols: Sequence[str], pieces: str) -> str:
    """Joins symbols to a sentence as fairseq's --remove-bpe does.

    `pieces` says what the symbols are, one of fairseq_format.PIECES.
    """
    if pieces == "sentencepiece":
        return "".join(symbols).replace("▁", " ").strip()
    sentence = " ".join(symbols)
    if pieces == "subword_nmt":
        return (sentence + " ").replace("@@ ", "").rstrip()
    return sentence


def read_lines(path: Path) -> list[str]:
    """Reads the lines of a UTF-8 file, without a byte order mark.

    Only \\n ends a line: text has other characters that Python takes for line ends.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 (byte {error.start}); convert it, or prepare the folder again"
        ) from error
    if lines[-1] == "":
        lines.pop()
    return lines


@dataclass(frozen=True)
class _Ragged:
    """n sentences of different sizes, somewhere in a flat array of tokens."""

    tokens: np.ndarray  # [any]
    starts: np.ndarray  # int64 [n]
    sizes: np.ndarray  # int [n]


def _sentences(tokens: MmapTokens, indices: np.ndarray) -> _Ragged:
    """Returns the sentences with these indices, int64 [n], of one side of a split."""
    return _Ragged(tokens.tokens, tokens.starts(indices), tokens.sizes[indices])


class _Rows:
    """Sentences laid out in the rows of an array [B, width], a row's one after another.

    Args:
        name: of the side, "source" or "target", for messages.
        sentences: as many as are `present`, in their order.
        present: bool [B], one sentence per row, or bool [B, M], up to M of them; its true entries
            say which row, and which column of M, the sentences belong to.
    Attributes:
        tokens: int32 [all tokens], of one sentence after the other.
        within: int64 [all tokens], the number of each in its sentence.
    Raises:
        ValueError: a row has more tokens than `width`.
    """

    def __init__(self, name: str, sentences: _Ragged, present: np.ndarray, width: int):
        self._shape = (len(present), width)
        self._entries = np.argwhere(present)
        self._sizes = sentences.sizes.astype(np.int64)
        ends = np.cumsum(self._sizes)
        starts = ends - self._sizes
        total = ends[-1] if len(ends) else 0
        self.within = np.arange(total) - np.repeat(starts, self._sizes)
        flat_indices = np.repeat(sentences.starts, self._sizes) + self.within
        self.tokens = sentences.tokens[flat_indices].astype(np.int32)

        rows = self._entries[:, 0]
        used = np.bincount(rows, self._sizes, len(present)).astype(np.int64)
        if used.max(initial=0) > width:
            row = int(used.argmax())
            raise ValueError(
                f"row {row} of a batch has {used[row]} tokens of {name}, "
                f"and the shape has {width} places"
            )

        # Where each token goes in the flattened array; a row's first sentence begins at column 0.
        row_starts = np.cumsum(used) - used
        columns = starts - row_starts[rows]
        self._destinations = np.repeat(rows * width + columns, self._sizes) + self.within

    def scatter(self, values: np.ndarray, fill: int) -> np.ndarray:
        """Returns int32 [B, width] with a value per token, and `fill` at padding."""
        array = np.full(self._shape, fill, np.int32)
        array.reshape(-1)[self._destinations] = values
        return array

    def segments(self) -> np.ndarray:
        """Returns int32 [B, width]: 1 at tokens of column 0 of `present`, 2 of column 1, …"""
        columns = self._entries[:, 1]
        return self.scatter(np.repeat(columns + 1, self._sizes), fill=0)


def _pair_batch(
    source: _Ragged, target: _Ragged, present: np.ndarray, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Returns what `TranslationPairs.batch` does, of the pairs that are `present`."""
    source_width, target_width = shape
    sources = _Rows("source", source, present, source_width)
    targets = _Rows("target", target, present, target_width)

    previous = np.empty_like(targets.tokens)
    previous[1:] = targets.tokens[:-1]
    previous[targets.within == 0] = EOS

    several_per_row = present.ndim == 2
    batch = {"source": sources.scatter(sources.tokens, fill=PAD)}
    if several_per_row:
        batch["source_segment"] = sources.segments()
    batch["target"] = targets.scatter(targets.tokens, fill=PAD)
    batch["previous"] = targets.scatter(previous, fill=PAD)
    if several_per_row:
        batch["target_segment"] = targets.segments()
    return batch


class SyntheticPairs:
    """A toy language that a small Transformer learns in a minute, with TranslationPairs' interface.

    Sentences have 3 to 12 of 40 words, drawn independently. The translation has them in reversed
    order, each replaced by a fixed one-to-one dictionary: "w7 w0 w1" becomes "v9 v0 v23". Both
    languages share one Dictionary.

    Args:
        size: pairs; by default 16,384 for training and 256 for the other splits.
    """

    WORDS = 40

    def __init__(self, split: Split, size: int | None = None, seed: int = 0):
        self.split = split
        self.seed = seed
        size = size or (16_384 if split == "train" else 256)
        self._arguments = (split, size, seed)
        self.source_language = "w"
        self.target_language = "v"
        self.tokenizer = None
        self.pieces = "words"
        symbols = [f"w{number}" for number in range(self.WORDS)]
        symbols += [f"v{number}" for number in range(self.WORDS)]
        self.source_dictionary = Dictionary(symbols)
        self.target_dictionary = self.source_dictionary

        rng = np.random.default_rng((seed, ("train", "valid", "test").index(split)))
        num_words = rng.integers(3, 13, size)
        self._sizes = (num_words + 1).astype(np.int32)  # and EOS
        self.lengths = np.stack([self._sizes, self._sizes], axis=1)
        self._starts = np.cumsum(self._sizes, dtype=np.int64) - self._sizes
        words = rng.integers(self.WORDS, size=int(self._sizes.sum()))
        self._set_tokens(words, ends=self._starts + num_words)

    def _set_tokens(self, words: np.ndarray, ends: np.ndarray) -> None:
        """Sets the tokens of both sides.

        Args:
            words: int [all tokens], numbers of the source's words; that in EOS' place is not used.
            ends: int64 [n], where the EOS of each sentence is.
        """
        first = len(self.source_dictionary) - 2 * self.WORDS  # the id of w0
        self._source = (first + words).astype(np.int32)

        # The word at position p of a sentence of n words comes from position n - 1 - p.
        backwards = np.repeat(self._starts + ends - 1, self._sizes) - np.arange(len(words))
        backwards = np.maximum(backwards, 0)  # EOS' place would be taken from before the first
        translated = self.WORDS + words * 9 % self.WORDS  # one to one: 9 and 40 are coprime
        self._target = (first + translated[backwards]).astype(np.int32)

        self._source[ends] = EOS
        self._target[ends] = EOS

    def __reduce__(self):
        return SyntheticPairs, self._arguments  # the worker makes the same sentences again

    def __len__(self) -> int:
        return len(self._sizes)

    def batch(self, indices: np.ndarray, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Returns what TranslationPairs.batch does."""
        indices = _checked_indices(indices, len(self))
        present = indices >= 0
        chosen = indices[present]
        source = _Ragged(self._source, self._starts[chosen], self._sizes[chosen])
        target = _Ragged(self._target, self._starts[chosen], self._sizes[chosen])
        return _pair_batch(source, target, present, shape)

    def references(self, unknown: str = SPECIALS[UNK]) -> list[str]:
        """Returns the target sentences as text, in order."""
        sentences = np.split(self._target, self._starts[1:])
        return [self.decode(sentence, unknown) for sentence in sentences]

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Turns text such as "w7 w0" into tokens, int64 [tokens] each, EOS last."""
        return [_encode_symbols(self.source_dictionary, line) for line in lines]

    def decode(self, ids: Sequence[int], unknown: str = SPECIALS[UNK]) -> str:
        """Turns tokens into text, up to the first EOS; <s> and <pad> are left out."""
        return join_symbols(_symbols(self.target_dictionary, ids, unknown), self.pieces)

    def vocabulary_files(self) -> dict[str, bytes]:
        """Returns the files, see Codec.vocabulary_files."""
        content = self.source_dictionary.dumps()
        return {"dict.w.txt": content, "dict.v.txt": content}


def has_split(data: str | Path, split: Split) -> bool:
    """Returns whether `open_pairs` would find a split in a folder that has a training split."""
    folder = Path(local_copy(str(data), *FILES)).expanduser()
    name = f"{split}.*-*.idx"
    return any([*folder.glob(name), *folder.glob(f"prepared/{name}")])


def _set_source(pairs: TranslationPairs, ending: str) -> None:
    """Sets `source` and `left_out` of a split.

    `ending` is that of the index files beside it: <source>-<target>.<source>.idx.
    """
    report = pairs.folder / "report.json"
    if report.exists():
        splits.set_source(pairs, read_json(report), evaluation=pairs.split != "train")
        return
    names = [path.name.removesuffix(f".{ending}") for path in pairs.folder.glob(f"*.{ending}")]
    # fairseq's own names: it calls further validation sets valid1, valid2, …
    pairs.source = pairs.split
    pairs.left_out = [name for name in sorted(names) if name not in ("train", "valid", "test")]


def _languages(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the (source, target) languages that the names of a folder's files say, sorted.

    The names are those of train.<source>-<target>.<source>.idx; a code may have a hyphen.
    """
    pairs = set()
    for name in names:
        match = re.fullmatch(r"train\.([^.]+)\.([^.]+)\.idx", name)
        if match is None:
            continue
        pair, source = match.groups()
        if pair.startswith(f"{source}-"):
            pairs.add((source, pair.removeprefix(f"{source}-")))
    return sorted(pairs)


def open_pairs(data: str | Path, split: Split, pieces: str = "") -> TranslationPairs:
    """Opens a split of the sentence pairs in a folder, or at a URL.

    The languages are those of train.<source>-<target>.<source>.idx.

    Args:
        data: made by make data or by fairseq-preprocess; or the text that make data has read, with
            its default output `prepared` in it.
        pieces: see Codec.
    Raises:
        InputError: no sentence pairs are there, or files are missing, damaged or do not belong
            together.
    """
    folder = Path(local_copy(str(data), *FILES)).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise InputError(f"{data} is a file; {_EXPECTED_FOLDER}")
        raise InputError(f"there is no folder {data}; {_EXPECTED_FOLDER}")

    for candidate in (folder, folder / "prepared"):
        if (candidate / "parts").exists() and not (candidate / "report.json").exists():
            raise InputError(
                f"{candidate} is not prepared to its end; give the same `make data` command again"
            )
        languages = _languages([path.name for path in candidate.glob("train.*")])
        if len(languages) > 1:
            listed = ", ".join("-".join(pair) for pair in languages)
            raise InputError(
                f"{candidate} has the language pairs {listed}; keep them in folders of their own"
            )
        if languages:
            source, target = languages[0]
            return _open_split(candidate, split, source, target, pieces)
    raise _no_pairs(folder, data)


def _open_split(
    folder: Path, split: Split, source: str, target: str, pieces: str
) -> TranslationPairs:
    """Opens a split of a folder that has train.<source>-<target>.<source>.idx."""
    ending = f"{source}-{target}.{source}.idx"
    known = ("train", "valid", "test")
    found = [name for name in known if (folder / f"{name}.{ending}").exists()]
    if split not in found:
        raise InputError(
            f"{folder} has no {split} split, only {', '.join(found)}; "
            f"make the folder again, with {split} text"
        )
    pairs = TranslationPairs(folder, split, source, target, pieces)
    _set_source(pairs, ending)
    return pairs


def _no_pairs(folder: Path, data: str | Path) -> InputError:
    """Returns the error for a folder without sentence pairs, with what to do about it."""
    names = sorted(path.name for path in folder.iterdir())
    found = ", ".join(names[:10]) or "nothing"
    remedy = _EXPECTED_FOLDER
    for name in names:
        if name.startswith("train.") or Path(name).suffix == ".parquet":
            remedy = f"it looks like text: prepare it first, {PREPARE}{data}"
    return InputError(
        f"{data} has no train.<source>-<target>.<source>.idx, found {found}; {remedy}"
    )
