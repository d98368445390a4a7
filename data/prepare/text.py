"""Prepares text for pretraining, once before training: learns a vocabulary and turns text into rows of tokens.

    python -m data.prepare.text --data TEXT [--out DIR] --kind bert --length 128  (make data DATASET=text DATA=TEXT)

TEXT is one of
  * a text file, plain or .gz, in UTF-8; or a folder of such files *.txt and *.txt.gz, also in folders inside it. A line
    is a sentence or a paragraph; a blank line ends a document, and so does the end of a file. Names of files and of
    folders say what is validation text, and what is test text, which is left out: see data/splits.py.
  * the id of a `datasets` data set on the hub with a column of text (its configuration is --config), or a folder of
    parquet files. A row is a document. The split validation, if there is one, is the validation text.
Without validation text, --valid-share of the documents become it, chosen by a hash of their words: copies of a document
are on the same side.

The result has the layout that data/text.py reads.

Sentences. A line is cut after . ! ? … (and quotes and brackets that close) where a space follows, and then a capital
letter or a digit, perhaps after an opening quote or bracket; but not after a single capital (J. Smith) nor after Mr Mrs
Ms Dr St Prof vs etc. 。！？ end a sentence without a space. This rule is cheap and sometimes wrong, which does little
harm: a row is made of consecutive sentences, and a wrong border only moves where a row or its second segment may begin.

Tokens. Special tokens in the text are text: "[SEP]" is five characters. The space before a sentence is kept, since
byte-level encoding tells words by it; the first sentence of a line has none.

Rows are packed from pieces of about 8 MB of text, each in one process; the last row of a piece is not full.
"""

import dataclasses
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data import splits
from data.prepare import pipeline
from data.prepare.files import whole
from data.prepare.pipeline import Preparation, expect, load_array, save_arrays
from data.text import ARRAYS, capacity, check_rows, pack_rows
from data.vocabulary import SMALLEST, learn
from errors import InputError

PIECE_BYTES = 8_000_000  # of text that a worker handles at once: the most that a kill costs
ENCODED = 10_000  # sentences given to the tokenizer at once; its results take much memory
VOCABULARIES = {"bert": 30_522, "distilbert": 30_522, "roberta": 50_265, "xlnet": 32_000}  # of the published models
SPLITS = ("train", "valid")

BLANK = re.compile(rb"\n[ \t\r\f\v]*\n")
ABBREVIATIONS = "".join(rf"(?<!\b{word})" for word in ("[A-Z]", "Mr", "Mrs", "Ms", "Dr", "St", "Prof", "vs", "etc"))
# [^\W_a-zà-öø-ÿ] are digits and all letters but lower-case ones.
END = re.compile(rf"""{ABBREVIATIONS}(?:[.!?…]+["'”’»)\]]*(?=\s+["'“‘«(\[¿¡]*[^\W_a-zà-öø-ÿ])|[。！？]+[」』”）]*)""")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares text for pretraining: learns a vocabulary and turns text into rows of tokens.

    The same command resumes a killed one. The result depends neither on that nor on --workers, unless XLNet's
    vocabulary is learnt anew: its scores differ in their last bits.
    """

    data: str  # text file, folder of them or of parquet files, or id of a data set on the hub
    out: str = ""  # folder of the result; default: a folder `prepared` beside the file, or in the folder
    kind: str = "bert"  # bert, distilbert, roberta or xlnet: sort of vocabulary, and of rows
    length: int = 128  # places of a row, special tokens included
    pairs: bool = False  # two segments per row, as next-sentence prediction needs them; xlnet always has them
    vocab_size: int = 0  # tokens of the vocabulary that is learnt; default: those of the published model
    tokenizer: str = ""  # folder or hub id of a tokenizer to use instead
    config: str = ""  # of a data set: its configuration
    column: str = "text"  # of a data set: the column of text
    valid_share: float = 0.01  # of the documents, for validation, where there is no validation text
    sample: int = 1_000_000_000  # characters of text at most from which the vocabulary is learnt
    workers: int = os.cpu_count() or 1  # processes; learning a vocabulary uses threads on all cores


class Stretch(NamedTuple):
    """A stretch of a plain text file, from the start of a document to the end of one."""

    path: str
    name: str  # for messages: the user's file
    start: int  # bytes
    stop: int

    def documents(self) -> Iterator[list[str]]:
        """Yields each document's lines, none of them empty. Raises InputError where they are not UTF-8."""
        document = []
        for line in pipeline.read_text(*self).split("\n"):  # splitlines would split at other characters too
            if line := line.strip():
                document.append(line)
            elif document:
                yield document
                document = []
        if document:
            yield document


def split_sentences(line: str) -> list[str]:
    """Splits a line by the rule at the top; all sentences but the first keep one space in front, if there was any."""
    sentences, start = [], 0
    for match in END.finditer(line):
        sentences.append(line[start : match.end()])
        start = match.end()
    sentences.append(line[start:])
    spaced = [(" " if sentence[:1].isspace() else "") + sentence.strip() for sentence in sentences]
    return [sentence for sentence in spaced if sentence.strip()]


def is_valid(document: Sequence[str], share: float) -> bool:
    """Returns whether a document is in the share for validation."""
    return zlib.crc32(" ".join(" ".join(document).split()).encode()) < share * 2**32


# Finding the text


def find_files(data: Path) -> splits.Files:
    """Returns the text files of each split, sorted by name; plain rather than .gz where both are there."""
    if data.is_file():
        return splits.Files(train=[data])
    paths = {}
    for path in sorted(splits.below(data, "*.txt", "*.txt.gz"), key=lambda path: path.suffix.lower() == ".txt"):
        name = str(path)
        packed = path.suffix.lower() == ".gz"
        paths[name[: -len(".gz")] if packed else name] = path
    files = splits.sort_files([path for _, path in sorted(paths.items())], data)

    # Files of other endings are not read; that is said of those that say a split, as in valid.tokens or test.zip.
    read = {*files.train, *files.valid, *files.left_out, *splits.below(data, "*.txt.gz", "*.parquet")}
    for path in splits.below(data, "*"):
        if path not in read and splits.says_split(path.relative_to(data)):
            files.unread.append(path)
    return files


def load_rows(data: str, config: str, column: str) -> pipeline.Splits:
    """Opens the splits train and, if there is one, valid of a `datasets` data set. Raises InputError."""

    def arguments(folder: Path) -> tuple:
        return str(folder) if folder.is_dir() else data, config or None

    found = pipeline.load_splits(data, "text files (*.txt, *.txt.gz)", arguments, ["train"], "valid")
    for split, rows in found.rows.items():
        if column not in rows.column_names:
            has = f"the columns {', '.join(rows.column_names)}"
            raise InputError(f"{data}, split {split}, has {has}; expected a column {column}, or choose with --column")
    return found


def _dump(rows, column: str, plain: Path) -> None:
    """Writes a split of a data set as text: a row is a document; its blank lines are left out."""
    with whole(plain) as file:
        for batch in rows.iter(1000):
            for text in batch[column]:
                lines = [line for line in (text or "").split("\n") if line.strip()]
                file.write(("\n".join(lines) + "\n\n").encode())


def cut(paths: Sequence[tuple[Path, str]], piece_bytes: int) -> list[list[Stretch]]:
    """Cuts files, given with their names for messages, into pieces of about `piece_bytes` that end with a document."""
    pieces, size = [[]], 0
    for path, name in paths:
        total, start = path.stat().st_size, 0
        with open(path, "rb") as file:
            while start < total:
                stop = min(_document_end(file, start + piece_bytes - size), total)
                pieces[-1].append(Stretch(str(path), name, start, stop))
                size += stop - start
                start = stop
                if size >= piece_bytes:
                    pieces.append([])
                    size = 0
    return [piece for piece in pieces if piece]


def _document_end(file, start: int) -> int:
    """Returns the first position from `start` on where a blank line has just ended, or the end of the file."""
    file.seek(start)
    data, at = b"", start
    while block := file.read(1 << 20):
        data += block
        if match := BLANK.search(data):
            return at + match.end()
        # The end of the block may cut a blank line; what precedes its line feed is not needed any more.
        keep = max(data.rfind(b"\n"), 0)
        keep = keep if not data[keep:].strip() else len(data)
        at, data = at + keep, data[keep:]
    return at + len(data)


# The vocabulary


def _sampled(pieces: list[list[Stretch]], share: float, sample: int) -> Iterator[str]:
    """Yields lines of the training documents, of all pieces or of evenly spaced ones, up to `sample` characters."""
    total = sum(stretch.stop - stretch.start for piece in pieces for stretch in piece)
    chosen = sorted({int(number) for number in np.arange(0, len(pieces), max(1.0, total / sample))})
    stretches = itertools.chain.from_iterable(pieces[number] for number in chosen)
    documents = itertools.chain.from_iterable(stretch.documents() for stretch in stretches)
    for line in itertools.chain.from_iterable(one for one in documents if not is_valid(one, share)):
        sample -= len(line)
        if sample < 0:
            return
        yield line


def _open_tokenizer(name: str, kind: str):
    """Opens a tokenizer of the user's, which must suit the kind. Raises InputError."""
    folder = Path(name).expanduser()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name)
    except Exception as error:  # transformers and tokenizers raise many types
        what = f"the tokenizer {name} cannot be opened: {str(error).partition(chr(10))[0]}"
        raise InputError(f"{what}; expected a folder of save_pretrained or an id on the hub") from error
    needed = ("cls_token", "sep_token", "pad_token", "mask_token")
    missing = [token for token in needed if getattr(tokenizer, token) is None]
    if missing:
        raise InputError(f"the tokenizer {name} has no {', '.join(missing)}; expected one of a {kind} model")
    side = "left" if kind == "xlnet" else "right"
    if tokenizer.padding_side != side or not hasattr(tokenizer, "backend_tokenizer"):
        what = f"is a {type(tokenizer).__name__}, which pads on the {tokenizer.padding_side}"
        raise InputError(f"the tokenizer {name} {what}; expected a fast one that pads on the {side}, as {kind} has it")
    return tokenizer


def _make_tokenizer(flags: Flags, pieces: list[list[Stretch]], share: float, folder: Path) -> None:
    """Saves the user's tokenizer, or one that it learns, to a folder that is whole or not there."""
    if flags.tokenizer:
        tokenizer = _open_tokenizer(flags.tokenizer, flags.kind)
    else:
        print("learning a vocabulary", flush=True)
        tokenizer = learn(_sampled(pieces, share, flags.sample), flags.kind, flags.vocab_size)
    partial = folder.with_name(f"tokenizer.{os.getpid()}.partial")
    tokenizer.save_pretrained(partial)
    os.replace(partial, folder)


# Rows


class _Encoder:
    """Encodes sentences to ids with the tokenizer in a folder."""

    def __init__(self, folder: Path):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Special symbols in the text are text. This is a copy, since transformers would reset the flag.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.unknown, self.separator = tokenizer.unk_token_id, tokenizer.sep_token_id
        self._specials = [number for number in tokenizer.all_special_ids if number != self.unknown]
        self.dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)

    def __call__(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of all sentences, one after another, and how many each has."""
        tokens, sizes = [], []
        for start in range(0, len(sentences), ENCODED):
            batch = sentences[start : start + ENCODED]
            ids = [one.ids for one in self._backend.encode_batch_fast(batch, add_special_tokens=False)]
            sizes.append(np.fromiter(map(len, ids), np.int64, len(ids)))
            tokens.append(np.fromiter(itertools.chain.from_iterable(ids), self.dtype, int(sizes[-1].sum())))
        tokens = np.concatenate([np.empty(0, self.dtype), *tokens])
        # A Unigram vocabulary that lacks the characters of a special token's name still turns the name into the token.
        if self.unknown is not None and self._specials:
            tokens[np.isin(tokens, self._specials)] = self.unknown
        return tokens, np.concatenate([np.empty(0, np.int64), *sizes])


def _encode_piece(
    piece: list[Stretch], split: str, share: float, tokenizer: Path, room: int, pairs: bool, path: Path
) -> None:
    """Writes the rows of a piece of text; `share` of the documents of training text are for validation."""
    encode = _Encoder(tokenizer)
    texts = {name: [] for name in SPLITS}
    for document in itertools.chain.from_iterable(stretch.documents() for stretch in piece):
        chosen = "valid" if split == "valid" or is_valid(document, share) else "train"
        texts[chosen].append([sentence for line in document for sentence in split_sentences(line)])
    arrays = {}
    for name, documents in texts.items():
        tokens, sizes = encode([sentence for document in documents for sentence in document])
        # Sentences without tokens (control characters, say) are dropped, and so are documents without other sentences.
        of = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
        counts = np.bincount(of[sizes > 0], minlength=len(documents))
        packed, cut_sentences = pack_rows(
            tokens, sizes[sizes > 0], counts[counts > 0], room, None if pairs else encode.separator
        )
        arrays |= {f"{name}_{part}": array for part, array in zip(ARRAYS, packed, strict=True)}
        unknown = np.count_nonzero(tokens == encode.unknown)
        kept = np.count_nonzero(counts), np.count_nonzero(sizes == 0), np.count_nonzero(sizes), cut_sentences, unknown
        arrays[f"{name}_counts"] = np.array(kept)
    save_arrays(path, **arrays)


def _join(parts: list[Path], split: str, name: str, path: Path) -> None:
    """Writes one array of a split (see data/text.py) from those of the pieces, without holding it in memory."""
    offsets = name in ("rows", "row_sentences")
    sizes = []
    for part in parts:
        array = load_array(part, f"{split}_{name}")
        sizes.append(len(array) - offsets)
    with whole(path) as file:
        header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, header | {"shape": (sum(sizes) + offsets,)})
        if offsets:
            file.write(np.zeros(1, array.dtype).tobytes())
        before = 0
        for part in parts:
            array = load_array(part, f"{split}_{name}")
            if offsets:
                array, before = array[1:] + before, before + array[-1]
            file.write(np.ascontiguousarray(array))


# The command


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes text as the folder that data.text.open_text reads; the arguments are those of Flags.

    The passes: unpack what is packed and cut it into pieces; learn a vocabulary; encode and pack the pieces; join them.
    Memory: about 0.5 GB per worker, and what learning takes for the words of the sample. Disk: the result twice, and
    packed text unpacked, in the folder `parts` until the end.

    Returns: the contents of report.json.
    Raises InputError: no such text, text that cannot be used, or `out` holds something prepared differently.
    """
    flags = _completed(Flags(str(data), str(out), workers=workers, **flags))
    source = Path(data).expanduser()
    found = find_files(source) if source.exists() else splits.Files()
    files = {split: paths for split in SPLITS if (paths := getattr(found, split))}
    loaded = pipeline.Splits()
    unread = f"; not read: {splits.shown(path.relative_to(source) for path in found.unread)}" if found.unread else ""
    if files and "train" not in files:
        what = "has only validation text; expected other *.txt or *.txt.gz files for training"
        raise InputError(f"{data} {what}{unread}")
    tables = splits.below(source, "*.parquet") if source.is_dir() else []
    if files and tables:
        both = f"text ({splits.shown(files['train'])}) as well as parquet files ({splits.shown(tables)})"
        raise InputError(f"{data} has {both}; expected one of them: move the other to a folder of its own")
    if found.left_out and not files and not tables:
        raise InputError(f"{data} has only test text ({splits.shown(found.left_out)}); expected text to train on")
    if not files:
        loaded = load_rows(flags.data, flags.config, flags.column)
    folder = source if source.is_dir() else source.parent
    paths = itertools.chain.from_iterable(files.values())
    sources = [{"name": str(path.relative_to(folder)), "bytes": path.stat().st_size} for path in paths]
    sources += [{"name": f"{data}, {split}", "rows": len(rows)} for split, rows in loaded.rows.items()]
    names = dict(loaded.names)
    for split, paths in files.items():
        names[split] = [str(path.relative_to(folder)) for path in paths]
    names.setdefault("valid", [f"{flags.valid_share:.2%} of their documents, by a hash"])
    left_out = loaded.left_out + [str(path.relative_to(folder)) for path in (*found.left_out, *found.unread)]
    read_from = splits.read_from(splits.shown(names["train"]), splits.shown(names["valid"]), left_out)
    print(splits.sentence(read_from), flush=True)
    job = Preparation(flags, sources)
    if report := job.finished():
        return report

    piece_bytes = job.begin("piece_bytes", PIECE_BYTES)
    pieces = {name: cut(paths, piece_bytes) for name, paths in _plain_files(job, flags, files, loaded.rows).items()}
    share = 0.0 if "valid" in pieces else flags.valid_share
    folder = job.out / "tokenizer"
    job.run(_make_tokenizer, [(flags, pieces["train"], share, folder)], "tokenizer")
    room = capacity(flags.length, flags.pairs)
    tasks = [
        (piece, split, share, folder, room, flags.pairs, job.parts / f"{split}.{number:06d}.npz")
        for split, its_pieces in pieces.items()
        for number, piece in enumerate(its_pieces)
    ]
    job.run(_encode_piece, tasks, "encoding")
    encoded = [task[-1] for task in tasks]
    figures = {"vocabulary": len(AutoTokenizer.from_pretrained(folder, local_files_only=True))}
    for split in SPLITS:
        figures[split] = _split_report(encoded, split, room)
        if not figures[split]["rows"]:
            asked = f"with --valid-share {share}" if split == "valid" and share else "at all"
            raise InputError(
                f"{data} has no documents for the {split} split {asked}; delete {job.out} and give more text (blank "
                "lines end documents), a larger --valid-share, or files valid….txt"
            )
    joins = [(encoded, split, name, job.out / f"{split}.{name}.npy") for split in SPLITS for name in ARRAYS]
    job.run(_join, joins, "joining")
    return job.finish(figures | {"read_from": read_from, "seconds": job.seconds})


def _completed(flags: Flags) -> Flags:
    """Returns the flags with the defaults that depend on the kind. Raises InputError."""
    vocab_size = flags.vocab_size or VOCABULARIES.get(flags.kind, 0)
    flags = dataclasses.replace(flags, pairs=flags.pairs or flags.kind == "xlnet", vocab_size=vocab_size)
    check_rows(flags.kind, flags.length, flags.pairs)
    least = SMALLEST[flags.kind]
    expect(flags, "vocab_size", bool(flags.tokenizer) or vocab_size >= least, f"at least {least} for {flags.kind}")
    expect(flags, "valid_share", 0 < flags.valid_share < 1, "a share between 0 and 1, such as 0.01")
    expect(flags, "sample", flags.sample >= 1, "at least 1")
    return flags


def _plain_files(job: Preparation, flags: Flags, files: dict[str, list[Path]], loaded: dict) -> dict:
    """Unpacks what is packed and dumps rows; returns the plain files of each split, with their names for messages."""
    copies = {job.parts / f"{split}.{n:06d}.txt": path for split in files for n, path in enumerate(files[split])}
    unpacked = iter(job.unpack(copies))
    plain = {split: [(next(unpacked), str(path)) for path in paths] for split, paths in files.items()}
    for split, rows in loaded.items():
        copy = job.parts / f"{split}.txt"
        if not copy.exists():
            _dump(rows, flags.column, copy)
        plain[split] = [(copy, f"{flags.data}, split {split}")]
    for paths in plain.values():
        if not any(path.stat().st_size for path, _ in paths):
            raise InputError(f"{paths[0][1]} is empty; expected a sentence or a paragraph per line")
    return plain


def _split_report(encoded: list[Path], split: str, room: int) -> dict:
    counts = sum(load_array(part, f"{split}_counts") for part in encoded).tolist()
    counts = dict(zip(("documents", "empty_sentences", "sentences", "cut_sentences", "unknown"), counts, strict=True))
    ends = [load_array(part, f"{split}_rows") for part in encoded]
    rows, tokens = sum(len(one) - 1 for one in ends), sum(int(one[-1]) for one in ends)
    report = {"documents": counts["documents"], "sentences": counts["sentences"], "tokens": tokens, "rows": rows}
    report |= {"padding": round(1 - tokens / max(rows * room, 1), 4)}
    report |= {"unknown_share": round(counts["unknown"] / max(tokens, 1), 6)}
    return report | {"cut_sentences": counts["cut_sentences"], "dropped_empty_sentences": counts["empty_sentences"]}


def _summary(report: dict) -> None:
    for split in SPLITS:
        print(f"{split}: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report[split].items()))
    print(f"{report['vocabulary']} tokens in the vocabulary; {report['seconds']} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
