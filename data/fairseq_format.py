"""fairseq's files: dict.txt, and .idx and .bin of `fairseq-preprocess --dataset-impl mmap`.

They are read and written as fairseq 0.12 does (fairseq/data/dictionary.py and
fairseq/data/indexed_dataset.py, at https://github.com/facebookresearch/fairseq).
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from errors import InputError

# Ids of the SPECIALS.
BOS = 0
PAD = 1
EOS = 2
UNK = 3
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
OVERWRITE = "#fairseq:overwrite"

# What the symbols of a dictionary are; fairseq's --remove-bpe. See Dictionary.pieces.
PIECES = ("words", "subword_nmt", "sentencepiece")
NUMBERS = 1000  # symbols from which on a dictionary of numbers alone is one of ids
# Shares of the symbols that have a mark of pieces.
CERTAIN = 0.25  # from here on a mark is no text, even that of a single symbol
SURE = 0.05  # from here on the symbols are pieces, if few have the other mark
NOISE = 0.01  # up to here a mark is text

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the type, sentences: 26 bytes
DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
    9: np.uint32,
    10: np.uint64,
}


class Dictionary:
    """Symbols and their ids: <s> 0, <pad> 1, </s> 2, <unk> 3, then the lines of dict.txt from 4 on.

    Attributes:
        symbols: list of str, the four specials first.
        counts: list of int, how often each occurs in the training text; 1 for the specials, as
            fairseq has it.
    """

    def __init__(self, symbols: Iterable[str] = (), counts: Iterable[int] | None = None):
        symbols = list(symbols)
        if counts is None:
            counts = [1] * len(symbols)
        self.symbols = [*SPECIALS, *symbols]
        self.counts = [1] * len(SPECIALS) + [int(count) for count in counts]
        assert len(self.counts) == len(self.symbols)
        # The later one of two equal symbols counts (fairseq's flag #fairseq:overwrite).
        self._ids = {symbol: number for number, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    def __eq__(self, other) -> bool:
        return isinstance(other, Dictionary) and self.symbols == other.symbols

    __hash__ = None

    def index(self, symbol: str) -> int:
        """Returns its id, or that of <unk> if it is not in the dictionary."""
        return self._ids.get(symbol, UNK)

    def pieces(self, name: str) -> str:
        """Returns which of PIECES the symbols are, by the marks that most of them have.

        These are "▁" in front of a word's first piece (sentencepiece), "@@" after each but the last
        (subword-nmt), or none (words). A mark on a single symbol, or on one of a hundred, is text.

        Args:
            name: the dictionary's, for messages.

        Raises InputError where the marks are of both sorts, or too few to tell, and for pieces of
        other sorts.
        """
        symbols = []
        for symbol in self.symbols[len(SPECIALS) :]:
            if not symbol.startswith("madeupword"):  # which fill the dictionary up
                symbols.append(symbol)
        marked = {
            "sentencepiece": sum(symbol.startswith("▁") and len(symbol) > 1 for symbol in symbols),
            "subword_nmt": sum(symbol.endswith("@@") and len(symbol) > 2 for symbol in symbols),
        }
        fewer, more = sorted(marked, key=marked.get)
        count = marked[more]
        share = count / max(len(symbols), 1)

        if share < CERTAIN and (count <= 1 or share <= NOISE):
            other = _other_pieces(symbols)
            if not other:
                return "words"
            raise InputError(
                f"{name} has {other}, which cannot be joined to words here: BLEU would be of "
                "pieces, and a translation would be made of them; --pieces words takes each symbol "
                "for a word"
            )
        if share >= SURE and marked[fewer] * 3 <= count:
            return more
        raise InputError(
            f"{name} has {len(symbols)} symbols, "
            f"{marked['sentencepiece']} that begin with ▁ "
            f"and {marked['subword_nmt']} that end with @@: "
            "whether they are pieces of sentencepiece, pieces of subword-nmt or words "
            f"cannot be told; say it with --pieces {', '.join(PIECES[:-1])} or {PIECES[-1]}"
        )

    @classmethod
    def load(cls, path: str | Path) -> "Dictionary":
        """Reads dict.txt: a line is a symbol, a space and its count.

        Raises InputError naming the line.
        """
        expected = "expected fairseq's dictionary"
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}; {expected}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 (byte {error.start}); {expected}") from error
        if lines[-1] == "":
            lines.pop()

        symbols = []
        counts = []
        seen = set(SPECIALS)
        for number, line in enumerate(lines, start=1):
            symbol, space, count = line.rstrip().rpartition(" ")
            replaces_first = count == OVERWRITE
            if replaces_first:
                symbol, space, count = symbol.rpartition(" ")
            if not space or not count.lstrip("-").isdecimal():
                raise InputError(
                    f"{path} line {number} is {line[:60]!r}; "
                    "expected a symbol, a space and its count"
                )
            if symbol in seen and not replaces_first:
                raise InputError(
                    f"{path} line {number} has the symbol {symbol!r} a second time; remove it, or "
                    f"write {OVERWRITE} at the line's end if it is to replace the first"
                )
            seen.add(symbol)
            symbols.append(symbol)
            counts.append(int(count))
        return cls(symbols, counts)

    def dumps(self) -> bytes:
        """Returns the content of dict.txt, without the specials."""
        seen = set(SPECIALS)
        lines = []
        first = len(SPECIALS)
        for symbol, count in zip(self.symbols[first:], self.counts[first:], strict=True):
            line = f"{symbol} {count}"
            if symbol in seen:
                line += f" {OVERWRITE}"
            lines.append(f"{line}\n")
            seen.add(symbol)
        return "".join(lines).encode()

    def save(self, path: str | Path) -> None:
        """Writes dict.txt."""
        Path(path).write_bytes(self.dumps())


def _other_pieces(symbols: list[str]) -> str:
    """Returns what these symbols are if they are pieces of another sort than PIECES, else ""."""
    most_by_chance = max(1, CERTAIN * len(symbols))

    byte_level = sum(symbol.startswith("Ġ") for symbol in symbols)
    if byte_level > most_by_chance:
        return "symbols that begin with Ġ, as byte-level encoding has them"

    word_piece = sum(symbol.startswith("##") for symbol in symbols)
    if word_piece > most_by_chance:
        return "symbols that begin with ##, as WordPiece has them"

    word_ends = sum(symbol.endswith("</w>") for symbol in symbols)
    if word_ends > most_by_chance:
        return "symbols that end with </w>"

    if len(symbols) >= NUMBERS and all(symbol.isdecimal() for symbol in symbols):
        return "numbers alone as symbols, as GPT-2's encoding has them"
    return ""


class MmapTokens:
    """Sentences of one language, memory-mapped from <prefix>.idx and <prefix>.bin.

    Args:
        check: whether every sentence must lie in the .bin file, for which the whole index is read
            (12 bytes per sentence).

    Attributes:
        path: of the .bin file.
        sizes: int32 [n], tokens of each sentence, EOS included.
        tokens: [all tokens], the .bin file.

    Raises InputError if a file is missing, truncated or of another format.
    """

    def __init__(self, prefix: str | Path, check: bool = True):
        index = Path(f"{prefix}.idx")
        self.path = Path(f"{prefix}.bin")
        for path in (index, self.path):
            if not path.is_file():
                raise InputError(
                    f"there is no {path}; "
                    "expected an .idx and a .bin file, as fairseq-preprocess writes"
                )

        dtype, count = _read_header(index)
        self.sizes = _map(index, np.int32, HEADER.size, count)
        self._pointers = _map(index, np.int64, HEADER.size + 4 * count, count)  # in bytes
        if check and count:
            self._check(index, dtype)
        num_tokens = self.path.stat().st_size // dtype.itemsize
        self.tokens = _map(self.path, dtype, 0, num_tokens)

    def _check(self, index: Path, dtype: np.dtype) -> None:
        """Raises InputError if a sentence does not lie in the .bin file."""
        is_odd = (self._pointers % dtype.itemsize).any()
        if self.sizes.min() < 0 or self._pointers.min() < 0 or is_odd:
            raise InputError(
                f"{index} is damaged: it has sizes or places that cannot be; make it again"
            )
        ends = self._pointers + self.sizes.astype(np.int64) * dtype.itemsize
        expected = int(ends.max())
        found = self.path.stat().st_size
        if found < expected:
            raise InputError(
                f"{self.path} is truncated: {found} bytes, expected {expected}; make it again"
            )

    def __len__(self) -> int:
        return len(self.sizes)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Returns where these sentences begin in `tokens`, int64."""
        return self._pointers[indices] // self.tokens.itemsize

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns a sentence, int64 [tokens]."""
        start = int(self._pointers[index]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.sizes[index])].astype(np.int64)


def _read_header(index: Path) -> tuple[np.dtype, int]:
    """Returns the type of the tokens and the number of sentences of an .idx file.

    Raises InputError where it is of another format, or has another size than its sentences need.
    """
    with open(index, "rb") as file:
        header = file.read(HEADER.size)
    if not header.startswith(MAGIC):
        raise InputError(
            f"{index} begins with {header[:9]!r}; "
            "a .idx file of --dataset-impl mmap begins with MMIDIDX: "
            "preprocess with --dataset-impl mmap"
        )
    if len(header) < HEADER.size:
        raise InputError(
            f"{index} is truncated: {len(header)} bytes, expected {HEADER.size} or more"
        )

    _, version, code, count = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        codes = ", ".join(f"{known} {np.dtype(dtype)}" for known, dtype in DTYPES.items())
        raise InputError(
            f"{index} has version {version} and type {code}; "
            f"expected version 1 and a type of {codes}"
        )
    found = index.stat().st_size
    expected = HEADER.size + 12 * count
    if found != expected:
        raise InputError(
            f"{index} has {found} bytes; expected {expected} for {count} sentences: make it again"
        )
    return np.dtype(DTYPES[code]), count


def _map(path: Path, dtype, offset: int, count: int) -> np.ndarray:
    """Memory-maps `count` numbers of a file from byte `offset` on."""
    if not count:  # which cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,)).view(np.ndarray)


def token_dtype(vocabulary: int) -> np.dtype:
    """Returns the type for ids below `vocabulary`: uint16 where fairseq takes it, else int32."""
    return np.dtype(np.uint16 if vocabulary < 65500 else np.int32)


def write_mmap(prefix: str | Path, tokens: np.ndarray, sizes: np.ndarray, vocabulary: int) -> None:
    """Writes <prefix>.bin and <prefix>.idx.

    Args:
        tokens: [sum of sizes], the sentences one after another, each with its EOS.
        sizes: [n], tokens of each sentence.
        vocabulary: length of the dictionary, which decides the type.
    """
    assert len(tokens) == np.sum(sizes, dtype=np.int64)
    dtype = token_dtype(vocabulary)
    with open(f"{prefix}.bin", "wb") as file:
        file.write(np.ascontiguousarray(tokens, dtype))
    write_index(f"{prefix}.idx", sizes, dtype)


def write_index(path: str | Path, sizes: np.ndarray, dtype: np.dtype) -> None:
    """Writes an .idx file for sentences that lie one after another in the .bin file."""
    sizes = np.ascontiguousarray(sizes, np.int32)
    pointers = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], out=pointers[1:], dtype=np.int64)
    pointers *= dtype.itemsize
    codes = {np.dtype(known): code for code, known in DTYPES.items()}
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, codes[np.dtype(dtype)], len(sizes)))
        file.write(sizes)
        file.write(pointers)
