"""Sentence pairs to translate: a prepared folder (or one made by fairseq-preprocess), and a toy language.

Parallel text is turned into such a folder once, before training, by data/prepare/wmt.py (make data DATASET=wmt18).
The folder has fairseq-preprocess' own layout, so fairseq-train takes it as it is:

    dict.en.txt dict.de.txt             symbols with their counts
    train.en-de.en.bin .idx             tokens of the source, memory-mapped; train.en-de.de.… those of the target
    valid.en-de.…  test.en-de.…
    valid.en valid.de …                 text, against which translations are scored; only from make data
    tokenizer.json                      byte-pair encoding, for text to translate; only from make data

Sentence pairs have `lengths` int32 [n, 2] and `batch(indices, shape)` instead of `example`, see TranslationPairs.
Special symbols are fairseq's: <s> 0, <pad> 1, </s> 2, which ends every sentence, and <unk> 3.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

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
FILES = ("*.idx", "*.bin", "*dict.*", "*tokenizer.json", "*report.json", "*valid.*", "*test.*", *FINISHED)  # of a URL


class Codec:
    """The dictionaries and the tokenizer of a folder: they turn sentences into tokens and tokens into sentences.

    Attributes:
        source_language, target_language: such as "en" and "de".
        source_dictionary, target_dictionary: Dictionary; one and the same object if their files are equal.
        tokenizer: tokenizers.Tokenizer of both languages, or None in a folder of fairseq-preprocess.
        pieces: what the target's symbols are: one of fairseq_format.PIECES, by the dictionary unless it is given.

    Nothing of these is pickled: a worker process reads the files itself. They raise InputError if they are not there.
    """

    def __init__(self, folder: str | Path, source_language: str, target_language: str, pieces: str = ""):
        self.folder = Path(folder)
        self.source_language, self.target_language = source_language, target_language
        self._given_pieces = pieces

    @cached_property
    def source_dictionary(self) -> Dictionary:
        return Dictionary.load(self.folder / f"dict.{self.source_language}.txt")

    @cached_property
    def target_dictionary(self) -> Dictionary:
        target = Dictionary.load(self.folder / f"dict.{self.target_language}.txt")
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
        opened = {name for name in self.__dict__ if isinstance(getattr(type(self), name, None), cached_property)}
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Turns text of the source language into tokens, int64 [tokens] each, EOS last.

        Without a tokenizer (folders of fairseq-preprocess) the lines must be split as the folder's text was, into
        symbols with spaces between; symbols that the dictionary does not have become <unk>. A line in which nothing
        is visible (see `is_blank`) is EOS alone.
        """
        lines = ["" if is_blank(line) else line for line in lines]
        if self.tokenizer is None:
            index = self.source_dictionary.index
            return [np.array([*map(index, line.split()), EOS], np.int64) for line in lines]
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(lines)]
        return [np.append(self._of_tokenizer[one], EOS) for one in ids]

    @cached_property
    def _of_tokenizer(self) -> np.ndarray:
        """Maps each id of the tokenizer to the dictionary's: the same in a folder of make data."""
        most = max(self.tokenizer.get_vocab().values())  # above the number of symbols where ids are left out
        symbols = (self.tokenizer.id_to_token(number) for number in range(most + 1))
        return np.array([self.source_dictionary.index(symbol) for symbol in symbols], np.int64)

    def decode(self, ids: Sequence[int], unknown: str = SPECIALS[UNK]) -> str:
        """Turns tokens of the target language into text, up to the first EOS.

        Pieces are joined as fairseq's --remove-bpe does it: see `pieces`. <s> and <pad> are left out; <unk> is
        written, as fairseq-generate does, or what `unknown` is.
        """
        return join_symbols(_symbols(self.target_dictionary, ids, unknown), self.pieces)

    @cached_property
    def pieces(self) -> str:
        given = self._given_pieces
        return given or self.target_dictionary.pieces(str(self.folder / f"dict.{self.target_language}.txt"))

    def vocabulary_files(self) -> dict[str, bytes]:
        """Returns the files that a `Codec` needs in another folder: name -> content."""
        names = [f"dict.{language}.txt" for language in (self.source_language, self.target_language)]
        names += ["tokenizer.json"] * (self.folder / "tokenizer.json").exists()
        return {name: (self.folder / name).read_bytes() for name in names}

    def sentences(self, lines: Sequence[str]) -> "Sentences":
        """Returns text of the source language as a data set of sentences to translate."""
        return Sentences(self, lines)


class Sentences:
    """Sentences of the source language, without translations: `lengths` int32 [n, 1], `batch`, `decode`.

    `unknown_share` is how many of the words are not in the dictionary, 0 to 1.
    """

    def __init__(self, codec: Codec, lines: Sequence[str]):
        tokens = codec.encode(lines)
        sizes = [len(one) for one in tokens]
        self._tokens = np.concatenate([*tokens, np.empty(0, np.int64)])
        self._starts = np.cumsum(sizes, dtype=np.int64) - sizes
        self.lengths = np.array(sizes, np.int32).reshape(-1, 1)
        self.decode = codec.decode
        words = self._tokens != EOS
        self.unknown_share = float((self._tokens[words] == UNK).mean()) if words.any() else 0.0

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray, shape: tuple[int]) -> dict[str, np.ndarray]:
        """Returns {"source": int32 [B, S]}: tokens and EOS, then <pad>; the row of index -1 is empty."""
        there = np.asarray(indices) >= 0
        indices = np.asarray(indices)[there]
        return {
            "source": _rows(_Ragged(self._tokens, self._starts[indices], self.lengths[indices, 0]), there, shape[0])
        }


class Chosen:
    """The examples of a data set at some places: `lengths`, `batch` and their number."""

    def __init__(self, examples, indices: np.ndarray):
        self.examples, self.indices = examples, np.asarray(indices, np.int64)
        self.lengths = examples.lengths[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: np.ndarray, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Returns the batch of the data set's examples at these of the places; -1 is none."""
        indices = np.asarray(indices, np.int64)
        return self.examples.batch(np.where(indices < 0, -1, self.indices[indices]), shape)


class TranslationPairs(Codec):
    """One split of a folder of binarised sentence pairs, and its `Codec`.

    Attributes:
        lengths: int32 [n, 2], tokens of source and target, EOS included.
        source, left_out: what `open_pairs` finds, see data/splits.py.

    Raises InputError: see open_pairs.
    """

    source: str = ""
    left_out: Sequence[str] = ()

    def __init__(self, folder: str | Path, split: Split, source_language: str, target_language: str, pieces: str = ""):
        super().__init__(folder, source_language, target_language, pieces)
        self.split = split
        source, target = (self._tokens(language, check=True) for language in (source_language, target_language))
        if len(source) != len(target):
            counts = f"{len(source)} sentences and {target.path} {len(target)}"
            raise InputError(f"{source.path} has {counts}; expected as many, one pair each: make the folder again")
        self._size = len(source)
        self._vocabulary = len(self.source_dictionary), len(self.target_dictionary)

    def _tokens(self, language: str, check: bool = False) -> MmapTokens:
        pair = f"{self.source_language}-{self.target_language}"
        return MmapTokens(self.folder / f"{self.split}.{pair}.{language}", check)

    @cached_property
    def _sides(self) -> tuple[MmapTokens, MmapTokens]:
        return self._tokens(self.source_language), self._tokens(self.target_language)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.stack([side.sizes for side in self._sides], axis=1)

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: np.ndarray, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Returns these pairs as arrays of a fixed shape (S, T).

        Args:
            indices: int [B], a pair a row; or [B, M], several pairs in each row, one after another. -1 is no pair.

        Returns: "source" int32 [B, S], tokens and EOS, then <pad>; "target" int32 [B, T] likewise; "previous" int32
        [B, T], the decoder's input: EOS, and the target without its own EOS. With several pairs a row also
        "source_segment" int32 [B, S] and "target_segment" int32 [B, T]: 1, 2, … for the places of a row's first,
        second, … pair (column of `indices`), 0 for padding.
        Raises ValueError if a row does not fit the shape, InputError if the tokens belong to another dictionary.
        """
        indices = np.asarray(indices, np.int64)
        if indices.size and not -1 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"pairs {indices.min()} to {indices.max()} of {len(self)}")
        there = indices >= 0
        source, target = (_Ragged(s.tokens, s.starts(indices[there]), s.sizes[indices[there]]) for s in self._sides)
        batch = _batch(source, target, there, shape)
        self._check_ids(batch["source"], batch["target"])
        return batch

    def _check_ids(self, source: np.ndarray, target: np.ndarray) -> None:
        """Raises InputError if a token is in no dictionary: XLA would take another in its place."""
        for ids, side, vocabulary in zip((source, target), self._sides, self._vocabulary, strict=True):
            highest = ids.max(initial=0)
            if highest >= vocabulary or ids.min(initial=0) < 0:
                what = f"the token {highest}, and its dictionary {vocabulary} symbols"
                raise InputError(f"{side.path} has {what}; they do not belong together: make the folder again")

    def references(self, unknown: str = SPECIALS[UNK]) -> list[str]:
        """Returns the target sentences, in order, for scoring: <split>.<language> if it is there, else tokens decoded.
        Text that is split into pieces as the tokens are is joined.

        Raises InputError if the text has another number of lines, or a token of the split is in no dictionary.
        """
        self._check_ids(*(side.tokens for side in self._sides))
        path = self.folder / f"{self.split}.{self.target_language}"
        if not path.exists():
            return [self.decode(self._sides[1][index], unknown) for index in range(len(self))]
        lines = read_lines(path)
        if len(lines) != len(self):
            raise InputError(f"{path} has {len(lines)} lines, and there are {len(self)} pairs; make the folder again")
        return [join_symbols(line.split(), self.pieces) for line in lines] if self._is_split(lines) else lines

    def _is_split(self, lines: list[str]) -> bool:
        """Returns whether these lines of the target are its symbols (fairseq-preprocess' input, Haus@@ tür): where
        these are pieces, and each line gives the tokens of its sentence."""
        if self.tokenizer is not None or self.pieces == "words":
            return False
        index = self.target_dictionary.index
        for number, line in enumerate(lines):
            symbols = line.split()
            tokens = self._sides[1][number]
            if len(symbols) != len(tokens) - 1 or [*map(index, symbols)] != tokens[:-1].tolist():
                return False
        return True


def is_blank(line: str) -> bool:
    """Returns whether nothing in a line is visible: no characters but spaces, control and format characters."""
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in line)


def _symbols(dictionary: Dictionary, ids: Sequence[int], unknown: str) -> list[str]:
    ids = np.asarray(ids, np.int64).reshape(-1)
    ids = ids[: np.argmax(ids == EOS)] if (ids == EOS).any() else ids
    found = []
    for number in ids.tolist():
        if number not in (BOS, PAD):
            found.append(unknown if number == UNK else dictionary.symbols[number])
    return found


def join_symbols(symbols: Sequence[str], pieces: str) -> str:
    """Joins symbols to a sentence, as fairseq's --remove-bpe; `pieces` is one of fairseq_format.PIECES."""
    if pieces == "sentencepiece":
        return "".join(symbols).replace("▁", " ").strip()
    sentence = " ".join(symbols)
    return (sentence + " ").replace("@@ ", "").rstrip() if pieces == "subword_nmt" else sentence


def read_lines(path: Path) -> list[str]:
    """Reads the lines of a UTF-8 file. Only \\n ends a line: text has other signs that Python takes for line ends."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")  # without a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 (byte {error.start}); convert it, or prepare the folder again"
        ) from error
    return lines[:-1] if lines[-1] == "" else lines


class _Ragged(NamedTuple):
    """n sentences of different sizes, somewhere in a flat array of tokens."""

    tokens: np.ndarray  # [any]
    starts: np.ndarray  # int64 [n]
    sizes: np.ndarray  # int [n]


def _rows(side: _Ragged, there: np.ndarray, width: int) -> np.ndarray:
    """Returns one side of `_batch`, one sentence per row."""
    return _batch(side, side, there, (width, width))["source"]


def _batch(source: _Ragged, target: _Ragged, there: np.ndarray, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Puts sentences into rows, in the order of the places that are `there`, bool [B] or [B, M]."""
    places = np.argwhere(there)
    rows = places[:, 0]
    batch = {}
    for name, side, width in (("source", source, shape[0]), ("target", target, shape[1])):
        sizes = side.sizes.astype(np.int64)
        ends = np.cumsum(sizes)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)  # 0, 1, … in each sentence
        tokens = side.tokens[np.repeat(side.starts, sizes) + within].astype(np.int32)
        # A row's sentences lie one after another: the first begins at 0.
        used = np.bincount(rows, sizes, len(there)).astype(np.int64)
        if used.max(initial=0) > width:
            row = int(used.argmax())
            raise ValueError(f"row {row} of a batch has {used[row]} tokens of {name}, and the shape has {width} places")
        before = ends - sizes - (np.cumsum(used) - used)[rows]
        to = np.repeat(rows * width + before, sizes) + within

        def spread(values: np.ndarray, to=to, width=width, fill: int = PAD) -> np.ndarray:
            array = np.full((len(there), width), fill, np.int32)
            array.reshape(-1)[to] = values
            return array

        batch[name] = spread(tokens)
        if name == "target":
            previous = np.empty_like(tokens)
            previous[1:] = tokens[:-1]
            previous[within == 0] = EOS
            batch["previous"] = spread(previous)
        if there.ndim == 2:
            batch[f"{name}_segment"] = spread(np.repeat(places[:, 1] + 1, sizes), fill=0)
    return batch


class SyntheticPairs:
    """A toy language that a small Transformer learns in a minute: see TranslationPairs for the interface.

    Sentences have 3 to 12 of 40 words, drawn independently. The translation has them in reversed order, each replaced
    by a fixed one-to-one dictionary: "w7 w0 w1" becomes "v9 v0 v23". Both languages share one Dictionary.

    Args:
        size: pairs; 16,384 for training and 256 for the other splits by default.
    """

    WORDS = 40

    def __init__(self, split: Split, size: int | None = None, seed: int = 0):
        self.split, self.seed = split, seed
        size = size or (16_384 if split == "train" else 256)
        self.source_language, self.target_language, self.tokenizer, self.pieces = "w", "v", None, "words"
        words = [f"{letter}{number}" for letter in "wv" for number in range(self.WORDS)]
        self.source_dictionary = self.target_dictionary = Dictionary(words)
        self._arguments = (split, size, seed)

        rng = np.random.default_rng((seed, ("train", "valid", "test").index(split)))
        sizes = rng.integers(3, 13, size)
        self._sizes = (sizes + 1).astype(np.int32)  # and EOS
        self.lengths = np.stack([self._sizes, self._sizes], axis=1)
        self._starts = np.cumsum(self._sizes, dtype=np.int64) - self._sizes
        first = len(self.source_dictionary) - len(words)
        words = rng.integers(self.WORDS, size=int(self._sizes.sum()))
        self._source = (first + words).astype(np.int32)
        ends = self._starts + sizes
        # Place p of a sentence of n words takes place n - 1 - p.
        backwards = np.repeat(self._starts + ends - 1, self._sizes) - np.arange(len(words))
        translated = self.WORDS + words * 9 % self.WORDS  # one to one: 9 and 40 have no common divisor
        self._target = (first + translated[np.maximum(backwards, 0)]).astype(np.int32)
        self._source[ends] = self._target[ends] = EOS

    def __reduce__(self):
        return SyntheticPairs, self._arguments  # the worker makes the same sentences again

    def __len__(self) -> int:
        return len(self._sizes)

    def batch(self, indices: np.ndarray, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Returns what TranslationPairs.batch does."""
        indices = np.asarray(indices, np.int64)
        if indices.size and not -1 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"pairs {indices.min()} to {indices.max()} of {len(self)}")
        there = indices >= 0
        starts, sizes = self._starts[indices[there]], self._sizes[indices[there]]
        return _batch(_Ragged(self._source, starts, sizes), _Ragged(self._target, starts, sizes), there, shape)

    def references(self, unknown: str = SPECIALS[UNK]) -> list[str]:
        """Returns the target sentences as text, in order."""
        sentences = np.split(self._target, self._starts[1:])
        return [self.decode(sentence, unknown) for sentence in sentences]

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Turns text such as "w7 w0" into tokens, int64 [tokens] each, EOS last."""
        return [np.array([*map(self.source_dictionary.index, line.split()), EOS], np.int64) for line in lines]

    def decode(self, ids: Sequence[int], unknown: str = SPECIALS[UNK]) -> str:
        """Turns tokens into text, up to the first EOS; <s> and <pad> are left out."""
        return join_symbols(_symbols(self.target_dictionary, ids, unknown), self.pieces)

    def vocabulary_files(self) -> dict[str, bytes]:
        """Returns the files, see Codec.vocabulary_files."""
        return {f"dict.{language}.txt": self.source_dictionary.dumps() for language in "wv"}


def has_split(data: str | Path, split: Split) -> bool:
    """Returns whether `open_pairs` would find this split in a folder that has a training split."""
    folder = Path(local_copy(str(data), *FILES)).expanduser()
    return any([*folder.glob(f"{split}.*-*.idx"), *folder.glob(f"prepared/{split}.*-*.idx")])


def _set_source(pairs: TranslationPairs, index: str) -> None:
    """Sets `source` and `left_out` of a split whose folder has files of sentence pairs that end with `index`."""
    if (pairs.folder / "report.json").exists():
        splits.set_source(pairs, read_json(pairs.folder / "report.json"), evaluation=pairs.split != "train")
        return
    names = sorted(path.name.removesuffix(f".{index}") for path in pairs.folder.glob(f"*.{index}"))
    pairs.source = pairs.split  # fairseq's own names: it calls further validation sets valid1, valid2, …
    pairs.left_out = [name for name in names if name not in ("train", "valid", "test")]


def _languages(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of languages of files train.<source>-<target>.<source>.idx; a code may have a hyphen."""
    pairs = set()
    for name in names:
        match = re.fullmatch(r"train\.([^.]+)\.([^.]+)\.idx", name)
        if match and match[1].startswith(f"{match[2]}-"):
            pairs.add((match[2], match[1].removeprefix(f"{match[2]}-")))
    return sorted(pairs)


def open_pairs(data: str | Path, split: Split, pieces: str = "") -> TranslationPairs:
    """Opens a split of the sentence pairs in a folder, or at a URL, made by make data (or the text it was made from,
    with the default output `prepared` in it) or by fairseq-preprocess. The languages are those of
    train.<source>-<target>.<source>.idx. `pieces`: see Codec.

    Raises InputError: nothing of the kind is there, or files are missing, damaged or do not belong together.
    """
    folder = Path(local_copy(str(data), *FILES)).expanduser()
    made = f"expected one made by `{PREPARE}…` or by fairseq-preprocess"
    if not folder.is_dir():
        what = f"{data} is a file" if folder.exists() else f"there is no folder {data}"
        raise InputError(f"{what}; {made}")
    for candidate in (folder, folder / "prepared"):
        if (candidate / "parts").exists() and not (candidate / "report.json").exists():
            raise InputError(f"{candidate} is not prepared to its end; give the same `make data` command again")
        languages = _languages([path.name for path in candidate.glob("train.*")])
        if len(languages) > 1:
            listed = ", ".join("-".join(pair) for pair in languages)
            raise InputError(f"{candidate} has the language pairs {listed}; keep them in folders of their own")
        if languages:
            source, target = languages[0]
            index = f"{source}-{target}.{source}.idx"
            found = [name for name in ("train", "valid", "test") if (candidate / f"{name}.{index}").exists()]
            if split not in found:
                has = f"no {split} split, only {', '.join(found)}"
                raise InputError(f"{candidate} has {has}; make the folder again, with {split} text")
            pairs = TranslationPairs(candidate, split, source, target, pieces)
            _set_source(pairs, index)
            return pairs
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    text = any(path.name.startswith("train.") or path.suffix == ".parquet" for path in folder.iterdir())
    what = f"; it looks like text: prepare it first, {PREPARE}{data}" if text else f"; {made}"
    raise InputError(f"{data} has no train.<source>-<target>.<source>.idx, found {found}{what}")
