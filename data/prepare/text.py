"""Prepares text for pretraining, once before training: learns a vocabulary, turns text into rows of tokens.

    python -m data.prepare.text --data TEXT [--out DIR] --kind bert --length 128  (make data DATASET=text DATA=TEXT)

TEXT is one of
  * a text file, plain or .gz, in UTF-8; or a folder of such files *.txt and *.txt.gz, also in folders inside it. A line
    is a sentence or a paragraph; a blank line ends a document, and so does the end of a file. Files named valid…, val…
    or dev… are the validation text, and those named test… are left out.
  * the id of a `datasets` data set on the hub with a column of text (of which the configuration is --config), or a
    folder of its parquet files. A row is a document. A split validation, if there is one, is the validation text.
Where there is no validation text, --valid-share of the documents become it. Which these are depends on the words of a
document alone (a hash), so that documents that are there twice are on the same side.

The result has the layout that data/text.py reads.

Sentences. A line is cut after . ! ? … (and quotes and brackets that close) where a space follows, and then a capital
letter or a digit, perhaps after an opening quote or bracket; but not after a single capital (J. Smith) nor after Mr Mrs
Ms Dr St Prof vs etc. 。！？ end a sentence without a space. This is cheap and sometimes wrong. That does little harm: a
row is made of sentences that follow one another, and a wrong border only moves where a row, or its second segment, may
begin.

Tokens. Special tokens in the text are text: "[SEP]" is five characters. The space before a sentence is kept, since
byte-level encoding tells words by it; the first sentence of a line has none.

Rows are packed piece by piece, of about 8 MB of text each, in processes; so at the end of each piece a row is not full.
"""

import dataclasses
import gzip
import itertools
import multiprocessing
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.prepare.pipeline import read_json, run, whole, write_json
from data.text import ARRAYS, capacity, check_rows, pack_rows
from data.vocabulary import SMALLEST, learn
from errors import InputError

PIECE_BYTES = 8_000_000  # of text, that a worker handles at once: what a kill costs at most
ENCODED = 10_000  # sentences given to the tokenizer at once; its results take much memory
VOCABULARIES = {"bert": 30_522, "distilbert": 30_522, "roberta": 50_265, "xlnet": 32_000}  # of the published models
SPLITS = ("train", "valid")
VALID_NAMES = ("valid", "val", "dev", "validation")

BLANK = re.compile(rb"\n[ \t\r\f\v]*\n")
ABBREVIATIONS = "".join(rf"(?<!\b{word})" for word in ("[A-Z]", "Mr", "Mrs", "Ms", "Dr", "St", "Prof", "vs", "etc"))
# Followed by what is no lower-case letter: [^\W_a-zà-öø-ÿ] are letters and digits but those.
END = re.compile(rf"""{ABBREVIATIONS}(?:[.!?…]+["'”’»)\]]*(?=\s+["'“‘«(\[¿¡]*[^\W_a-zà-öø-ÿ])|[。！？]+[」』”）]*)""")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares text for pretraining: learns a vocabulary, turns text into rows of tokens.

    The same command again goes on where a killed one stopped. The result depends neither on that nor on --workers; but
    for a kill while XLNet's vocabulary is learnt, which is not the same to the last bit twice.
    """

    data: str  # text file, folder of them or of parquet files, or id of a data set on the hub
    out: str = ""  # folder of the result; default: a folder `prepared` beside the file, or in the folder
    kind: str = "bert"  # bert, distilbert, roberta or xlnet: sort of vocabulary, and of rows
    length: int = 128  # places of a row, special tokens included
    pairs: bool = False  # for two segments a row, as next-sentence prediction needs them; xlnet always has them
    vocab_size: int = 0  # tokens of the vocabulary that is learnt; default: as many as the published model has
    tokenizer: str = ""  # folder or hub id of a tokenizer to use instead
    config: str = ""  # of a data set: its configuration
    column: str = "text"  # of a data set: the column of text
    valid_share: float = 0.01  # of the documents, for validation, where there is no validation text
    sample: int = 1_000_000_000  # bytes of text at most from which the vocabulary is learnt
    workers: int = os.cpu_count() or 1  # processes; learning a vocabulary has threads on all cores


class Stretch(NamedTuple):
    """A stretch of a plain text file, from the beginning of a document to the end of one."""

    path: str
    name: str  # for messages: the user's file
    start: int  # bytes
    stop: int

    def documents(self) -> Iterator[list[str]]:
        """Lists of lines, none of them empty. Raises InputError where they are not UTF-8."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            with open(self.path, "rb") as file:
                line = file.read(self.start + error.start).count(b"\n") + 1
            what = f"is not UTF-8 (byte 0x{data[error.start]:02x}: {error.reason}); convert it to UTF-8"
            raise InputError(f"{self.name} line {line} {what}, or mend this line") from error
        if self.start == 0:
            text = text.removeprefix("\ufeff")
        document = []
        for line in text.split("\n"):  # and at no other sign that Python takes for the end of a line
            if line := line.strip():
                document.append(line)
            elif document:
                yield document
                document = []
        if document:
            yield document


def split_sentences(line: str) -> list[str]:
    """A line in sentences, by the rule at the top; all but the first keep one space in front, if there was any."""
    sentences, start = [], 0
    for match in END.finditer(line):
        sentences.append(line[start : match.end()])
        start = match.end()
    sentences.append(line[start:])
    spaced = [(" " if sentence[:1].isspace() else "") + sentence.strip() for sentence in sentences]
    return [sentence for sentence in spaced if sentence.strip()]


def is_valid(document: Sequence[str], share: float) -> bool:
    """Whether a document is one of the share for validation."""
    return zlib.crc32(" ".join(" ".join(document).split()).encode()) < share * 2**32


# Finding the text


def find_files(data: Path) -> dict[str, list[Path]]:
    """Text files of each split, in the order of their names; of twins, plain rather than .gz."""
    if data.is_file():
        return {"train": [data]}
    paths = {}
    for path in sorted([*data.rglob("*.txt.gz"), *data.rglob("*.txt")], key=lambda path: path.suffix == ".txt"):
        if path.is_file() and "prepared" not in path.relative_to(data).parts[:-1]:
            paths[str(path).removesuffix(".gz")] = path
    files = {split: [] for split in SPLITS}
    for _, path in sorted(paths.items()):
        if path.name.lower().startswith("test"):
            continue
        split = "valid" if path.name.lower().startswith(("valid", "val.", "val-", "val_", "dev")) else "train"
        files[split].append(path)
    return {split: found for split, found in files.items() if found}


def load_rows(data: str, config: str, column: str) -> dict[str, "datasets.Dataset"]:  # noqa: F821
    """The splits train and, if there is one, valid of a `datasets` data set. Raises InputError."""
    import datasets  # two seconds, and text files do not need it

    folder = Path(data).expanduser()
    try:
        if (folder / "dataset_dict.json").exists():
            found = datasets.load_from_disk(str(folder))
        elif (folder / "dataset_info.json").exists():
            found = {"train": datasets.load_from_disk(str(folder))}
        else:
            found = datasets.load_dataset(str(folder) if folder.is_dir() else data, config or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        what = (
            "cannot be read by datasets" if folder.is_dir() else "is neither a file, a folder nor a data set of the hub"
        )
        raise InputError(f"{data} {what}: {str(error).partition(chr(10))[0]}") from error
    if "train" not in found:
        raise InputError(f"{data} has the splits {', '.join(found)}; expected train, and validation if any")
    names = {"train": "train", "valid": next((name for name in VALID_NAMES if name in found), "")}
    splits = {split: found[name] for split, name in names.items() if name}
    for split, rows in splits.items():
        if column not in rows.column_names:
            has = f"the columns {', '.join(rows.column_names)}"
            raise InputError(f"{data}, split {split}, has {has}; expected a column {column}, or choose with --column")
    return splits


def _unpack(path: Path, plain: Path) -> None:
    try:
        with gzip.open(path, "rb") as packed, whole(plain) as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be decompressed: {error}; fetch it again") from error


def _dump(rows, column: str, plain: Path) -> None:
    """Writes a split of a data set as text: a row is a document, whose blank lines are left out."""
    with whole(plain) as file:
        for batch in rows.iter(1000):
            for text in batch[column]:
                lines = [line for line in (text or "").split("\n") if line.strip()]
                file.write(("\n".join(lines) + "\n\n").encode())


def cut(paths: Sequence[tuple[Path, str]], piece_bytes: int) -> list[list[Stretch]]:
    """Files, with their names for messages, in pieces of about so many bytes, which end where documents end."""
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
    """The first place from `start` on where a blank line has just ended; or the end of the file."""
    file.seek(start)
    data, at = b"", start
    while block := file.read(1 << 20):
        data += block
        if match := BLANK.search(data):
            return at + match.end()
        # A blank line may be cut by the end of the block; what comes before its line feed is done with.
        keep = max(data.rfind(b"\n"), 0)
        keep = keep if not data[keep:].strip() else len(data)
        at, data = at + keep, data[keep:]
    return at + len(data)


# The vocabulary


def _sampled(pieces: list[list[Stretch]], share: float, sample: int) -> Iterator[str]:
    """Lines of the training documents, of all pieces or of some that are evenly spaced, up to `sample` bytes."""
    total = sum(stretch.stop - stretch.start for piece in pieces for stretch in piece)
    step = max(1.0, total / sample)
    chosen = sorted({int(number) for number in np.arange(0, len(pieces), step)})
    left = sample
    for number in chosen:
        for stretch in pieces[number]:
            for document in stretch.documents():
                if not is_valid(document, share):
                    for line in document:
                        left -= len(line)
                        if left < 0:
                            return
                        yield line


def _save_tokenizer(tokenizer, folder: Path) -> None:
    """save_pretrained, to a folder that is whole or not there."""
    partial = folder.with_name(f"tokenizer.{os.getpid()}.partial")
    tokenizer.save_pretrained(partial)
    os.replace(partial, folder)


def _open_tokenizer(name: str, kind: str):
    """A tokenizer of the user's that can be used for this kind. Raises InputError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
        )
    except Exception as error:  # transformers and tokenizers raise all sorts
        what = f"the tokenizer {name} cannot be opened: {str(error).partition(chr(10))[0]}"
        raise InputError(f"{what}; expected a folder of save_pretrained or an id on the hub") from error
    missing = [
        token for token in ("cls_token", "sep_token", "pad_token", "mask_token") if getattr(tokenizer, token) is None
    ]
    if missing:
        raise InputError(f"the tokenizer {name} has no {', '.join(missing)}; expected one of a {kind} model")
    side = "left" if kind == "xlnet" else "right"
    if tokenizer.padding_side != side or not hasattr(tokenizer, "backend_tokenizer"):
        what = f"is a {type(tokenizer).__name__}, which pads on the {tokenizer.padding_side}"
        raise InputError(f"the tokenizer {name} {what}; expected a fast one that pads on the {side}, as {kind} has it")
    return tokenizer


# Rows


class _Encoder:
    """Sentences to ids."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Special symbols in the text are text. A copy, since transformers would set this back.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.unknown, self.separator = tokenizer.unk_token_id, tokenizer.sep_token_id
        self._specials = [number for number in tokenizer.all_special_ids if number != self.unknown]
        self.dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)

    def __call__(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of all sentences, one after another, and how many each has."""
        tokens, sizes = [], []
        for start in range(0, len(sentences), ENCODED):
            batch = sentences[start : start + ENCODED]
            ids = [one.ids for one in self._backend.encode_batch_fast(batch, add_special_tokens=False)]
            sizes.append(np.fromiter(map(len, ids), np.int64, len(ids)))
            tokens.append(np.fromiter(itertools.chain.from_iterable(ids), self.dtype, int(sizes[-1].sum())))
        tokens = np.concatenate([np.empty(0, self.dtype), *tokens])
        # What spells a special token can still become one, if its characters are unknown to a Unigram vocabulary.
        if self.unknown is not None and self._specials:
            tokens[np.isin(tokens, self._specials)] = self.unknown
        return tokens, np.concatenate([np.empty(0, np.int64), *sizes])


def _encode_piece(
    piece: list[Stretch], split: str, share: float, tokenizer: Path, room: int, pairs: bool, path: Path
) -> None:
    """Writes the rows of a piece of text. `share`: of the documents of training text, for validation."""
    if multiprocessing.parent_process() is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
    encode = _Encoder(tokenizer)
    texts = {name: [] for name in SPLITS}
    for document in itertools.chain.from_iterable(stretch.documents() for stretch in piece):
        chosen = "valid" if split == "valid" or is_valid(document, share) else "train"
        texts[chosen].append([sentence for line in document for sentence in split_sentences(line)])
    arrays = {}
    for name, documents in texts.items():
        tokens, sizes = encode([sentence for document in documents for sentence in document])
        # Sentences without tokens (control characters, say) are none, and so are documents of them.
        of = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
        counts = np.bincount(of[sizes > 0], minlength=len(documents))
        packed, cut_sentences = pack_rows(
            tokens, sizes[sizes > 0], counts[counts > 0], room, None if pairs else encode.separator
        )
        arrays |= {f"{name}_{part}": array for part, array in zip(ARRAYS, packed, strict=True)}
        unknown = np.count_nonzero(tokens == encode.unknown)
        kept = np.count_nonzero(counts), np.count_nonzero(sizes == 0), np.count_nonzero(sizes), cut_sentences, unknown
        arrays[f"{name}_counts"] = np.array(kept)
    with whole(path) as file:
        np.savez(file, **arrays)


def _load(path: Path, name: str) -> np.ndarray:
    with np.load(path) as arrays:
        return arrays[name]


def _join(parts: list[Path], split: str, name: str, path: Path) -> None:
    """Writes one array of a split (see data/text.py), from those of the pieces, without holding it in memory."""
    offsets = name in ("rows", "row_sentences")
    sizes = []
    for part in parts:
        with np.load(part) as arrays:
            sizes.append(len(arrays[f"{split}_{name}"]) - offsets)
            dtype = arrays[f"{split}_{name}"].dtype
    with whole(path) as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, header | {"shape": (sum(sizes) + offsets,)})
        if offsets:
            file.write(np.zeros(1, dtype).tobytes())
        before = 0
        for part in parts:
            array = _load(part, f"{split}_{name}")
            if offsets:
                array, before = array[1:] + before, before + array[-1]
            file.write(np.ascontiguousarray(array))


# The command


def prepare(
    data: str | Path,
    out: str | Path = "",
    kind: str = "bert",
    length: int = 128,
    pairs: bool = False,
    vocab_size: int = 0,
    tokenizer: str = "",
    config: str = "",
    column: str = "text",
    valid_share: float = 0.01,
    sample: int = 1_000_000_000,
    workers: int = 1,
) -> dict:
    """Text to the folder that data.text.open_text reads; the arguments are those of Flags.

    The passes: unpack what is packed, cut it in pieces; learn a vocabulary; encode and pack the pieces; join them. Each
    goes on where it was killed, and report.json is written last. Memory: about 0.5 GB a worker, and what learning takes
    for the words of the sample. Disk: the result twice, and packed text unpacked, in the folder `parts` until it is
    done. Files are known by their names and sizes: after a change that keeps the size, delete `out`.

    Returns: the contents of report.json.
    Raises InputError: no such text, text that cannot be used, or `out` holds something prepared differently.
    """
    began = time.monotonic()
    pairs, vocab_size = pairs or kind == "xlnet", vocab_size or VOCABULARIES.get(kind, 0)
    _check_flags(kind, length, pairs, vocab_size, tokenizer, valid_share, sample, workers)
    flags = {"kind": kind, "length": length, "pairs": pairs, "vocab_size": vocab_size, "tokenizer": tokenizer}
    flags |= {"config": config, "column": column, "valid_share": valid_share, "sample": sample}
    source = Path(data).expanduser()
    files, splits = (find_files(source) if source.exists() else {}), None
    if files:
        if "train" not in files:
            raise InputError(f"{data} has only validation text; expected other *.txt or *.txt.gz files for training")
        sources = [
            {"name": str(path.relative_to(source)) if source.is_dir() else path.name, "bytes": path.stat().st_size}
            for split in files
            for path in files[split]
        ]
    else:
        splits = load_rows(_data_set(data, source), config, column)
        sources = [{"name": f"{data}, {split}", "rows": len(rows)} for split, rows in splits.items()]
    if not out and not source.exists():
        raise InputError(f"{data} is a data set of the hub; give the folder of the result with --out")
    out = Path(out).expanduser() if out else (source if source.is_dir() else source.parent) / "prepared"
    parts, plan = out / "parts", {"flags": flags, "sources": sources}

    if (out / "report.json").exists():
        report = read_json(out / "report.json")
        _check_plan(plan, report, out)
        shutil.rmtree(parts, ignore_errors=True)
        print(f"{out} is already prepared: {report['train']['rows']} rows", flush=True)
        return report
    try:
        parts.mkdir(parents=True, exist_ok=True)
        if (parts / "plan.json").exists():
            _check_plan(plan, read_json(parts / "plan.json"), out)
            print(f"going on with the unfinished preparation in {out}", flush=True)
        else:
            write_json(parts / "plan.json", plan | {"piece_bytes": PIECE_BYTES})
    except OSError as error:
        what = f"{error.filename} cannot be written: {error.strerror}"
        raise InputError(f"{what}; choose another folder with --out") from error

    # Pieces are cut where the first call cut them.
    piece_bytes = read_json(parts / "plan.json")["piece_bytes"]
    pieces = _open_pieces(files, splits, data, column, parts, piece_bytes, workers)
    share = 0.0 if "valid" in pieces else valid_share
    folder = out / "tokenizer"
    if not folder.exists():
        if tokenizer:
            _save_tokenizer(_open_tokenizer(tokenizer, kind), folder)
        else:
            print("learning a vocabulary", flush=True)
            _save_tokenizer(learn(_sampled(pieces["train"], share, sample), kind, vocab_size), folder)

    room = capacity(length, pairs)
    tasks = []
    for split, its_pieces in pieces.items():
        for number, piece in enumerate(its_pieces):
            tasks.append((piece, split, share, folder, room, pairs, parts / f"{split}.{number:06d}.npz"))
    run(_encode_piece, tasks, workers, "encoding")
    encoded = [task[-1] for task in tasks]
    report = plan | {"vocabulary": _vocabulary(folder)}
    for split in SPLITS:
        report[split] = _split_report(encoded, split, room)
        if not report[split]["rows"]:
            asked = f"with --valid-share {valid_share}" if split == "valid" and share else "at all"
            what = f"{data} has no documents for the {split} split {asked}"
            raise InputError(
                f"{what}; expected more text (blank lines end documents), a larger --valid-share, or files valid….txt: "
                f"delete {out} before"
            )
    joins = [(encoded, split, name, out / f"{split}.{name}.npy") for split in SPLITS for name in ARRAYS]
    run(_join, joins, workers, "joining")
    report["seconds"] = round(time.monotonic() - began, 1)  # of this call, which may have gone on from another
    for partial in out.glob("*.partial"):  # of a call that was killed
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    write_json(out / "report.json", report)
    shutil.rmtree(parts)
    return report


def _check_flags(kind, length, pairs, vocab_size, tokenizer, valid_share, sample, workers) -> None:
    check_rows(kind, length, pairs)
    if not tokenizer and vocab_size < SMALLEST[kind]:
        raise InputError(f"vocab-size {vocab_size} is too small; expected {SMALLEST[kind]} or more for {kind}")
    if not 0 < valid_share < 1:
        raise InputError(f"valid-share {valid_share} is out of range; expected a share between 0 and 1, such as 0.01")
    for name, value in (("sample", sample), ("workers", workers)):
        if value < 1:
            raise InputError(f"{name} {value} is out of range; expected 1 or more")


def _data_set(data: str | Path, folder: Path) -> str:
    """`data` if it can be a data set of `datasets`; else an InputError that says what is missing."""
    text = "text files (*.txt, *.txt.gz)"
    if folder.is_dir():
        markers = ("dataset_dict.json", "dataset_info.json")
        if any((folder / name).exists() for name in markers) or any(folder.glob("**/*.parquet")):
            return str(data)
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise InputError(f"{data} has neither {text} nor parquet files; found {found}")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(data)) or str(data).endswith((".txt", ".gz")):
        raise InputError(f"there is no {data}; expected a file or folder of {text}, or the id of a data set on the hub")
    return str(data)


def _check_plan(plan: dict, found: dict, out: Path) -> None:
    for what, now, before in (
        *((f"flag {key}", plan["flags"][key], found["flags"].get(key)) for key in plan["flags"]),
        ("text", plan["sources"], found["sources"]),
    ):
        if now != before:
            if what == "text":
                now, before = (_described(sources) for sources in (now, before))
            raise InputError(
                f"{out} was prepared with other {what}: {before}, now {now}; choose another folder or delete this one"
            )


def _described(sources: list[dict]) -> str:
    names = [
        f"{s['name']} ({s['bytes']} bytes)" if "bytes" in s else f"{s['name']} ({s['rows']} rows)" for s in sources
    ]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _open_pieces(files, splits, data, column: str, parts: Path, piece_bytes: int, workers: int) -> dict:
    """{split: pieces}: unpacks what is not yet."""
    plain, unpack = {split: [] for split in (files or splits)}, []
    for split, paths in files.items():
        for number, path in enumerate(paths):
            copy = parts / f"{split}.{number:06d}.txt"
            if path.suffix == ".gz":
                unpack.append((path, copy))
            plain[split].append((copy if path.suffix == ".gz" else path, str(path)))
    run(_unpack, unpack, workers, "unpacking")
    for split, rows in (splits or {}).items():
        copy = parts / f"{split}.txt"
        if not copy.exists():
            _dump(rows, column, copy)
        plain[split].append((copy, f"{data}, split {split}"))
    pieces = {split: cut(paths, piece_bytes) for split, paths in plain.items()}
    for split, paths in plain.items():
        if not pieces[split]:
            raise InputError(f"{paths[0][1]} is empty; expected a sentence or a paragraph a line")
    return pieces


def _vocabulary(folder: Path) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _split_report(encoded: list[Path], split: str, room: int) -> dict:
    counts = sum(_load(part, f"{split}_counts") for part in encoded).tolist()
    counts = dict(zip(("documents", "empty_sentences", "sentences", "cut_sentences", "unknown"), counts, strict=True))
    ends = [_load(part, f"{split}_rows") for part in encoded]
    rows, tokens = sum(len(one) - 1 for one in ends), sum(int(one[-1]) for one in ends)
    report = {"documents": counts["documents"], "sentences": counts["sentences"], "tokens": tokens, "rows": rows}
    report |= {"padding": round(1 - tokens / max(rows * room, 1), 4)}
    report |= {"unknown_share": round(counts["unknown"] / max(tokens, 1), 6)}
    return report | {"cut_sentences": counts["cut_sentences"], "dropped_empty_sentences": counts["empty_sentences"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: prepares, and says what came of it; an InputError becomes one line and exit code 2."""
    import tyro

    flags = tyro.cli(Flags, args=arguments)
    try:
        report = prepare(**dataclasses.asdict(flags))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    for split in SPLITS:
        part = report[split]
        print(f"{split}: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in part.items()))
    print(f"{report['vocabulary']} tokens in the vocabulary; {report['seconds']} s")


if __name__ == "__main__":
    main()
