"""Prepares text for pretraining, once before training: learns a vocabulary, makes rows of tokens.

    make data DATASET=text DATA=TEXT
    python -m data.prepare.text --data TEXT [--out DIR] --kind bert --length 128

TEXT is one of
  * a text file, plain or .gz, in UTF-8; or a folder of such files *.txt and *.txt.gz, also in
    folders inside it. A line is a sentence or a paragraph. A blank line ends a document, and so
    does the end of a file. Names of files and of folders say what is validation text, and what is
    test text, which is left out: see data/splits.py.
  * the id of a `datasets` data set on the hub with a column of text (its configuration is
    --config), or a folder of parquet files. A row is a document. The split validation, if there is
    one, is the validation text.
Without validation text, --valid-share of the documents become it, chosen by a hash of their words:
copies of a document are on the same side.

The result has the layout that data/text.py reads.

Sentences. A line is cut after . ! ? … (with quotes and brackets that close) if this follows: a
space; perhaps quotes and brackets that open; then a digit, or a letter that is none of a-z à-ö ø-ÿ.
Such a letter is a capital, or one that these ranges lack, such as ß, č, and all of Greek and
Cyrillic. The line is not cut after a single capital (J. Smith) nor after Mr Mrs Ms Dr St Prof vs
etc. 。！？ end a sentence whatever follows. This rule is cheap and sometimes wrong, which does
little harm: a row is made of consecutive sentences, and a wrong border only moves where a row or
its second segment may begin.

Tokens. Special tokens in the text are text: "[SEP]" is five characters. The space before a sentence
is kept, since byte-level encoding tells words by it; the first sentence of a line has none.

Pieces. The text is cut into pieces of about 8 MB, each of which one process turns into rows; the
last row of a piece is not full.
"""

import dataclasses
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data import splits
from data.prepare import pipeline
from data.prepare.files import whole
from data.prepare.pipeline import Preparation, expect, load_array, save_arrays
from data.prepare.sources import SourceFile, files_in, folder_of, note_rows
from data.text import ARRAYS, capacity, check_rows, pack_rows
from data.vocabulary import SMALLEST, learn
from errors import InputError

PIECE_BYTES = 8_000_000  # of text that a worker handles at once: the most work that a kill costs
BLOCK_BYTES = 1 << 20  # of text read at once to find the end of a document
ENCODED_SENTENCES = 10_000  # sentences given to the tokenizer at once; its results take much memory
# Tokens of the published models.
VOCABULARIES = {"bert": 30_522, "distilbert": 30_522, "roberta": 50_265, "xlnet": 32_000}
SPLITS = ("train", "valid")
OFFSETS = ("rows", "row_sentences")  # those of ARRAYS that have 0 and then the end of each row
# What is counted in each piece, in the order in which its file has the numbers.
COUNTS = ("documents", "empty_sentences", "sentences", "cut_sentences", "unknown")

BLANK = re.compile(rb"\n[ \t\r\f\v]*\n")
ABBREVIATIONS = ("[A-Z]", "Mr", "Mrs", "Ms", "Dr", "St", "Prof", "vs", "etc")
NOT_AFTER_ABBREVIATION = "".join(rf"(?<!\b{word})" for word in ABBREVIATIONS)
# Signs that end a sentence, with the quotes and brackets that close.
END_SIGNS = r"""[.!?…]+["'”’»)\]]*"""
# Looks ahead at what must follow, see the top.
NEXT_SENTENCE_FOLLOWS = r"""(?=\s+["'“‘«(\[¿¡]*[^\W_a-zà-öø-ÿ])"""
CJK_END_SIGNS = r"[。！？]+[」』”）]*"  # needs nothing after it
SENTENCE_END = re.compile(
    rf"{NOT_AFTER_ABBREVIATION}(?:{END_SIGNS}{NEXT_SENTENCE_FOLLOWS}|{CJK_END_SIGNS})"
)


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares text for pretraining: learns a vocabulary and turns text into rows of tokens.

    The same command resumes a killed one. The result depends neither on that nor on --workers,
    unless XLNet's vocabulary is learnt anew: its scores differ in their last bits.
    """

    data: str  # text file, folder of them or of parquet files, or id of a data set on the hub
    out: str = ""  # folder of the result; default: `prepared` beside the file, or in the folder
    kind: str = "bert"  # bert, distilbert, roberta or xlnet: sort of vocabulary, and of rows
    length: int = 128  # tokens of a row, special tokens included
    pairs: bool = False  # two segments per row, for next-sentence prediction; always with xlnet
    vocab_size: int = 0  # tokens of the learnt vocabulary; default: those of the published model
    tokenizer: str = ""  # folder or hub id of a tokenizer to use instead
    config: str = ""  # configuration of a data set
    column: str = "text"  # column of a data set that has the text
    valid_share: float = 0.01  # of the documents, where there is no validation text
    sample: int = 1_000_000_000  # characters at most from which the vocabulary is learnt
    workers: int = os.cpu_count() or 1  # processes; a vocabulary is learnt on all cores


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive bytes of a plain text file, from the start of a document to the end of one."""

    path: str
    name: str  # for messages: the user's file
    start: int  # bytes
    stop: int

    def documents(self) -> Iterator[list[str]]:
        """Yields each document's lines, none empty. Raises InputError where they are not UTF-8."""
        text = pipeline.read_text(self.path, self.name, self.start, self.stop)
        document = []
        for line in text.split("\n"):  # splitlines would split at other characters too
            line = line.strip()
            if line:
                document.append(line)
            elif document:
                yield document
                document = []
        if document:
            yield document


def _documents(piece: list[Span]) -> Iterator[list[str]]:
    """Yields the documents of a piece of text, see Span.documents."""
    for span in piece:
        yield from span.documents()


def split_sentences(line: str) -> list[str]:
    """Splits a line by the rule at the top.

    All sentences but the first keep one space in front, if there was any.
    """
    with_spaces = []
    start = 0
    for match in SENTENCE_END.finditer(line):
        with_spaces.append(line[start : match.end()])
        start = match.end()
    with_spaces.append(line[start:])

    sentences = []
    for text in with_spaces:
        sentence = text.strip()
        if sentence:
            space = " " if text[0].isspace() else ""
            sentences.append(space + sentence)
    return sentences


def is_for_validation(document: Sequence[str], valid_share: float) -> bool:
    """Returns whether a document is in the share for validation: a hash of its words decides."""
    words = " ".join(document).split()
    return zlib.crc32(" ".join(words).encode()) < valid_share * 2**32


# Finding the text


def find_files(data: Path) -> splits.Files:
    """Returns the text files of each split by name; plain rather than .gz where both are there."""
    if data.is_file():
        return splits.Files(train=[data])

    # Compressed files come first, so that a plain one replaces its compressed twin.
    found = splits.below(data, "*.txt", "*.txt.gz")
    found.sort(key=lambda path: path.suffix.lower() == ".txt")
    paths = {}
    for path in found:
        name = str(path)
        if path.suffix.lower() == ".gz":
            name = name[: -len(".gz")]
        paths[name] = path
    files = splits.sort_files([paths[name] for name in sorted(paths)], data)

    # Files of other endings are not read. The report names those that say a split (test.zip), but
    # neither .gz files whose plain twin is read nor parquet files.
    twins_and_tables = splits.below(data, "*.txt.gz", "*.parquet")
    accounted_for = {*files.train, *files.valid, *files.left_out, *twins_and_tables}
    for path in splits.below(data, "*"):
        if path not in accounted_for and splits.says_split(path.relative_to(data)):
            files.unread.append(path)
    return files


def load_rows(data: str, config: str, column: str) -> pipeline.Splits:
    """Opens the splits train and, if there is one, valid of a `datasets` data set.

    Raises InputError if there is no such data set, split or column.
    """

    def load_arguments(folder: Path) -> tuple[str, str | None]:
        """Returns the arguments of datasets.load_dataset: name or folder, and configuration."""
        name = str(folder) if folder.is_dir() else data
        return name, config or None

    loaded = pipeline.load_splits(
        data,
        expected="text files (*.txt, *.txt.gz)",
        load_arguments=load_arguments,
        required=["train"],
        optional="valid",
    )
    for split, rows in loaded.datasets_by_split.items():
        if column not in rows.column_names:
            raise InputError(
                f"{data}, split {split}, has the columns {', '.join(rows.column_names)}; "
                f"expected a column {column}, or choose with --column"
            )
    return loaded


def _dump(rows, column: str, plain: Path) -> None:
    """Writes a split of a data set as text: a row is a document; its blank lines are left out."""
    with whole(plain) as file:
        for batch in rows.iter(1000):
            for text in batch[column]:
                lines = [line for line in (text or "").split("\n") if line.strip()]
                document = "\n".join(lines)
                file.write(f"{document}\n\n".encode())


def cut(paths: Sequence[tuple[Path, str]], piece_bytes: int) -> list[list[Span]]:
    """Cuts files into pieces of about `piece_bytes` that end with a document.

    A piece may have the end of one file and the beginning of the next.

    Args:
        paths: the files, and their names for messages.
    """
    pieces = []
    piece = []
    size = 0  # of the piece
    for path, name in paths:
        total = path.stat().st_size
        start = 0
        with open(path, "rb") as file:
            while start < total:
                earliest = start + piece_bytes - size
                stop = min(_document_end(file, earliest), total)  # `earliest` may be beyond the end
                piece.append(Span(str(path), name, start, stop))
                size += stop - start
                start = stop
                if size >= piece_bytes:
                    pieces.append(piece)
                    piece = []
                    size = 0
    if piece:
        pieces.append(piece)
    return pieces


def _document_end(file: BinaryIO, earliest: int) -> int:
    """Returns the first position from `earliest` on where a blank line has just ended.

    Without one, that is the end of the file, or `earliest` if that is beyond it.
    """
    file.seek(earliest)
    data = b""
    position = earliest  # of data[0]
    while block := file.read(BLOCK_BYTES):
        data += block
        match = BLANK.search(data)
        if match:
            return position + match.end()

        # Of this block only an unfinished blank line is kept for the next one: what follows the
        # last line feed, if it is all spaces.
        last_line_feed = data.rfind(b"\n")
        kept_from = max(last_line_feed, 0)  # without a line feed, from the start
        is_blank = not data[kept_from:].strip()
        if not is_blank:
            kept_from = len(data)
        data = data[kept_from:]
        position += kept_from
    return position + len(data)


# The vocabulary


def _sampled(pieces: list[list[Span]], valid_share: float, sample_characters: int) -> Iterator[str]:
    """Yields lines of the training documents, up to `sample_characters` characters.

    They are from all pieces, or from evenly spaced ones where the text is larger.

    Args:
        valid_share: share of the documents that is for validation.
    """
    text_bytes = 0
    for piece in pieces:
        for span in piece:
            text_bytes += span.stop - span.start
    # As if each character had one byte: where many have more, fewer pieces are read than could be.
    spacing = max(1.0, text_bytes / sample_characters)
    chosen = np.unique(np.arange(0, len(pieces), spacing).astype(np.int64)).tolist()

    characters = 0
    for number in chosen:
        for document in _documents(pieces[number]):
            if is_for_validation(document, valid_share):
                continue
            for line in document:
                characters += len(line)
                if characters > sample_characters:
                    return
                yield line


def _open_tokenizer(name: str, kind: str):
    """Opens a tokenizer of the user's, which must suit the kind. Raises InputError."""
    folder = Path(name).expanduser()
    name_or_path = str(folder) if folder.is_dir() else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except Exception as error:  # transformers and tokenizers raise many types
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"the tokenizer {name} cannot be opened: {reason}; "
            "expected a folder of save_pretrained or an id on the hub"
        ) from error

    needed = ("cls_token", "sep_token", "pad_token", "mask_token")
    missing = [token for token in needed if getattr(tokenizer, token) is None]
    if missing:
        raise InputError(
            f"the tokenizer {name} has no {', '.join(missing)}; expected one of a {kind} model"
        )

    side = "left" if kind == "xlnet" else "right"
    if tokenizer.padding_side != side or not hasattr(tokenizer, "backend_tokenizer"):
        raise InputError(
            f"the tokenizer {name} is a {type(tokenizer).__name__}, "
            f"which pads on the {tokenizer.padding_side}; "
            f"expected a fast one that pads on the {side}, as {kind} has it"
        )
    return tokenizer


def _make_tokenizer(
    flags: Flags, pieces: list[list[Span]], valid_share: float, folder: Path
) -> None:
    """Saves the user's tokenizer, or one that it learns, to a folder that is whole or not there.

    Args:
        pieces: of the training text.
        valid_share: share of its documents that is for validation.
    """
    if flags.tokenizer:
        tokenizer = _open_tokenizer(flags.tokenizer, flags.kind)
    else:
        print("learning a vocabulary", flush=True)
        lines = _sampled(pieces, valid_share, flags.sample)
        tokenizer = learn(lines, flags.kind, flags.vocab_size)

    partial = folder.with_name(f"tokenizer.{os.getpid()}.partial")
    tokenizer.save_pretrained(partial)
    os.replace(partial, folder)


# Rows


class _Encoder:
    """Encodes sentences to ids with the tokenizer in a folder.

    Attributes:
        unknown, separator: ids of the tokens, None where there is none.
        dtype: of ids, uint16 where it holds them.
    """

    def __init__(self, folder: Path):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Special tokens in the text are text. The flag is set on a copy, since transformers would
        # reset it.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.unknown = tokenizer.unk_token_id
        self.separator = tokenizer.sep_token_id
        special_ids = tokenizer.all_special_ids
        self._specials = [number for number in special_ids if number != self.unknown]
        self.dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)

    def encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of all sentences, one after another, and how many each has, int64."""
        batches_of_tokens = [np.empty(0, self.dtype)]
        batches_of_sizes = [np.empty(0, np.int64)]
        for start in range(0, len(sentences), ENCODED_SENTENCES):
            batch = sentences[start : start + ENCODED_SENTENCES]
            encoded = self._backend.encode_batch_fast(batch, add_special_tokens=False)
            ids = [sentence.ids for sentence in encoded]
            sizes = np.fromiter(map(len, ids), np.int64, len(ids))
            flat = itertools.chain.from_iterable(ids)
            batches_of_tokens.append(np.fromiter(flat, self.dtype, int(sizes.sum())))
            batches_of_sizes.append(sizes)
        tokens = np.concatenate(batches_of_tokens)

        # A Unigram vocabulary without the character "<" still encodes the text "<sep>" as the
        # special token. Such a token is made the unknown one, as for any text that has no pieces.
        if self.unknown is not None and self._specials:
            tokens[np.isin(tokens, self._specials)] = self.unknown
        return tokens, np.concatenate(batches_of_sizes)


def _encode_piece(
    piece: list[Span],
    split: str,
    valid_share: float,
    tokenizer: Path,
    room: int,
    pairs: bool,
    path: Path,
) -> None:
    """Writes the rows of a piece of text as the file `path`.

    Args:
        split: that of the piece, train or valid.
        valid_share: share of the documents of training text that is for validation.
        tokenizer: its folder.
        room: tokens of a row without the special ones.
        pairs: whether a row gets two segments, see Flags. Its documents are then not joined: each
            begins a row.
    """
    encoder = _Encoder(tokenizer)
    documents_of = {name: [] for name in SPLITS}
    for document in _documents(piece):
        sentences = []
        for line in document:
            sentences += split_sentences(line)
        if split == "valid" or is_for_validation(document, valid_share):
            documents_of["valid"].append(sentences)
        else:
            documents_of["train"].append(sentences)

    arrays = {}
    for split_of_rows, documents in documents_of.items():
        for name, array in _pack(documents, encoder, room, pairs).items():
            arrays[f"{split_of_rows}_{name}"] = array
    save_arrays(path, **arrays)


def _pack(
    documents: list[list[str]], encoder: _Encoder, room: int, pairs: bool
) -> dict[str, np.ndarray]:
    """Packs documents, which are lists of sentences, into rows; `pairs`: see _encode_piece.

    Returns: the arrays of the rows by name, those of ARRAYS, and as "counts" one array more with
        the numbers of COUNTS in their order.
    """
    sentences_of_document = [len(document) for document in documents]
    sentences = list(itertools.chain.from_iterable(documents))
    tokens, sizes = encoder.encode(sentences)
    has_tokens = sizes > 0

    # Sentences without tokens (control characters, say) are dropped, and so are documents without
    # other sentences.
    document_of_sentence = np.repeat(np.arange(len(documents)), sentences_of_document)
    kept_of_document = np.bincount(document_of_sentence[has_tokens], minlength=len(documents))

    packed, cut_sentences = pack_rows(
        tokens,
        sizes=sizes[has_tokens],
        documents=kept_of_document[kept_of_document > 0],
        room=room,
        separator=None if pairs else encoder.separator,  # None: every document begins a row
    )

    arrays = {name: getattr(packed, name) for name in ARRAYS}
    counts = {
        "documents": np.count_nonzero(kept_of_document),
        "empty_sentences": np.count_nonzero(~has_tokens),
        "sentences": np.count_nonzero(has_tokens),
        "cut_sentences": cut_sentences,
        "unknown": np.count_nonzero(tokens == encoder.unknown),
    }
    arrays["counts"] = np.array([counts[name] for name in COUNTS])
    return arrays


def _join(encoded: list[Path], split: str, name: str, path: Path) -> None:
    """Writes one array of a split (see data/text.py) from those of the pieces, one piece at a time.

    The OFFSETS of each piece begin with 0; here they follow those of the piece before.
    """
    is_offsets = name in OFFSETS
    dtype = load_array(encoded[0], f"{split}_{name}").dtype
    length = 1 if is_offsets else 0
    for piece in encoded:
        entries = len(load_array(piece, f"{split}_{name}"))
        length += entries - 1 if is_offsets else entries
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (length,),
    }

    with whole(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        if is_offsets:
            file.write(np.zeros(1, dtype).tobytes())
        offset = 0  # where the piece begins in the array that the offsets point into
        for piece in encoded:
            array = load_array(piece, f"{split}_{name}")
            if is_offsets:
                end = array[-1]
                array = array[1:] + offset
                offset += end
            file.write(np.ascontiguousarray(array))


# The command


@dataclasses.dataclass(frozen=True)
class Found:
    """The user's text: files, or the splits of a data set."""

    files: dict[str, list[Path]]  # of each split; empty: it is a data set
    loaded: pipeline.Splits
    source_files: list[SourceFile]  # what the plan notes of it
    rows: list[dict]
    read_from: dict[str, str]  # what report.json says of it


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes text as the folder that data.text.open_text reads; the arguments are those of Flags.

    The passes: decompress .gz files and cut the text into pieces; learn a vocabulary; turn each
    piece into rows; join them.

    Memory: about 0.5 GB per worker, and what learning takes for the words of the sample. Disk: the
    result twice, and .gz files decompressed, in the folder `parts` until the end.

    Returns: the contents of report.json.
    Raises InputError: there is no such text, it cannot be used, or `out` holds something that was
        prepared differently.
    """
    flags = _completed(Flags(str(data), str(out), workers=workers, **flags))
    found = _find(flags)
    print(splits.sentence(found.read_from), flush=True)
    job = Preparation(flags, found.source_files, found.rows)
    report = job.finished_report()
    if report:
        return report

    # A preparation that is resumed keeps the size of its pieces.
    piece_bytes = job.begin_with_piece_size("piece_bytes", PIECE_BYTES)
    pieces = {}
    for split, files in _plain_files(job, flags, found).items():
        pieces[split] = cut(files, piece_bytes)
    valid_share = 0.0 if "valid" in pieces else flags.valid_share

    # The last item of each task is the file that it leaves, see Preparation.run.
    tokenizer = job.out / "tokenizer"
    job.run(_make_tokenizer, [(flags, pieces["train"], valid_share, tokenizer)], "tokenizer")

    room = capacity(flags.length, flags.pairs)
    encoded = []
    tasks = []
    for split, of_split in pieces.items():
        for number, piece in enumerate(of_split):
            path = job.parts / f"{split}.{number:06d}.npz"
            encoded.append(path)
            tasks.append((piece, split, valid_share, tokenizer, room, flags.pairs, path))
    job.run(_encode_piece, tasks, "encoding")

    vocabulary = len(AutoTokenizer.from_pretrained(tokenizer, local_files_only=True))
    figures = {"vocabulary": vocabulary}
    for split in SPLITS:
        figures[split] = _split_report(encoded, split, room)
        _check_split(figures[split], split, valid_share, flags.data, job.out)

    tasks = []
    for split in SPLITS:
        for name in ARRAYS:
            tasks.append((encoded, split, name, job.out / f"{split}.{name}.npy"))
    job.run(_join, tasks, "joining")
    figures["read_from"] = found.read_from
    figures["seconds"] = job.seconds
    return job.finish(figures)


def _completed(flags: Flags) -> Flags:
    """Returns the flags with the defaults that depend on the kind. Raises InputError."""
    vocab_size = flags.vocab_size or VOCABULARIES.get(flags.kind, 0)
    pairs = flags.pairs or flags.kind == "xlnet"
    flags = dataclasses.replace(flags, pairs=pairs, vocab_size=vocab_size)

    check_rows(flags.kind, flags.length, flags.pairs)  # raises for an unknown kind, too
    least = SMALLEST[flags.kind]
    is_large_enough = bool(flags.tokenizer) or vocab_size >= least  # a tokenizer has its own size
    expect(flags, "vocab_size", is_large_enough, f"at least {least} for {flags.kind}")
    is_share = 0 < flags.valid_share < 1
    expect(flags, "valid_share", is_share, "a share between 0 and 1, such as 0.01")
    expect(flags, "sample", flags.sample >= 1, "at least 1")
    return flags


def _find(flags: Flags) -> Found:
    """Finds the files, or opens the data set. Raises InputError where there is neither."""
    source = Path(flags.data).expanduser()
    all_files = splits.Files()
    if source.exists():
        all_files = find_files(source)
    files = {}
    if all_files.train:
        files["train"] = all_files.train
    if all_files.valid:
        files["valid"] = all_files.valid
    _check_files(flags.data, all_files)
    loaded = pipeline.Splits()
    if not files:
        loaded = load_rows(flags.data, flags.config, flags.column)

    folder = folder_of(source)
    source_files = []
    names = dict(loaded.names)
    for split, paths in files.items():
        of_split = files_in(folder, paths)
        names[split] = [file.name for file in of_split]
        source_files += of_split
    noted = []
    for split, rows in loaded.datasets_by_split.items():
        noted.append(note_rows(flags.data, rows, suffix=f", {split}"))

    if "valid" not in names:
        names["valid"] = [f"{flags.valid_share:.2%} of their documents, by a hash"]
    left_out = list(loaded.left_out)
    for path in (*all_files.left_out, *all_files.unread):
        left_out.append(str(path.relative_to(folder)))
    train = splits.shown(names["train"])
    valid = splits.shown(names["valid"])
    read_from = splits.read_from(train, valid, left_out)
    return Found(files, loaded, source_files, noted, read_from)


def _check_files(data: str, files: splits.Files) -> None:
    """Raises InputError for files without training text, and for text beside parquet files."""
    source = Path(data).expanduser()
    if files.valid and not files.train:
        unread = ""
        if files.unread:
            names = splits.shown(path.relative_to(source) for path in files.unread)
            unread = f"; not read: {names}"
        raise InputError(
            f"{data} has only validation text; "
            f"expected other *.txt or *.txt.gz files for training{unread}"
        )

    tables = []
    if source.is_dir():
        tables = splits.below(source, "*.parquet")
    if files.train and tables:
        raise InputError(
            f"{data} has text ({splits.shown(files.train)}) "
            f"as well as parquet files ({splits.shown(tables)}); "
            "expected one of them: move the other to a folder of its own"
        )
    if files.left_out and not files.train and not tables:
        raise InputError(
            f"{data} has only test text ({splits.shown(files.left_out)}); expected text to train on"
        )


def _plain_files(job: Preparation, flags: Flags, found: Found) -> dict[str, list[tuple[Path, str]]]:
    """Decompresses .gz files, and dumps the rows of a data set.

    Returns: the plain files of each split, with their names for messages.
    """
    copies = {}
    for split, paths in found.files.items():
        for number, path in enumerate(paths):
            copies[path] = job.parts / f"{split}.{number:06d}.txt"
    plain_path_of = job.decompress(copies)  # that of a plain file is the file itself

    plain = {}
    for split, paths in found.files.items():
        plain[split] = [(plain_path_of[path], str(path)) for path in paths]
    for split, rows in found.loaded.datasets_by_split.items():
        copy = job.parts / f"{split}.txt"
        if not copy.exists():
            _dump(rows, flags.column, copy)
        plain[split] = [(copy, f"{flags.data}, split {split}")]

    for paths in plain.values():
        if not any(path.stat().st_size for path, _ in paths):
            _, first = paths[0]
            raise InputError(f"{first} is empty; expected a sentence or a paragraph per line")
    return plain


def _split_report(encoded: list[Path], split: str, room: int) -> dict:
    """Returns the report's entry for a split."""
    totals = sum(load_array(piece, f"{split}_counts") for piece in encoded).tolist()
    counts = dict(zip(COUNTS, totals, strict=True))
    rows = 0
    tokens = 0
    for piece in encoded:
        offsets = load_array(piece, f"{split}_rows")
        rows += len(offsets) - 1
        tokens += int(offsets[-1])
    return {
        "documents": counts["documents"],
        "sentences": counts["sentences"],
        "tokens": tokens,
        "rows": rows,
        "padding": round(1 - tokens / max(rows * room, 1), 4),
        "unknown_share": round(counts["unknown"] / max(tokens, 1), 6),
        "cut_sentences": counts["cut_sentences"],
        "dropped_empty_sentences": counts["empty_sentences"],
    }


def _check_split(report: dict, split: str, valid_share: float, data: str, out: Path) -> None:
    """Raises InputError if a split has no rows."""
    if report["rows"]:
        return
    how = "at all"
    if split == "valid" and valid_share:
        how = f"with --valid-share {valid_share}"
    raise InputError(
        f"{data} has no documents for the {split} split {how}; delete {out} "
        "and give more text (blank lines end documents), "
        "a larger --valid-share, or files valid….txt"
    )


def _summary(report: dict) -> None:
    """Prints the figures of both splits."""
    for split in SPLITS:
        figures = []
        for name, value in report[split].items():
            figures.append(f"{name.replace('_', ' ')} {value}")
        print(f"{split}: {', '.join(figures)}")
    print(f"{report['vocabulary']} tokens in the vocabulary; {report['seconds']} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
