"""Prepares parallel text for translation, once before training: cleans it, learns byte-pair encoding, binarises it.

    python -m data.prepare.wmt --data TEXT [--out DIR] [--source en --target de]  (make data DATASET=wmt18 DATA=TEXT)

TEXT is one of
  * a folder of plain text, a sentence a line, each plain or .gz: train.en and train.de; valid, val or dev; and test. Of
    newstest2017.en and the like the newest is the test text, and the one before it the validation text, where the
    folder has no others. --valid and --test choose others, by the name without the language.
  * a folder of parquet files with a column "translation" of {"en": …, "de": …}, or the id of such a data set on the hub
    (wmt/wmt18, of which the configuration is --config, de-en by default).

The result has fairseq-preprocess' layout (see data/wmt.py), with one dictionary for both languages.

Cleaning. Training pairs are dropped, each counted under the first of these reasons that holds:
    empty         a side has no characters but spaces
    too_long      a side has more than --max-tokens (250) words or, later, pieces
    identical     both sides are the same
    not_text      less than --letters (half) of a side's characters other than spaces are letters: tables, lists, markup
    duplicate     the same pair came before (a hash of 64 bits is compared)
    length_ratio  one side has more than --ratio (1.5) times the pieces of the other
The limits of 250 and 1.5, in pieces, are those of fairseq's recipe for WMT (examples/translation/prepare-wmt14en2de.sh,
with clean-corpus-n.perl of Moses). The language is not identified. Validation and test text is kept whole, always.

Byte-pair encoding is learnt from both languages together, from --sample pairs that are evenly spaced. Text is
normalised by Unicode's NFKC, and spaces (control characters and invisible ones count as such) become single. Words,
numbers and punctuation are never in one piece. The alphabet is printable ASCII and the most frequent characters that
make up --coverage of the text; other characters are <unk>.
"""

import dataclasses
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data.fairseq_format import EOS, SPECIALS, UNK, Dictionary, token_dtype, write_index, write_mmap
from data.prepare.pipeline import read_json, run, whole, write_json
from errors import InputError

CHUNK_LINES = 100_000  # pairs that a worker handles at once: what a kill costs at most
ENCODED_LINES = 10_000  # lines given to the tokenizer at once; its results take much memory
VALID_NAMES = ("valid", "val", "dev", "validation")
NEWSTEST = re.compile(r"newstest(\d{4})\w*")
REASONS = ("empty", "too_long", "identical", "not_text", "duplicate", "length_ratio")
EMPTY, TOO_LONG, IDENTICAL, NOT_TEXT, DUPLICATE, LENGTH_RATIO = range(1, 7)  # 0: kept

# As in sentencepiece's nmt_nfkc: control characters and invisible ones, and its own sign for a space.
SPACES = r"[\s\p{Cc}\x{200B}-\x{200F}\x{2060}\x{FEFF}\x{FFFD}▁]+"
WORDS = r"▁?[\p{L}\p{M}]+|▁?\p{N}+|▁?[^\p{L}\p{M}\p{N}▁]+"
ASCII = "".join(map(chr, range(0x21, 0x7F)))


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares parallel text for translation: cleans it, learns byte-pair encoding, binarises it.

    The same command again goes on where a killed one stopped. The result depends neither on that nor on --workers.
    """

    data: str  # folder of parallel text or of parquet files, or id of a data set on the hub
    out: str = ""  # folder of the result; default: a folder `prepared` in that of the text
    source: str = "en"  # language to translate from, as in the files' names
    target: str = "de"  # language to translate to
    config: str = ""  # of a data set: its configuration; default: the one of both languages, such as de-en
    valid: str = ""  # of a folder of text: name of the validation text; default: valid, val, dev or newstest
    test: str = ""  # of a folder of text: name of the test text; default: test or newstest, if there is one
    vocabulary: int = 32_000  # symbols of the joint dictionary, rounded up to a multiple of 8
    max_tokens: int = 250  # training pairs of which a side is longer are dropped
    ratio: float = 1.5  # training pairs of more different lengths are dropped; 0: none
    letters: float = 0.5  # training pairs of which a side has a smaller share of letters are dropped; 0: none
    keep_duplicates: bool = False  # whether training pairs that came before are kept
    coverage: float = 0.9999  # share of all characters that the alphabet covers
    sample: int = 5_000_000  # pairs at most from which byte-pair encoding is learnt
    workers: int = os.cpu_count() or 1  # processes; learning byte-pair encoding has threads on all cores


class Text(NamedTuple):
    """Lines of one language in a plain file."""

    path: Path  # plain: the user's own file, or a copy of it in `parts`
    name: str  # for messages: the user's file
    bounds: list[int]  # bytes at which chunks of lines begin, and the file's size
    chunk_lines: int

    def lines(self, chunk: int) -> list[str]:
        """The lines of a chunk. Only \\n ends a line. Raises InputError where they are not UTF-8."""
        start, stop = self.bounds[chunk : chunk + 2]
        with open(self.path, "rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            line = chunk * self.chunk_lines + data[: error.start].count(b"\n") + 1
            what = f"is not UTF-8 (byte 0x{data[error.start]:02x}: {error.reason}); convert it to UTF-8"
            raise InputError(f"{self.name} line {line} {what}, or mend this line") from error
        if chunk == 0:
            text = text.removeprefix("\ufeff")
        return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


# Finding the text


def find_text(
    folder: Path, source: str, target: str, valid: str = "", test: str = ""
) -> dict[str, tuple[Path, Path]] | None:
    """The files of each split, of source and target language; None if there is no training text of these languages.

    Raises InputError if one language of a split is missing, or there is no validation text.
    """
    there: dict[str, dict[str, Path]] = {}  # name without language -> language -> path, plain rather than .gz
    for path in sorted(folder.iterdir(), reverse=True):
        stem, _, language = path.name.removesuffix(".gz").rpartition(".")
        if language in (source, target) and stem and path.is_file():
            there.setdefault(stem, {})[language] = path
    if "train" not in there:
        return None
    newstests = sorted((stem for stem in there if NEWSTEST.fullmatch(stem)), key=lambda stem: (stem[8:12], stem))
    names = [name for name in VALID_NAMES if name in there][:1] or newstests[-2:][:1]
    names = {"train": "train", "valid": valid or "".join(names)}
    rest = [name for name in newstests[-1:] if name != names["valid"]]
    names["test"] = test or ("test" if "test" in there else "".join(rest))
    if not names["valid"]:
        expected = f"valid.{source} and valid.{target} (or val, dev, newstest…; plain or .gz)"
        raise InputError(f"{folder} has no validation text; expected {expected}, or name it with --valid")
    splits = {}
    for split, name in names.items():
        missing = [language for language in (source, target) if language not in there.get(name, {})]
        if name and missing:
            raise InputError(f"{folder} has no {name}.{missing[0]} (plain or .gz); expected it for the {split} split")
        if name:
            splits[split] = there[name][source], there[name][target]
    return splits


def load_splits(data: str, config: str, source: str, target: str) -> dict[str, "datasets.Dataset"]:  # noqa: F821
    """The splits train, valid and, if there is one, test of a `datasets` data set. Raises InputError."""
    import datasets  # two seconds, and text files do not need it

    folder = Path(data).expanduser()
    configs = [config] if config else [f"{target}-{source}", f"{source}-{target}"]
    try:
        if (folder / "dataset_dict.json").exists():
            found = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            if config and not (folder / config).is_dir():
                raise InputError(f"{data} has no folder {config}; expected one for --config, or leave the flag out")
            inner = next((folder / name for name in configs if (folder / name).is_dir()), folder)
            found = datasets.load_dataset(str(inner))
        else:
            names = datasets.get_dataset_config_names(data)
            chosen = [name for name in configs if name in names]
            if not chosen:
                raise InputError(
                    f"{data} has the configurations {', '.join(names)}; expected {' or '.join(configs)}, or choose one "
                    "with --config"
                )
            found = datasets.load_dataset(data, chosen[0])
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        what = "cannot be read by datasets" if folder.is_dir() else "is neither a folder nor a data set of the hub"
        raise InputError(f"{data} {what}: {str(error).partition(chr(10))[0]}") from error
    names = {"train": "train", "valid": next((name for name in VALID_NAMES if name in found), ""), "test": "test"}
    if "train" not in found or not names["valid"]:
        raise InputError(f"{data} has the splits {', '.join(found)}; expected train and validation, and test if any")
    splits = {split: found[name] for split, name in names.items() if name in found}
    for split, rows in splits.items():
        kind = rows.features.get("translation")
        languages = getattr(kind, "languages", None) or list(kind or ())
        if source not in languages or target not in languages:
            has = f"the columns {', '.join(rows.column_names)}"
            if kind is not None:
                has = f"the languages {', '.join(languages)}"
            expected = f'expected a column "translation" with "{source}" and "{target}"'
            raise InputError(f"{data}, split {split}, has {has}; {expected}")
    return splits


def _unpack(path: Path, plain: Path) -> None:
    try:
        with gzip.open(path, "rb") as packed, whole(plain) as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be decompressed: {error}; fetch it again") from error


def _dump(rows, languages: tuple[str, str], plain: tuple[Path, Path]) -> None:
    """Writes a split of a data set as two files of text; line breaks in a sentence become spaces."""
    with whole(plain[0]) as first, whole(plain[1]) as second:
        for batch in rows.iter(10_000):
            for language, file in zip(languages, (first, second), strict=True):
                sentences = (pair[language] or "" for pair in batch["translation"])
                file.write("".join(re.sub(r"[\r\n]+", " ", text) + "\n" for text in sentences).encode())


def _cut(path: Path, name: str, chunk_lines: int, cut: Path) -> None:
    """Counts a file's lines, and notes the bytes at which every chunk of lines begins."""
    starts, lines, at, last = [0], 0, 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(16 << 20):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            starts += (at + 1 + ends[chunk_lines - 1 - lines % chunk_lines :: chunk_lines]).tolist()
            lines, at, last = lines + len(ends), at + len(block), block[-1:]
    if not at:
        raise InputError(f"{name} is empty; expected a sentence a line")
    lines += last != b"\n"
    write_json(cut, {"lines": lines, "bounds": [start for start in starts if start < at] + [at]})


# Cleaning


def clean(pairs: Sequence[tuple[str, str]], max_tokens: int, letters: float) -> tuple[np.ndarray, np.ndarray]:
    """Why each pair is dropped, uint8 [n], 0 for none (the reasons that can be told from the text of one pair alone);
    and uint64 [n], a hash of the pair that disregards the number of spaces."""
    why, hashes = np.zeros(len(pairs), np.uint8), []
    for number, (source, target) in enumerate(pairs):
        source_words, target_words = source.split(), target.split()
        source, target = " ".join(source_words), " ".join(target_words)
        hashes.append(hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8).digest())
        if not source or not target:
            why[number] = EMPTY
        elif max(len(source_words), len(target_words)) > max_tokens:
            why[number] = TOO_LONG
        elif source == target:
            why[number] = IDENTICAL
        elif not (_is_text(source_words, letters) and _is_text(target_words, letters)):
            why[number] = NOT_TEXT
    return why, np.frombuffer(b"".join(hashes), "<u8")


def _is_text(words: list[str], letters: float) -> bool:
    """Whether this share or more of a sentence's characters other than spaces are letters or their marks."""
    text = "".join(words)
    needed = letters * len(text)
    if sum(map(str.isalpha, text)) >= needed:  # most often, and fast
        return True
    return sum(unicodedata.category(character)[0] in "LM" for character in text) >= needed


def _clean_chunk(texts: tuple[Text, Text], chunk: int, max_tokens: int, letters: float, path: Path) -> None:
    pairs = list(zip(*(text.lines(chunk) for text in texts), strict=True))
    why, hashes = clean(pairs, max_tokens, letters)
    kept = "".join(line for pair, reason in zip(pairs, why, strict=True) if not reason for line in pair)
    kept = unicodedata.normalize("NFKC", kept)
    characters, counts = np.unique(np.frombuffer(kept.encode("utf-32-le"), "<u4"), return_counts=True)
    with whole(path) as file:
        np.savez(file, why=why, hashes=hashes, characters=characters, counts=counts)


def _load(path: Path, name: str) -> np.ndarray:
    """An array of an .npz file, in memory: maps of hundreds of chunks would be as many open files."""
    with np.load(path) as arrays:
        return arrays[name]


def _find_duplicates(chunks: list[Path], keep_duplicates: bool, path: Path) -> None:
    """Writes the reason of every pair of all chunks, uint8 [n]: those of cleaning, and DUPLICATE."""
    whys = [_load(chunk, "why") for chunk in chunks]
    why = np.concatenate(whys)
    if not keep_duplicates:
        kept = np.flatnonzero(why == 0)
        hashes = [_load(chunk, "hashes")[part == 0] for chunk, part in zip(chunks, whys, strict=True)]
        first = np.unique(np.concatenate(hashes), return_index=True)[1]
        duplicate = np.ones(len(kept), bool)
        duplicate[first] = False
        why[kept[duplicate]] = DUPLICATE
    with whole(path) as file:
        np.save(file, why)


# Byte-pair encoding


def learn_bpe(lines: Iterator[list[str]], vocabulary: int, alphabet: str) -> Tokenizer:
    """Byte-pair encoding of `vocabulary` symbols at most, with fairseq's special symbols first.

    Args:
        lines: lists of sentences, for example of some thousands each.
        alphabet: all characters that are no <unk>, beside the sign for a space.

    Special symbols in the text are text: "<s>" is three characters. Raises InputError if the alphabet does not fit.
    """
    alphabet = sorted({*alphabet, "▁"})
    if vocabulary < len(SPECIALS) + len(alphabet):
        needed = f"its {len(alphabet)} characters and {len(SPECIALS)} special symbols"
        raise InputError(f"vocabulary {vocabulary} is too small for the text; expected more than {needed}")
    tokenizer = _with_model(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIALS),
        min_frequency=2,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),  # these and no others
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].get)
    ids = {symbol: number for number, symbol in enumerate([*SPECIALS, *pieces])}
    merges = [tuple(merge) for merge in learnt["merges"]]
    return _with_model(models.BPE(ids, merges, unk_token=SPECIALS[UNK], fuse_unk=True))


def _with_model(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    normal = [normalizers.NFKC(), normalizers.Replace(Regex(SPACES), " "), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence(normal)
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(split=False), split])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _alphabet(chunks: list[Path], coverage: float) -> str:
    """ASCII, and the most frequent characters that make up this share of all."""
    counts = Counter()
    for chunk in chunks:
        characters, of_each = _load(chunk, "characters"), _load(chunk, "counts")
        counts.update(dict(zip(characters.tolist(), of_each.tolist(), strict=True)))
    counts = [(-count, character) for character, count in counts.items() if not _is_space(chr(character))]
    covered, needed, alphabet = 0, -coverage * sum(count for count, _ in counts), ASCII
    for count, character in sorted(counts):
        if covered >= needed:
            break
        covered, alphabet = covered - count, alphabet + chr(character)
    return alphabet


def _is_space(character: str) -> bool:
    return not normalizers.Replace(Regex(SPACES), "").normalize_str(character)


def _sampled(texts: tuple[Text, Text], why: np.ndarray, sample: int) -> Iterator[list[str]]:
    """Lines of both languages of the kept pairs, or of `sample` of them, evenly spaced."""
    total, before = int((why == 0).sum()), 0
    sample = min(sample, total)
    for chunk in range(len(texts[0].bounds) - 1):
        start = chunk * texts[0].chunk_lines
        kept = np.flatnonzero(why[start : start + texts[0].chunk_lines] == 0)
        chosen = kept[np.diff(np.arange(before, before + len(kept) + 1) * sample // total) > 0]
        before += len(kept)
        for text in texts:
            lines = text.lines(chunk)
            yield [lines[number] for number in chosen]


def _encode(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    pieces = [lines[start : start + ENCODED_LINES] for start in range(0, len(lines), ENCODED_LINES)]
    return [one.ids for piece in pieces for one in tokenizer.encode_batch_fast(piece)]


def _flat(sentences: list[list[int]], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all sentences, each ended by EOS, one after another; and the sizes, int32."""
    sizes = np.array([len(sentence) + 1 for sentence in sentences], np.int32)
    total = int(sizes.sum(dtype=np.int64))
    with_eos = itertools.chain.from_iterable(itertools.chain(sentence, (EOS,)) for sentence in sentences)
    return np.fromiter(with_eos, dtype, total), sizes


def _encode_chunk(texts: tuple[Text, Text], chunk: int, out: Path, max_tokens: int, ratio: float, path: Path) -> None:
    """Encodes the kept pairs of a chunk, drops those that are too long or of too different lengths."""
    if multiprocessing.parent_process() is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    start = chunk * texts[0].chunk_lines
    why = np.load(out / "parts" / "why.npy", mmap_mode="r")[start : start + texts[0].chunk_lines]
    kept = np.flatnonzero(why == 0)
    sides = []
    for text in texts:
        lines = text.lines(chunk)
        sides.append([lines[number] for number in kept])
    encoded = [_encode(tokenizer, lines) for lines in sides]
    sizes = np.array([[len(sentence) for sentence in side] for side in encoded]).reshape(2, len(kept))
    again = np.zeros(len(kept), np.uint8)
    if ratio:
        again[sizes.max(0) > ratio * sizes.min(0)] = LENGTH_RATIO
    again[sizes.max(0) > max_tokens] = TOO_LONG
    again[sizes.min(0) == 0] = EMPTY
    arrays = {"dropped": np.bincount(np.concatenate([why, again]), minlength=len(REASONS) + 1)[1:]}
    symbols = tokenizer.get_vocab_size()
    for name, side, lines in zip(("source", "target"), encoded, sides, strict=True):
        tokens, ends = _flat(list(itertools.compress(side, again == 0)), token_dtype(symbols + 8))
        arrays |= {f"{name}_tokens": tokens, f"{name}_sizes": ends}
        arrays[f"{name}_counts"] = np.bincount(tokens, minlength=symbols)
        arrays[f"{name}_words"] = sum(len(line.split()) for line in itertools.compress(lines, again == 0))
    with whole(path) as file:
        np.savez(file, **arrays)


def _join(chunks: list[Path], side: str, prefix: Path, index: Path) -> None:
    """Writes the .bin file of a language from its chunks, then the .idx file `index`."""
    sizes = []
    with whole(prefix.with_name(prefix.name + ".bin")) as file:
        for chunk in chunks:
            tokens = _load(chunk, f"{side}_tokens")
            file.write(tokens)
            sizes.append(_load(chunk, f"{side}_sizes"))
    partial = index.with_name(index.name + ".partial")
    write_index(partial, np.concatenate(sizes), tokens.dtype)
    os.replace(partial, index)


# The command


def prepare(
    data: str | Path,
    out: str | Path = "",
    source: str = "en",
    target: str = "de",
    config: str = "",
    valid: str = "",
    test: str = "",
    vocabulary: int = 32_000,
    max_tokens: int = 250,
    ratio: float = 1.5,
    letters: float = 0.5,
    keep_duplicates: bool = False,
    coverage: float = 0.9999,
    sample: int = 5_000_000,
    workers: int = 1,
) -> dict:
    """Parallel text to the folder that data.wmt.open_pairs reads; the arguments are those of Flags.

    The passes: unpack what is packed, count lines; clean chunks of lines; find duplicates; learn byte-pair encoding;
    encode the chunks; join them. Each goes on where it was killed, and report.json is written last. Memory: about
    0.5 GB a worker, 30 bytes a training pair for duplicates, and what byte-pair encoding takes for the words of the
    sample. Disk: the result twice, and packed text unpacked, in the folder `parts` until it is done. Files are known by
    their names and sizes: after a change that keeps the size, delete `out`.

    Returns: the contents of report.json.
    Raises InputError: no such text, text that cannot be used, or `out` holds something prepared differently.
    """
    began = time.monotonic()
    flags = {"source": source, "target": target, "config": config, "valid": valid, "test": test}
    flags |= {"vocabulary": vocabulary, "max_tokens": max_tokens, "ratio": ratio, "letters": letters}
    flags |= {"keep_duplicates": keep_duplicates, "coverage": coverage, "sample": sample}
    _check_flags(flags, workers)
    folder = Path(data).expanduser()
    files = find_text(folder, source, target, valid, test) if folder.is_dir() else None
    splits = None
    if files is not None:
        sources = [
            {"name": path.name, "bytes": path.stat().st_size, "split": split}
            for split in files
            for path in files[split]
        ]
    else:
        splits = load_splits(_data_set(data, folder, source, target), config, source, target)
        sources = [{"name": str(data), "rows": len(rows), "split": split} for split, rows in splits.items()]
    if not out and not folder.is_dir():
        raise InputError(f"{data} is a data set of the hub; give the folder of the result with --out")
    out = Path(out).expanduser() if out else folder / "prepared"
    parts, plan = out / "parts", {"flags": flags, "sources": sources}

    if (out / "report.json").exists():
        report = read_json(out / "report.json")
        _check_plan(plan, report, out)
        shutil.rmtree(parts, ignore_errors=True)
        print(f"{out} is already prepared: {report['train']['pairs']} training pairs", flush=True)
        return report
    try:
        parts.mkdir(parents=True, exist_ok=True)
        if (parts / "plan.json").exists():
            _check_plan(plan, read_json(parts / "plan.json"), out)
            print(f"going on with the unfinished preparation in {out}", flush=True)
        else:
            write_json(parts / "plan.json", plan | {"chunk_lines": CHUNK_LINES})
    except OSError as error:
        what = f"{error.filename} cannot be written: {error.strerror}"
        raise InputError(f"{what}; choose another folder with --out") from error

    # Chunks are cut where the first call cut them.
    chunk_lines = read_json(parts / "plan.json")["chunk_lines"]
    texts = _open_texts(files, splits, data, (source, target), parts, chunk_lines, workers)
    train = texts["train"]
    numbers = range(len(train[0].bounds) - 1)

    cleaned = [parts / f"{number:06d}.clean.npz" for number in numbers]
    run(_clean_chunk, [(train, n, max_tokens, letters, cleaned[n]) for n in numbers], workers, "cleaning")
    if not (parts / "why.npy").exists():
        _find_duplicates(cleaned, keep_duplicates, parts / "why.npy")
    why = np.load(parts / "why.npy", mmap_mode="r")
    if (why != 0).all():
        dropped = _reasons(np.bincount(why, minlength=len(REASONS) + 1)[1:])
        raise InputError(f"{train[0].name} has no pair that can be used; dropped: {dropped}")

    if not (out / "tokenizer.json").exists():
        print("learning byte-pair encoding", flush=True)
        tokenizer = learn_bpe(_sampled(train, why, sample), vocabulary, _alphabet(cleaned, coverage))
        with whole(out / "tokenizer.json") as file:
            file.write(tokenizer.to_str(pretty=True).encode())

    encoded = [parts / f"{number:06d}.tokens.npz" for number in numbers]
    run(_encode_chunk, [(train, n, out, max_tokens, ratio, encoded[n]) for n in numbers], workers, "encoding")
    pair = f"{source}-{target}"
    joins = []
    for side, language in (("source", source), ("target", target)):
        prefix = out / f"train.{pair}.{language}"
        joins.append((encoded, side, prefix, prefix.with_name(prefix.name + ".idx")))
    run(_join, joins, workers, "joining")

    report = plan | {"train": _train_report(encoded, len(why), source, target)}
    if not report["train"]["pairs"]:
        dropped = _reasons(report["train"]["dropped"].values())
        raise InputError(f"{train[0].name} has no pair that can be used; dropped: {dropped}")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    dictionary = _dictionary(tokenizer, encoded)
    for split in [name for name in texts if name != "train"]:
        report[split] = _prepare_small(texts[split], (source, target), tokenizer, len(dictionary), out / split)
    for language in (source, target):
        dictionary.save(out / f"dict.{language}.txt")
    report |= {"vocabulary": len(dictionary), "learnt_from_pairs": min(sample, int((why == 0).sum()))}
    report["seconds"] = round(time.monotonic() - began, 1)  # of this call, which may have gone on from another
    for partial in out.glob("*.partial"):  # of a call that was killed
        partial.unlink()
    write_json(out / "report.json", report)
    shutil.rmtree(parts)
    return report


def _check_flags(flags: dict, workers: int) -> None:
    for name in ("source", "target"):
        if not re.fullmatch(r"[A-Za-z0-9_]+", flags[name]):
            raise InputError(f"{name} {flags[name]!r} is no language; expected one as in the files' names, such as en")
    if flags["source"] == flags["target"]:
        raise InputError(f"source and target are both {flags['source']}; expected two languages")
    limits = {"vocabulary": (100, 2**30), "max_tokens": (1, 2**20), "sample": (1, 2**62)}
    for name, (least, most) in limits.items():
        if not least <= flags[name] <= most:
            raise InputError(f"{name} {flags[name]} is out of range; expected {least} to {most}")
    if flags["ratio"] and not flags["ratio"] >= 1:
        raise InputError(f"ratio {flags['ratio']} is out of range; expected 1 or more, or 0 for none")
    for name in ("letters", "coverage"):
        if not 0 <= flags[name] <= 1:
            raise InputError(f"{name} {flags[name]} is out of range; expected a share, 0 to 1")
    if workers < 1:
        raise InputError(f"workers {workers} is out of range; expected 1 or more")


def _data_set(data: str | Path, folder: Path, source: str, target: str) -> str:
    """`data` if it can be a data set of `datasets`; else an InputError that says what is missing."""
    text = f"train.{source} and train.{target} (plain or .gz)"
    if folder.is_file():
        raise InputError(f"{data} is a file; expected a folder with {text}, or with parquet files")
    if folder.is_dir():
        if (folder / "dataset_dict.json").exists() or any(folder.glob("**/*.parquet")):
            return str(data)
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise InputError(f"{data} has neither {text} nor parquet files; found {found}")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(data)):
        raise InputError(f"there is no folder {data}; expected one with {text}, or the id of a data set on the hub")
    return str(data)


def _check_plan(plan: dict, found: dict, out: Path) -> None:
    for what, now, before in (
        *((f"flag {key}", plan["flags"][key], found["flags"].get(key)) for key in plan["flags"]),
        ("text", plan["sources"], found["sources"]),
    ):
        if now != before:
            if what == "text":
                now, before = (", ".join(f"{s['name']} ({_size(s)})" for s in texts) for texts in (now, before))
            raise InputError(
                f"{out} was prepared with other {what}: {before}, now {now}; choose another folder or delete this one"
            )


def _size(source: dict) -> str:
    return f"{source['bytes']} bytes" if "bytes" in source else f"{source['rows']} rows of {source['split']}"


def _open_texts(files, splits, data, languages, parts: Path, chunk_lines: int, workers: int) -> dict:
    """{split: (Text, Text)}: unpacks and cuts what is not yet. Raises InputError if line counts differ."""
    plain, unpack = {}, []  # (split, language) -> plain file, name
    for split in files or splits:
        for side, language in enumerate(languages):
            copy = parts / f"{split}.{language}"
            if files is None:
                plain[split, language] = copy, f"{data}, split {split}, {language}"
            else:
                path = files[split][side]
                plain[split, language] = (copy if path.suffix == ".gz" else path), str(path)
                if path.suffix == ".gz":
                    unpack.append((path, copy))
        if files is None and not all(plain[split, language][0].exists() for language in languages):
            _dump(splits[split], languages, tuple(plain[split, language][0] for language in languages))
    run(_unpack, unpack, workers, "unpacking")
    cuts = {key: parts / f"{key[0]}.{key[1]}.json" for key in plain}
    run(_cut, [(*plain[key], chunk_lines, cuts[key]) for key in plain], workers, "counting lines")
    texts = {}
    for split in files or splits:
        found = [read_json(cuts[split, language]) for language in languages]
        names = [plain[split, language][1] for language in languages]
        if found[0]["lines"] != found[1]["lines"]:
            counts = f"{names[0]} has {found[0]['lines']} lines and {names[1]} {found[1]['lines']}"
            raise InputError(f"{counts}; expected as many: line by line one is the translation of the other")
        paths = [plain[split, language][0] for language in languages]
        both = zip(paths, names, found, strict=True)
        texts[split] = tuple(Text(path, name, cut["bounds"], chunk_lines) for path, name, cut in both)
    return texts


def _prepare_small(texts, languages, tokenizer: Tokenizer, vocabulary: int, split: Path) -> dict:
    """Writes text and tokens of a validation or test split, whole; returns its part of the report."""
    report = {"pairs": 0, "tokens": {}, "unknown_share": {}}
    for text, language in zip(texts, languages, strict=True):
        lines = [line for chunk in range(len(text.bounds) - 1) for line in text.lines(chunk)]
        split.with_name(f"{split.name}.{language}").write_bytes("".join(f"{line}\n" for line in lines).encode())
        tokens, sizes = _flat(_encode(tokenizer, lines), token_dtype(vocabulary))
        write_mmap(split.with_name(f"{split.name}.{languages[0]}-{languages[1]}.{language}"), tokens, sizes, vocabulary)
        report["pairs"] = len(lines)
        report["tokens"][language] = len(tokens)
        report["unknown_share"][language] = round(float((tokens == UNK).mean()), 8)
    return report


def _dictionary(tokenizer: Tokenizer, encoded: list[Path]) -> Dictionary:
    """The tokenizer's symbols with their counts in the training text, padded to a multiple of 8 as fairseq does."""
    counts = sum(_load(chunk, f"{side}_counts") for chunk in encoded for side in ("source", "target")).tolist()
    symbols = [tokenizer.id_to_token(number) for number in range(len(counts))]
    padding = [f"madeupword{number:04d}" for number in range(-len(symbols) % 8)]
    first = len(SPECIALS)
    return Dictionary(symbols[first:] + padding, counts[first:] + [0] * len(padding))


def _train_report(encoded: list[Path], lines: int, source: str, target: str) -> dict:
    dropped = sum(_load(chunk, "dropped") for chunk in encoded).tolist()
    report = {"lines": lines, "dropped": dict(zip(REASONS, dropped, strict=True)), "pairs": lines - sum(dropped)}
    report |= {"tokens": {}, "tokens_per_word": {}, "unknown_share": {}}
    for side, language in (("source", source), ("target", target)):
        counts = sum(_load(chunk, f"{side}_counts") for chunk in encoded)
        words = sum(int(_load(chunk, f"{side}_words")) for chunk in encoded)
        pieces = int(counts.sum() - counts[EOS])
        report["tokens"][language] = int(counts.sum())  # and EOS
        report["tokens_per_word"][language] = round(pieces / max(words, 1), 4)
        report["unknown_share"][language] = round(int(counts[UNK]) / max(pieces, 1), 8)
    return report


def _reasons(counts) -> str:
    """Such as "3 duplicate, 813 length_ratio"."""
    named = [f"{count} {reason}" for reason, count in zip(REASONS, counts, strict=True) if count]
    return ", ".join(named) or "none"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: prepares, and says what came of it; an InputError becomes one line and exit code 2."""
    import tyro

    flags = tyro.cli(Flags, args=arguments)
    try:
        report = prepare(**dataclasses.asdict(flags))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    train = report["train"]
    print(f"{train['lines']} training pairs read; dropped: {_reasons(train['dropped'].values())}")
    for name, values in (("tokens", train["tokens"]), ("tokens a word", train["tokens_per_word"])):
        print(f"{name}: " + ", ".join(f"{language} {value}" for language, value in values.items()))
    others = ", ".join(f"{report[split]['pairs']} {split}" for split in ("valid", "test") if split in report)
    print(f"{train['pairs']} training pairs, {others}; {report['vocabulary']} symbols; {report['seconds']} s")


if __name__ == "__main__":
    main()
