"""Text for pretraining: rows of tokens in a prepared folder, and a small made-up language.

Plain text is turned into such a folder once, before training, by data/prepare/text.py (make data
DATASET=text):

    tokenizer/               of transformers: AutoTokenizer.from_pretrained(folder / "tokenizer")
    train.tokens.npy         uint16 or uint32 [tokens]: the rows one after another, without special
                             tokens around them
    train.rows.npy           int64 [rows + 1]: where each row begins, and the end of the last
    train.sentences.npy      int32 [sentences]: where each sentence begins, counted from the
                             beginning of its row
    train.row_sentences.npy  int64 [rows + 1]: where the sentences of each row begin in
                             train.sentences.npy
    valid.…                  likewise
    report.json              flags, counts; written last

A row is what fits: whole sentences, one after another, until the next does not fit (FULL-SENTENCES
of Liu et al. 2019, "RoBERTa", section 4.2, https://arxiv.org/abs/1907.11692; fairseq's
--sample-break-mode complete). A sentence longer than a row is cut. What becomes of a row is up to
data/pretraining.py.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from tokenizers import AddedToken
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    DistilBertTokenizer,
    PreTrainedTokenizerBase,
    RobertaTokenizer,
    XLNetTokenizer,
)

from data import splits
from data.prepare.files import read_json
from data.remote import FINISHED, local_copy
from data.vocabulary import BERT_SPECIALS, KINDS, MAX_TOKENS, ROBERTA_SPECIALS, XLNET_SPECIALS
from errors import InputError

__all__ = ["Packed", "SyntheticText", "Text", "capacity", "open_text", "pack_rows"]

Split = Literal["train", "valid"]
PREPARE = "make data DATASET=text DATA="
ARRAYS = ("tokens", "rows", "sentences", "row_sentences")


class Packed(NamedTuple):
    """Rows of tokens, as in the files of a prepared folder (see the top)."""

    tokens: np.ndarray
    rows: np.ndarray
    sentences: np.ndarray
    row_sentences: np.ndarray

    def __len__(self) -> int:
        return len(self.rows) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a row, see Text.row."""
        start, end = self.rows[index : index + 2]
        first, last = self.row_sentences[index : index + 2]
        return self.tokens[start:end], self.sentences[first:last]

    def upto(self, rows: int) -> "Packed":
        """Returns the first `rows` rows."""
        return Packed(
            tokens=self.tokens[: self.rows[rows]],
            rows=self.rows[: rows + 1],
            sentences=self.sentences[: self.row_sentences[rows]],
            row_sentences=self.row_sentences[: rows + 1],
        )


def capacity(length: int, pairs: bool) -> int:
    """Returns the tokens of a row without the special ones of <cls> A <sep>, or of <cls> A <sep> B
    <sep>."""
    return length - (3 if pairs else 2)


def pack_rows(
    tokens: np.ndarray, sizes: np.ndarray, documents: np.ndarray, room: int, separator: int | None
) -> tuple[Packed, int]:
    """Puts sentences into rows, in order; a row takes the next sentence as long as it fits.

    Args:
        tokens: [sum of sizes], the sentences one after another.
        sizes: int [n], tokens of each sentence, at least 1.
        documents: int [d], sentences of each document, at least 1; their sum is n.
        room: most tokens of a row. A longer sentence begins a row and is cut after every `room`
            tokens. Its rest begins another row, which the next sentences share.
        separator: the token between two documents in one row; it belongs to the sentence before it.
            With None every document begins a row.

    Returns: the rows, and how many sentences were cut.
    """
    sizes = np.asarray(sizes, np.int64)
    documents = np.asarray(documents, np.int64)
    assert sizes.sum() == len(tokens)
    assert documents.sum() == len(sizes)
    assert (sizes > 0).all()

    # A sentence is one piece, a long one several: all of `room` tokens but the last, which has the
    # rest.
    pieces_of = -(-sizes // room)
    cut = np.count_nonzero(pieces_of > 1)
    last_piece = np.cumsum(pieces_of) - 1
    piece_sizes = np.full(int(pieces_of.sum()), room, np.int64)
    piece_sizes[last_piece] = sizes - (pieces_of - 1) * room

    last_sentence = np.cumsum(documents) - 1
    ends_document = np.zeros(len(piece_sizes), bool)  # of each piece
    ends_document[last_piece[last_sentence]] = True

    ends = np.cumsum(piece_sizes)
    if separator is not None:
        between_documents = ends[ends_document][:-1]  # none after the last document
        tokens = np.insert(tokens, between_documents, separator)
        separators_before = np.cumsum(ends_document) - ends_document
        ends += separators_before

    # Piece i is tokens[starts[i] : ends[i]]; a separator stands between ends[i] and starts[i + 1].
    starts = ends - piece_sizes
    # Of each document, the number of the piece after its last one.
    document_limits = np.append(np.flatnonzero(ends_document) + 1, len(ends))

    # Row r has the pieces first_pieces[r] to limits[r] - 1.
    first_pieces = []
    limits = []
    first = 0
    while first < len(ends):
        limit = int(np.searchsorted(ends, starts[first] + room, side="right"))
        if separator is None:
            next_document = np.searchsorted(document_limits, first, side="right")
            limit = min(limit, int(document_limits[next_document]))
        first_pieces.append(first)
        limits.append(limit)
        first = limit
    first_pieces = np.array(first_pieces, np.int64)
    limits = np.array(limits, np.int64)
    row_starts = starts[first_pieces]
    row_ends = ends[limits - 1]

    # A separator between two rows is in neither.
    keep = np.ones(len(tokens), bool)
    separated = row_ends[:-1] < row_starts[1:]
    keep[row_ends[:-1][separated]] = False

    row_sentences = np.append(first_pieces, len(ends))
    row_start_of_piece = np.repeat(row_starts, np.diff(row_sentences))
    packed = Packed(
        tokens=tokens[keep],
        rows=np.concatenate([[0], np.cumsum(row_ends - row_starts)]).astype(np.int64),
        sentences=(starts - row_start_of_piece).astype(np.int32),
        row_sentences=row_sentences.astype(np.int64),
    )
    return packed, cut


def _belong_together(packed: Packed) -> bool:
    """Returns whether the arrays have as many rows, and end where the arrays that they point into
    end."""
    if len(packed.rows) == 0 or len(packed.row_sentences) != len(packed.rows):
        return False
    all_tokens = int(packed.rows[-1]) == len(packed.tokens)
    all_sentences = int(packed.row_sentences[-1]) == len(packed.sentences)
    return all_tokens and all_sentences


class Text:
    """One split of a prepared folder.

    Attributes:
        kind: one of data.vocabulary.KINDS, what the rows were made for.
        length: tokens of a row, the special ones around its segments included.
        pairs: whether the rows are for pairs of segments: they have room for three special tokens,
            not for two, and each is of one document.
        tokenizer: of transformers, read when it is asked for.
        source, left_out: see data/splits.py.

    Neither the tokenizer nor the memory maps are pickled: a worker process opens the files itself.
    Raises InputError if a file is missing, damaged or does not belong to the others.
    """

    def __init__(self, folder: str | Path, split: Split):
        self.folder = Path(folder)
        self.split = split
        report = read_json(self.folder / "report.json")
        splits.set_source(self, report, evaluation=split != "train")
        try:
            flags = report["flags"]
            self.kind = flags["kind"]
            self.length = int(flags["length"])
            self.pairs = bool(flags["pairs"])
            self._vocabulary = int(report["vocabulary"])
            expected_tokens = int(report[split]["tokens"])
            expected_rows = int(report[split]["rows"])
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{folder}/report.json has no {error}; prepare the text again"
            ) from error

        packed = self._packed
        tokens = len(packed.tokens)
        rows = len(packed.rows) - 1
        as_reported = tokens == expected_tokens and rows == expected_rows
        if not as_reported or not _belong_together(packed):
            raise InputError(
                f"{self._path('tokens')} and the files beside it have {tokens} tokens in {rows} "
                f"rows; expected {expected_tokens} in {expected_rows}, as report.json says: delete "
                "the folder and prepare it again"
            )

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.split}.{name}.npy"

    @cached_property
    def _packed(self) -> Packed:
        arrays = []
        for name in ARRAYS:
            try:
                arrays.append(np.load(self._path(name), mmap_mode="r"))
            except (OSError, ValueError, EOFError) as error:
                raise InputError(
                    f"{self._path(name)} cannot be read: {error}; "
                    "delete the folder and prepare it again"
                ) from error
        return Packed(*arrays)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        path = self.folder / "tokenizer"
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise all sorts
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{path} has no tokenizer that transformers can read: {reason}; "
                "delete the folder and prepare it again"
            ) from error
        if len(tokenizer) != self._vocabulary:
            raise InputError(
                f"{path} has {len(tokenizer)} tokens, and the text was prepared with "
                f"{self._vocabulary}; they do not belong together: prepare the text again"
            )
        return tokenizer

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        for name in self.__dict__:
            if isinstance(getattr(type(self), name, None), cached_property):
                del state[name]  # an open file, or what was read from one
        return state

    def __len__(self) -> int:
        return len(self._packed)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens, unsigned [n], without special ones around them; and where sentences
        start, int32 [k].

        n is at most length - 2, or with pairs length - 3. The first sentence starts at 0; it may be
        the rest of one that was cut. Without pairs, a separator token ends the sentence before
        another document.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._packed.row(index)


class SyntheticText:
    """A small language, in memory, with the interface of Text.

    It has 96 words in 8 topics of 12: the first syllable of a word is its topic, the second its
    number. A sentence has 4 to 12 words, and each word has the number after that of the word
    before; the first number follows the last. So every word can be predicted from a neighbour. A
    document of 6 to 14 sentences has one topic, and its numbers continue from sentence to sentence.
    So the next sentence can be told from one of another document. Half of the words are two tokens.

    Args:
        kind: of data.vocabulary.KINDS, for its sort of tokens; a vocabulary of 100 to 340.
        rows: 2048 for training and 256 for validation by default.
    """

    TOPICS = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi")
    NUMBERS = ("no", "pu", "ra", "se", "ti", "vo", "wu", "za", "be", "di", "fo", "gu")

    def __init__(
        self,
        split: Split,
        kind: str,
        length: int,
        pairs: bool = False,
        seed: int = 0,
        rows: int | None = None,
    ):
        pairs = pairs or kind == "xlnet"
        check_rows(kind, length, pairs)
        self.split = split
        self.kind = kind
        self.length = length
        self.pairs = pairs
        self._arguments = (split, kind, length, pairs, seed, rows)
        rows = rows or (2048 if split == "train" else 256)
        self.tokenizer = _synthetic_tokenizer(kind, self.TOPICS, self.NUMBERS)
        words = []
        for topic in self.TOPICS:
            for number in self.NUMBERS:
                words.append(f" {topic}{number}")
        pieces = [self.tokenizer(word, add_special_tokens=False).input_ids for word in words]
        pieces.append([self.tokenizer.convert_tokens_to_ids(".")])

        rng = np.random.default_rng((seed, ("train", "valid").index(split)))
        room = capacity(length, pairs)
        # A row has up to `room` tokens, a document at least 30: more than enough, and the rest is
        # left out.
        documents = rng.integers(6, 15, rows * (2 + room // 30))  # sentences of each
        sizes = rng.integers(4, 13, int(documents.sum()))  # words of each sentence
        document_words = np.add.reduceat(sizes, np.cumsum(documents) - documents)
        document_starts = np.cumsum(document_words) - document_words
        within_document = np.arange(document_words.sum())
        within_document -= np.repeat(document_starts, document_words)

        first_number = rng.integers(len(self.NUMBERS), size=len(documents))
        topic = rng.integers(len(self.TOPICS), size=len(documents))
        number_of_word = np.repeat(first_number, document_words) + within_document
        topic_of_word = np.repeat(topic, document_words)
        text = topic_of_word * len(self.NUMBERS) + number_of_word % len(self.NUMBERS)
        full_stop = len(words)
        text = np.insert(text, np.cumsum(sizes), full_stop)  # after each sentence

        # From words to tokens.
        table = np.zeros((len(pieces), max(map(len, pieces))), np.uint16)
        counts = np.array([len(piece) for piece in pieces])
        for number, piece in enumerate(pieces):
            table[number, : len(piece)] = piece
        is_piece = np.arange(table.shape[1]) < counts[text, None]
        tokens = table[text][is_piece]
        sentence_starts = np.cumsum(sizes + 1) - (sizes + 1)
        token_counts = np.add.reduceat(counts[text], sentence_starts)

        separator = None if pairs else self.tokenizer.sep_token_id
        packed, _ = pack_rows(tokens, token_counts, documents, room, separator)
        assert len(packed) >= rows
        self._packed = packed.upto(rows)

    def __reduce__(self):
        return SyntheticText, self._arguments  # made again in the worker, to the same rows

    def __len__(self) -> int:
        return len(self._packed)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a row, see Text.row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._packed.row(index)


def _synthetic_tokenizer(
    kind: str, first: Sequence[str], second: Sequence[str]
) -> PreTrainedTokenizerBase:
    """Makes a tokenizer for words of two syllables.

    Its pieces are all syllables, and the words whose second syllable has an even number.

    Args:
        kind: one of data.vocabulary.KINDS.
        first, second: the syllables.
    """
    words = []
    for topic in first:
        for number in second[::2]:
            words.append(topic + number)
    if kind == "roberta":
        return _byte_level(first, second, words)
    if kind == "xlnet":
        return _unigrams(first, second, words)
    tokenizer_class = BertTokenizer if kind == "bert" else DistilBertTokenizer
    pieces = _word_pieces(first, second, words)
    return tokenizer_class(vocab=pieces, model_max_length=MAX_TOKENS)


def _byte_level(
    first: Sequence[str], second: Sequence[str], words: Sequence[str]
) -> RobertaTokenizer:
    """Makes a tokenizer of bytes, letters to syllables, and syllables to words."""
    merges = []
    for syllable in (*first, *second):
        merges.append((syllable[0], syllable[1]))
    for topic in first:
        merges.append(("Ġ", topic))  # which stands for the space before a word
    for word in words:
        merges.append((f"Ġ{word[:2]}", word[2:]))

    alphabet = sorted(RobertaTokenizer().backend_tokenizer.pre_tokenizer.alphabet())
    merged = [left + right for left, right in merges]
    tokens = [*ROBERTA_SPECIALS, *alphabet, *merged, "<mask>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # As published, the mask takes the space before it.
    mask = AddedToken("<mask>", lstrip=True, special=True)
    return RobertaTokenizer(
        vocab=vocabulary, merges=merges, mask_token=mask, model_max_length=MAX_TOKENS
    )


def _unigrams(first: Sequence[str], second: Sequence[str], words: Sequence[str]) -> XLNetTokenizer:
    """Makes a tokenizer of pieces with logarithmic probabilities: one piece of a whole word is
    likelier than two of its syllables, and these than letters."""
    pieces = [(special, -1000.0) for special in XLNET_SPECIALS]
    pieces += [(f"▁{word}", -5.0) for word in words]
    pieces += [(f"▁{topic}", -5.0) for topic in first]
    pieces += [(number, -5.0) for number in second]
    pieces.append((".", -3.0))
    pieces += [(letter, -20.0) for letter in ("▁", *_letters(first, second))]
    return XLNetTokenizer(vocab=pieces, model_max_length=MAX_TOKENS)


def _word_pieces(
    first: Sequence[str], second: Sequence[str], words: Sequence[str]
) -> dict[str, int]:
    """Returns BERT's pieces with their ids; "##" is in front of those that continue a word."""
    letters = _letters(first, second)
    pieces = [
        *BERT_SPECIALS,
        ".",
        *letters,
        *(f"##{letter}" for letter in letters),
        *first,
        *(f"##{syllable}" for syllable in second),
        *words,
    ]
    return {piece: number for number, piece in enumerate(pieces)}


def _letters(*syllables: Sequence[str]) -> list[str]:
    """Returns all letters of these syllables, sorted."""
    letters = set()
    for each in syllables:
        letters.update("".join(each))
    return sorted(letters)


def check_rows(kind: str, length: int, pairs: bool) -> None:
    """Raises InputError where rows of this sort cannot be made."""
    if kind not in KINDS:
        raise InputError(f"kind is {kind}; expected one of {', '.join(KINDS)}")
    if length < 8:
        raise InputError(
            f"length is {length}; expected 8 or more places in a row, such as 128 or 512"
        )
    if pairs and kind not in ("bert", "xlnet"):
        raise InputError(
            "pairs are for bert (next-sentence prediction) and xlnet; "
            f"expected rows without for {kind}"
        )


def open_text(data: str | Path, split: Split) -> Text:
    """Opens a split of a folder or URL made by make data (or of the text it was made from, with
    `prepared` in it).

    Raises InputError: nothing of the kind is there, or files are missing, damaged or do not belong
    together.
    """
    folder = Path(
        local_copy(str(data), "*report.json", "*.npy", "*tokenizer/*", *FINISHED)
    ).expanduser()
    expected = f"expected a folder made by `{PREPARE}…`"
    if not folder.is_dir():
        if folder.exists():
            raise InputError(f"{data} is a file; {expected}")
        raise InputError(f"there is no folder {data}; {expected}")
    for candidate in (folder, folder / "prepared"):
        if (candidate / "report.json").exists():
            return Text(candidate, split)
        if (candidate / "parts").exists():
            raise InputError(
                f"{candidate} is not prepared to its end; give the same `make data` command again"
            )
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    raise InputError(f"{data} has no report.json, found {found}; {expected}")
