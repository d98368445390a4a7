"""Prepares parallel text for translation, once before training: cleans it, learns byte-pair encoding, binarises it.

    python -m data.prepare.wmt --data TEXT [--out DIR] [--source en --target de]  (make data DATASET=wmt18 DATA=TEXT)

TEXT is one of
  * a folder of text files, a sentence per line, plain or .gz: train.en and train.de; valid, val or dev; and test (see
    data/splits.py). A folder without test or validation text may have files such as newstest2017.en instead: the newest
    is the test text, the one before it the validation text. --valid and --test choose others, by the name without the
    language.
  * a folder of parquet files with a column "translation" of {"en": …, "de": …}, or the id of such a data set on the hub
    (wmt/wmt18; its configuration is --config, de-en by default).

The result has the layout of fairseq-preprocess (see data/wmt.py), with one dictionary for both languages.

Cleaning. Training pairs are dropped, each counted under the first of these reasons that holds:
    empty         a side has no characters but spaces
    too_long      a side has more than --max-tokens (250) words or, later, pieces
    long_word     a word of a side has more than 1,000 characters, as in clean-corpus-n.perl of Moses
    identical     both sides are the same
    not_text      less than --letters (half) of a side's characters other than spaces are letters: tables, lists, markup
    duplicate     the same pair came before (a hash of 64 bits is compared)
    length_ratio  one side has more than --ratio (1.5) times the pieces of the other
The limits of 250 and 1.5, in pieces, are those of fairseq's recipe for WMT (examples/translation/prepare-wmt14en2de.sh,
with clean-corpus-n.perl of Moses). The language is not identified. Validation and test text is always kept whole.

Byte-pair encoding is learnt from both languages together, from --sample evenly spaced pairs, and from none that is
dropped: where the number of pieces drops some of the sample, it is learnt again without them, until at most a
thousandth of what it was learnt from is dropped, which then lies on the border of the limits. Text is normalised by
Unicode's NFKC, and every run of spaces, control characters and invisible ones becomes one space. No piece mixes words,
numbers and punctuation. The alphabet is printable ASCII and the most frequent characters that make up --coverage of the
text; other characters are <unk>.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data import splits
from data.fairseq_format import EOS, SPECIALS, UNK, Dictionary, token_dtype, write_index, write_mmap
from data.prepare import pipeline
from data.prepare.files import read_json, whole, write_json
from data.prepare.pipeline import Preparation, expect, load_array, save_arrays
from errors import InputError

CHUNK_LINES = 100_000  # pairs that a worker handles at once: the most that a kill costs
ENCODED_LINES = 10_000  # lines given to the tokenizer at once; its results take much memory
NEWSTEST = re.compile(r"newstest(\d{4})\w*")
REASONS = ("empty", "too_long", "identical", "not_text", "duplicate", "length_ratio", "long_word")
EMPTY, TOO_LONG, IDENTICAL, NOT_TEXT, DUPLICATE, LENGTH_RATIO, LONG_WORD = range(1, 8)  # 0: kept
LONGEST_WORD = 1000  # characters; Moses' default
ROUNDS, BORDER = 5, 0.001  # of learning: how often at most, and the share of dropped pairs that ends it

# As in sentencepiece's nmt_nfkc: also control characters, invisible ones, and its own sign for a space.
SPACES = r"[\s\p{Cc}\x{200B}-\x{200F}\x{2060}\x{FEFF}\x{FFFD}▁]+"
WORDS = r"▁?[\p{L}\p{M}]+|▁?\p{N}+|▁?[^\p{L}\p{M}\p{N}▁]+"
ASCII = "".join(map(chr, range(0x21, 0x7F)))


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares parallel text for translation: cleans it, learns byte-pair encoding, binarises it.

    The same command resumes a killed one. The result depends neither on that nor on --workers.
    """

    data: str  # folder of parallel text or of parquet files, or id of a data set on the hub
    out: str = ""  # folder of the result; default: a folder `prepared` in that of the text
    source: str = "en"  # language to translate from, as in the files' names
    target: str = "de"  # language to translate to
    config: str = ""  # of a data set: its configuration; default: that of both languages, such as de-en
    valid: str = ""  # of a folder of text: name of the validation text; default: valid, val, dev or newstest
    test: str = ""  # of a folder of text: name of the test text; default: test or newstest, if there is one
    vocabulary: int = 32_000  # symbols of the joint dictionary, rounded up to a multiple of 8
    max_tokens: int = 250  # training pairs with a longer side are dropped
    ratio: float = 1.5  # training pairs whose lengths differ by a larger factor are dropped; 0: none
    letters: float = 0.5  # training pairs with a smaller share of letters on a side are dropped; 0: none
    keep_duplicates: bool = False  # keep training pairs that came before
    coverage: float = 0.9999  # share of all characters that the alphabet covers
    sample: int = 5_000_000  # pairs at most from which byte-pair encoding is learnt
    workers: int = os.cpu_count() or 1  # processes; learning byte-pair encoding uses threads on all cores


class TextFile(NamedTuple):
    """A plain file with the lines of one language, cut into chunks of lines."""

    path: Path  # the user's own file, or a copy of it in `parts`
    name: str  # for messages: the user's file
    bounds: list[int]  # bytes at which chunks begin, and the file's size
    chunk_lines: int

    def lines(self, chunk: int) -> list[str]:
        """Returns the lines of a chunk. Only \\n ends a line. Raises InputError where they are not UTF-8."""
        text = pipeline.read_text(self.path, self.name, *self.bounds[chunk : chunk + 2])
        return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


# Finding the text


def find_text(folder: Path, source: str, target: str, valid: str = "", test: str = "") -> dict[str, tuple[Path, Path]]:
    """Returns the files of each split, of source and target language; no splits if there is no training text.

    Raises InputError if one language of a split is missing, or there is no validation text.
    """
    there: dict[str, dict[str, Path]] = {}  # name without language -> language -> path, plain rather than .gz
    for path in sorted(folder.iterdir(), reverse=True):
        stem, _, language = path.name.removesuffix(".gz").rpartition(".")
        if language in (source, target) and stem and path.is_file():
            there.setdefault(stem, {})[language] = path
    train = splits.named(there, "train", str(folder))
    if not train:
        return {}
    newstests = sorted((stem for stem in there if NEWSTEST.fullmatch(stem)), key=lambda stem: (stem[8:12], stem))
    valid = valid or splits.named(there, "valid", str(folder)) or "".join(newstests[-2:][:1])
    rest = [name for name in newstests[-1:] if name != valid]
    test = test or splits.named(there, "test", str(folder)) or "".join(rest)
    names = {"train": train, "valid": valid, "test": test}
    if not names["valid"]:
        expected = f"valid.{source} and valid.{target} (or val, dev, newstest…; plain or .gz)"
        raise InputError(f"{folder} has no validation text; expected {expected}, or name it with --valid")
    found = {}
    for split, name in names.items():
        missing = [language for language in (source, target) if language not in there.get(name, {})]
        if name and missing:
            raise InputError(f"{folder} has no {name}.{missing[0]} (plain or .gz); expected it for the {split} split")
        if name:
            found[split] = there[name][source], there[name][target]
    return found


def left_out(folder: Path, files: dict[str, tuple[Path, Path]], languages: tuple[str, str]) -> list[str]:
    """Returns the names of a folder's other files of these languages, and what else says a split: valid/, val.tsv."""
    used = {path.name for of_split in files.values() for path in of_split}
    used |= {f"{name}.gz" for name in used}  # plain rather than .gz
    ends = tuple(f".{language}{packed}" for language in languages for packed in ("", ".gz"))
    others = []
    for path in folder.iterdir():
        names_split = splits.says_split(Path(path.name)) and not path.name.startswith(".")
        if path.name not in used and (path.name.endswith(ends) or names_split) and not splits.made_by_make(path):
            others.append(path.name)
    return sorted(others)


def load_splits(data: str, config: str, source: str, target: str) -> pipeline.Splits:
    """Opens the splits train, valid and, if there is one, test of a `datasets` data set. Raises InputError."""
    configs = [config] if config else [f"{target}-{source}", f"{source}-{target}"]

    def arguments(folder: Path) -> tuple:
        if folder.is_dir():
            if config and not (folder / config).is_dir():
                raise InputError(f"{data} has no folder {config}; expected one for --config, or leave the flag out")
            return (str(next((folder / name for name in configs if (folder / name).is_dir()), folder)),)
        import datasets

        names = datasets.get_dataset_config_names(data)
        chosen = next((name for name in configs if name in names), "")
        if not chosen:
            expected = f"expected {' or '.join(configs)}, or choose one with --config"
            raise InputError(f"{data} has the configurations {', '.join(names)}; {expected}")
        return data, chosen

    text = f"train.{source} and train.{target} (plain or .gz)"
    found = pipeline.load_splits(data, text, arguments, ["train", "valid"], "test")
    for split, rows in found.rows.items():
        kind = rows.features.get("translation")
        languages = getattr(kind, "languages", None) or list(kind or ())
        if source not in languages or target not in languages:
            has = f"the columns {', '.join(rows.column_names)}"
            if kind is not None:
                has = f"the languages {', '.join(languages)}"
            expected = f'expected a column "translation" with "{source}" and "{target}"'
            raise InputError(f"{data}, split {split}, has {has}; {expected}")
    return found


def _dump(rows, languages: tuple[str, str], plain: tuple[Path, Path]) -> None:
    """Writes a split of a data set as two files of text; line breaks in a sentence become spaces."""
    with whole(plain[0]) as first, whole(plain[1]) as second:
        for batch in rows.iter(10_000):
            for language, file in zip(languages, (first, second), strict=True):
                sentences = (pair[language] or "" for pair in batch["translation"])
                file.write("".join(re.sub(r"[\r\n]+", " ", text) + "\n" for text in sentences).encode())


def _cut(path: Path, name: str, chunk_lines: int, cut: Path) -> None:
    """Counts a file's lines, and notes the byte at which each chunk of lines begins."""
    starts, lines, at, last = [0], 0, 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(16 << 20):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            starts += (at + 1 + ends[chunk_lines - 1 - lines % chunk_lines :: chunk_lines]).tolist()
            lines, at, last = lines + len(ends), at + len(block), block[-1:]
    if not at:
        raise InputError(f"{name} is empty; expected a sentence per line")
    lines += last != b"\n"
    write_json(cut, {"lines": lines, "bounds": [start for start in starts if start < at] + [at]})


# Cleaning


def clean(pairs: Sequence[tuple[str, str]], max_tokens: int, letters: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays over n pairs: uint8 [n], the reason for dropping each, 0 for none (only the reasons that the
    text of one pair tells); and uint64 [n], a hash of the pair that disregards the number of spaces."""
    why, hashes = np.zeros(len(pairs), np.uint8), []
    for number, (source, target) in enumerate(pairs):
        source_words, target_words = source.split(), target.split()
        source, target = " ".join(source_words), " ".join(target_words)
        hashes.append(hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8).digest())
        if not source or not target:
            why[number] = EMPTY
        elif max(len(source_words), len(target_words)) > max_tokens:
            why[number] = TOO_LONG
        elif _has_long_word(source, source_words) or _has_long_word(target, target_words):
            why[number] = LONG_WORD
        elif source == target:
            why[number] = IDENTICAL
        elif not (_is_text(source_words, letters) and _is_text(target_words, letters)):
            why[number] = NOT_TEXT
    return why, np.frombuffer(b"".join(hashes), "<u8")


def _has_long_word(text: str, words: list[str]) -> bool:
    return len(text) > LONGEST_WORD and max(map(len, words)) > LONGEST_WORD


def _is_text(words: list[str], letters: float) -> bool:
    """Returns whether at least this share of a sentence's characters, spaces apart, are letters or their marks."""
    text = "".join(words)
    needed = letters * len(text)
    if sum(map(str.isalpha, text)) >= needed:  # most often, and fast
        return True
    return sum(unicodedata.category(character)[0] in "LM" for character in text) >= needed


def clean_pieces(sizes: np.ndarray, max_tokens: int, ratio: float) -> np.ndarray:
    """Returns the reason for dropping each pair by the numbers of its pieces [2, n], uint8 [n], 0 for none."""
    why = np.zeros(sizes.shape[1], np.uint8)
    if ratio:
        why[sizes.max(0) > ratio * sizes.min(0)] = LENGTH_RATIO
    why[sizes.max(0) > max_tokens] = TOO_LONG
    why[sizes.min(0) == 0] = EMPTY
    return why


def _clean_chunk(texts: tuple[TextFile, TextFile], chunk: int, max_tokens: int, letters: float, path: Path) -> None:
    pairs = list(zip(*(text.lines(chunk) for text in texts), strict=True))
    why, hashes = clean(pairs, max_tokens, letters)
    save_arrays(path, why=why, hashes=hashes)


def _find_duplicates(chunks: list[Path], keep_duplicates: bool, path: Path) -> None:
    """Writes the reason for dropping each pair of all chunks, uint8 [n]: those of cleaning, and DUPLICATE."""
    whys = [load_array(chunk, "why") for chunk in chunks]
    why = np.concatenate(whys)
    if not keep_duplicates:
        kept = np.flatnonzero(why == 0)
        hashes = [load_array(chunk, "hashes")[part == 0] for chunk, part in zip(chunks, whys, strict=True)]
        first = np.unique(np.concatenate(hashes), return_index=True)[1]
        duplicate = np.ones(len(kept), bool)
        duplicate[first] = False
        why[kept[duplicate]] = DUPLICATE
    with whole(path) as file:
        np.save(file, why)


# Byte-pair encoding


def _characters(lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the characters of normalised text, and how often each occurs."""
    text = unicodedata.normalize("NFKC", "".join(lines))
    return np.unique(np.frombuffer(text.encode("utf-32-le"), "<u4"), return_counts=True)


def _count_characters(texts: tuple[TextFile, TextFile], chunk: int, why: Path, path: Path) -> None:
    """Counts the characters of a chunk's kept pairs."""
    start = chunk * texts[0].chunk_lines
    kept = np.load(why, mmap_mode="r")[start : start + texts[0].chunk_lines] == 0
    lines = []
    for text in texts:
        lines += itertools.compress(text.lines(chunk), kept)
    characters, counts = _characters(lines)
    save_arrays(path, characters=characters, counts=counts)


def learn_bpe(lines: Iterator[list[str]], vocabulary: int, alphabet: str) -> Tokenizer:
    """Learns byte-pair encoding of at most `vocabulary` symbols, with fairseq's special symbols first.

    Args:
        lines: lists of sentences, for example of some thousands each.
        alphabet: all characters that are not <unk>, apart from the sign for a space.

    Special symbols in the text are text: "<s>" is three characters. Raises InputError if the alphabet does not fit.
    """
    alphabet = sorted({*alphabet, "▁"})
    if vocabulary < len(SPECIALS) + len(alphabet):
        needed = f"its {len(alphabet)} characters and {len(SPECIALS)} special symbols"
        raise InputError(f"--vocabulary {vocabulary} is too small for the text; expected more than {needed}")
    tokenizer = _with_model(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIALS),
        min_frequency=2,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),  # only these
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


def _alphabet(counts: Counter, coverage: float) -> str:
    """Returns ASCII and the most frequent characters that make up this share of all."""
    counts = [(-count, character) for character, count in counts.items() if not _is_space(chr(character))]
    covered, needed, alphabet = 0, -coverage * sum(count for count, _ in counts), ASCII
    for count, character in sorted(counts):
        if covered >= needed:
            break
        covered, alphabet = covered - count, alphabet + chr(character)
    return alphabet


def _is_space(character: str) -> bool:
    return not normalizers.Replace(Regex(SPACES), "").normalize_str(character)


def _sampled(why: np.ndarray, sample: int) -> np.ndarray:
    """Returns the places of the kept pairs, int64, or of `sample` evenly spaced ones."""
    kept = np.flatnonzero(why == 0)
    sample = min(sample, len(kept))
    return kept[np.diff(np.arange(len(kept) + 1) * sample // len(kept)) > 0]


def _lines(texts: tuple[TextFile, TextFile], places: np.ndarray) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the lines of these pairs, in rising order, chunk by chunk: those of the source, and of the target."""
    for chunk in range(len(texts[0].bounds) - 1):
        start = chunk * texts[0].chunk_lines
        first, after = np.searchsorted(places, [start, start + texts[0].chunk_lines])
        if first < after:
            sides = []
            for text in texts:
                lines = text.lines(chunk)
                sides.append([lines[number] for number in places[first:after] - start])
            yield tuple(sides)


def _find_dropped(tokenizer: Tokenizer, texts, places: np.ndarray, flags: Flags) -> tuple[np.ndarray, Counter]:
    """Returns which of these pairs are dropped for their numbers of pieces, bool; and the characters of those."""
    reasons, counts = [], Counter()
    for sides in _lines(texts, places):
        sizes = [[len(sentence) for sentence in _encode(tokenizer, lines)] for lines in sides]
        reasons.append(clean_pieces(np.array(sizes), flags.max_tokens, flags.ratio))
        dropped = []
        for lines in sides:
            dropped += itertools.compress(lines, reasons[-1])
        characters, of_each = _characters(dropped)
        counts.update(dict(zip(characters.tolist(), of_each.tolist(), strict=True)))
    return np.concatenate(reasons) > 0, counts


def _learn(flags: Flags, train: tuple[TextFile, TextFile], why: Path, counted: list[Path], path: Path) -> None:
    """Learns from the sample, and again without the pairs of it that are dropped by what was learnt."""
    print("learning byte-pair encoding", flush=True)
    counts = Counter()
    for chunk in counted:
        characters, of_each = load_array(chunk, "characters"), load_array(chunk, "counts")
        counts.update(dict(zip(characters.tolist(), of_each.tolist(), strict=True)))
    places = _sampled(np.load(why, mmap_mode="r"), flags.sample)
    sampled = len(places)
    for number in range(ROUNDS):
        lines = itertools.chain.from_iterable(_lines(train, places))
        tokenizer = learn_bpe(lines, flags.vocabulary, _alphabet(counts, flags.coverage))
        dropped, characters = _find_dropped(tokenizer, train, places, flags)
        border = BORDER * len(places) if number else 0
        if dropped.sum() <= border or dropped.all():
            break
        counts -= characters
        places = places[~dropped]
    if len(places) < sampled:
        print(f"{sampled - len(places)} of {sampled} pairs are not learnt from: they are dropped for their lengths")
    write_json(path.parent / "parts" / "learnt.json", {"pairs": len(places)})
    with whole(path) as file:
        file.write(tokenizer.to_str(pretty=True).encode())


def _encode(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    pieces = [lines[start : start + ENCODED_LINES] for start in range(0, len(lines), ENCODED_LINES)]
    return [one.ids for piece in pieces for one in tokenizer.encode_batch_fast(piece)]


def _flat(sentences: list[list[int]], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of all sentences, one after another, each ended by EOS; and the sizes, int32."""
    sizes = np.array([len(sentence) + 1 for sentence in sentences], np.int32)
    total = int(sizes.sum(dtype=np.int64))
    with_eos = itertools.chain.from_iterable(itertools.chain(sentence, (EOS,)) for sentence in sentences)
    return np.fromiter(with_eos, dtype, total), sizes


def _encode_chunk(texts: tuple[TextFile, TextFile], chunk: int, out: Path, max_tokens: int, ratio: float, path: Path):
    """Encodes the kept pairs of a chunk, and drops those that are too long or whose lengths differ too much."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    start = chunk * texts[0].chunk_lines
    why = np.load(out / "parts" / "why.npy", mmap_mode="r")[start : start + texts[0].chunk_lines]
    sides = [list(itertools.compress(text.lines(chunk), why == 0)) for text in texts]
    encoded = [_encode(tokenizer, lines) for lines in sides]
    sizes = np.array([[len(sentence) for sentence in side] for side in encoded]).reshape(2, -1)
    again = clean_pieces(sizes, max_tokens, ratio)
    arrays = {"dropped": np.bincount(np.concatenate([why, again]), minlength=len(REASONS) + 1)[1:]}
    symbols = tokenizer.get_vocab_size()
    for name, side, lines in zip(("source", "target"), encoded, sides, strict=True):
        tokens, ends = _flat(list(itertools.compress(side, again == 0)), token_dtype(symbols + 8))
        arrays |= {f"{name}_tokens": tokens, f"{name}_sizes": ends}
        arrays[f"{name}_counts"] = np.bincount(tokens, minlength=symbols)
        arrays[f"{name}_words"] = sum(len(line.split()) for line in itertools.compress(lines, again == 0))
    save_arrays(path, **arrays)


def _join(chunks: list[Path], side: str, prefix: Path, index: Path) -> None:
    """Writes the .bin file of a language from its chunks, then the .idx file `index`."""
    sizes = []
    with whole(prefix.with_name(prefix.name + ".bin")) as file:
        for chunk in chunks:
            tokens = load_array(chunk, f"{side}_tokens")
            file.write(tokens)
            sizes.append(load_array(chunk, f"{side}_sizes"))
    partial = index.with_name(index.name + ".partial")
    write_index(partial, np.concatenate(sizes), tokens.dtype)
    os.replace(partial, index)


# The command


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes parallel text as the folder that data.wmt.open_pairs reads; the arguments are those of Flags.

    The passes: unpack what is packed, count lines; clean chunks of lines; find duplicates; count characters; learn
    byte-pair encoding; encode the chunks; join them. Memory: about 0.5 GB per worker, 30 bytes per training pair for
    duplicates, and what byte-pair encoding takes for the words of the sample. Disk: the result twice, and packed text
    unpacked, in the folder `parts` until the end.

    Returns: the contents of report.json.
    Raises InputError: no such text, text that cannot be used, or `out` holds something prepared differently.
    """
    flags = Flags(str(data), str(out), workers=workers, **flags)
    _check_flags(flags)
    languages, folder = (flags.source, flags.target), Path(data).expanduser()
    if folder.is_file():
        raise InputError(f"{data} is a file; expected a folder with train.{flags.source} and train.{flags.target}")
    files = find_text(folder, *languages, flags.valid, flags.test) if folder.is_dir() else {}
    loaded = pipeline.Splits() if files else load_splits(flags.data, flags.config, *languages)
    sources = [
        {"name": path.name, "bytes": path.stat().st_size, "split": split} for split in files for path in files[split]
    ]
    sources += [{"name": flags.data, "rows": len(rows), "split": split} for split, rows in loaded.rows.items()]
    read_from = _read_from(folder, files, loaded, languages)
    print(splits.sentence(read_from), flush=True)
    job = Preparation(flags, sources)
    if report := job.finished():
        return report

    texts = _open_texts(job, flags, files, loaded.rows, job.begin("chunk_lines", CHUNK_LINES))
    train = texts.pop("train")
    numbers = range(len(train[0].bounds) - 1)
    cleaned = [job.parts / f"{number:06d}.clean.npz" for number in numbers]
    job.run(_clean_chunk, [(train, n, flags.max_tokens, flags.letters, cleaned[n]) for n in numbers], "cleaning")
    job.run(_find_duplicates, [(cleaned, flags.keep_duplicates, job.parts / "why.npy")], "finding duplicates")
    why = np.load(job.parts / "why.npy", mmap_mode="r")
    _check_pairs(train[0].name, len(why), np.bincount(why, minlength=len(REASONS) + 1)[1:])
    counted = [job.parts / f"{number:06d}.characters.npz" for number in numbers]
    job.run(_count_characters, [(train, n, job.parts / "why.npy", counted[n]) for n in numbers], "counting characters")
    path = job.out / "tokenizer.json"
    job.run(_learn, [(flags, train, job.parts / "why.npy", counted, path)], "byte-pair encoding")

    encoded = [job.parts / f"{number:06d}.tokens.npz" for number in numbers]
    tasks = [(train, n, job.out, flags.max_tokens, flags.ratio, encoded[n]) for n in numbers]
    job.run(_encode_chunk, tasks, "encoding")
    prefixes = [job.out / f"train.{'-'.join(languages)}.{language}" for language in languages]
    sides = zip(("source", "target"), prefixes, strict=True)
    job.run(_join, [(encoded, side, path, path.with_name(path.name + ".idx")) for side, path in sides], "joining")
    figures = {"train": _train_report(encoded, len(why), languages)}
    _check_pairs(train[0].name, len(why), figures["train"]["dropped"].values())
    tokenizer = Tokenizer.from_file(str(path))
    dictionary = _dictionary(tokenizer, encoded)
    for split in texts:
        figures[split] = _prepare_small(texts[split], languages, tokenizer, len(dictionary), job.out / split)
    for language in languages:
        dictionary.save(job.out / f"dict.{language}.txt")
    learnt = min(flags.sample, int((why == 0).sum()))  # where an older version learnt
    if (job.parts / "learnt.json").exists():
        learnt = read_json(job.parts / "learnt.json")["pairs"]
    figures |= {"vocabulary": len(dictionary), "learnt_from_pairs": learnt, "read_from": read_from}
    return job.finish(figures | {"seconds": job.seconds})


def _read_from(folder: Path, files: dict, loaded: pipeline.Splits, languages: tuple[str, str]) -> dict[str, str]:
    """Returns what the report says of where the pairs are from."""
    names = loaded.names | {split: [path.name for path in pair] for split, pair in files.items()}
    evaluation = [name for split in ("valid", "test") for name in names.get(split, [])]
    others = left_out(folder, files, languages) if files else loaded.left_out
    return splits.read_from(splits.shown(names["train"]), splits.shown(evaluation), others)


def _check_flags(flags: Flags) -> None:
    for name in ("source", "target"):
        is_language = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", getattr(flags, name))
        expect(flags, name, bool(is_language), "a language as in the files' names, such as en")
    expect(flags, "target", flags.source != flags.target, "another language than --source")
    for name, least, most in (("vocabulary", 100, 2**30), ("max_tokens", 1, 2**20), ("sample", 1, 2**62)):
        expect(flags, name, least <= getattr(flags, name) <= most, f"{least} to {most}")
    expect(flags, "ratio", flags.ratio == 0 or flags.ratio >= 1, "at least 1, or 0 for none")
    for name in ("letters", "coverage"):
        expect(flags, name, 0 <= getattr(flags, name) <= 1, "a share, 0 to 1")


def _check_pairs(name: str, lines: int, dropped) -> None:
    if sum(dropped) == lines:
        raise InputError(f"{name} has no pair that can be used; dropped: {_reasons(dropped)}")


def _open_texts(job: Preparation, flags: Flags, files: dict, loaded: dict, chunk_lines: int) -> dict:
    """Unpacks, dumps and cuts what is not yet; returns {split: (TextFile, TextFile)}.

    Raises InputError if the two files of a split have different numbers of lines.
    """
    keys = [(split, language) for split in files or loaded for language in (flags.source, flags.target)]
    paths = [job.parts / f"{split}.{language}" for split, language in keys]
    names = [f"{flags.data}, split {split}, {language}" for split, language in keys]
    if files:
        own = list(itertools.chain.from_iterable(files.values()))
        paths, names = job.unpack(dict(zip(paths, own, strict=True))), [str(path) for path in own]
    for rows, *plain in zip(loaded.values(), paths[::2], paths[1::2], strict=False):
        if not all(path.exists() for path in plain):
            _dump(rows, (flags.source, flags.target), plain)
    cuts = [job.parts / f"{split}.{language}.json" for split, language in keys]
    tasks = [(path, name, chunk_lines, cut) for path, name, cut in zip(paths, names, cuts, strict=True)]
    job.run(_cut, tasks, "counting lines")
    texts = {}
    for (path, name, _, cut), (split, _) in zip(tasks, keys, strict=True):
        found = read_json(cut)
        text = TextFile(path, name, found["bounds"], chunk_lines)
        texts.setdefault(split, []).append((text, found["lines"]))
    for (first, lines), (second, others) in texts.values():
        if lines != others:
            counts = f"{first.name} has {lines} lines and {second.name} {others}"
            raise InputError(f"{counts}; expected equal numbers, each line the translation of the other's")
    return {split: tuple(text for text, _ in pair) for split, pair in texts.items()}


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
    """Returns the tokenizer's symbols and their counts in training, padded to a multiple of 8 as in fairseq."""
    counts = sum(load_array(chunk, f"{side}_counts") for chunk in encoded for side in ("source", "target")).tolist()
    symbols = [tokenizer.id_to_token(number) for number in range(len(counts))]
    padding = [f"madeupword{number:04d}" for number in range(-len(symbols) % 8)]
    first = len(SPECIALS)
    return Dictionary(symbols[first:] + padding, counts[first:] + [0] * len(padding))


def _train_report(encoded: list[Path], lines: int, languages: tuple[str, str]) -> dict:
    dropped = np.zeros(len(REASONS), np.int64)
    for chunk in encoded:
        counts = load_array(chunk, "dropped")
        dropped[: len(counts)] += counts  # an older version had fewer reasons
    dropped = dropped.tolist()
    report = {"lines": lines, "dropped": dict(zip(REASONS, dropped, strict=True)), "pairs": lines - sum(dropped)}
    report |= {"tokens": {}, "tokens_per_word": {}, "unknown_share": {}}
    for side, language in zip(("source", "target"), languages, strict=True):
        counts = sum(load_array(chunk, f"{side}_counts") for chunk in encoded)
        words = sum(int(load_array(chunk, f"{side}_words")) for chunk in encoded)
        pieces = int(counts.sum() - counts[EOS])
        report["tokens"][language] = int(counts.sum())  # and EOS
        report["tokens_per_word"][language] = round(pieces / max(words, 1), 4)
        report["unknown_share"][language] = round(int(counts[UNK]) / max(pieces, 1), 8)
    return report


def _reasons(counts) -> str:
    """Returns a text such as "3 duplicate, 813 length_ratio"."""
    named = [f"{count} {reason}" for reason, count in zip(REASONS, counts, strict=True) if count]
    return ", ".join(named) or "none"


def _summary(report: dict) -> None:
    train = report["train"]
    print(f"{train['lines']} training pairs read; dropped: {_reasons(train['dropped'].values())}")
    for name, values in (("tokens", train["tokens"]), ("tokens per word", train["tokens_per_word"])):
        print(f"{name}: " + ", ".join(f"{language} {value}" for language, value in values.items()))
    others = ", ".join(f"{report[split]['pairs']} {split}" for split in ("valid", "test") if split in report)
    print(f"{train['pairs']} training pairs, {others}; {report['vocabulary']} symbols; {report['seconds']} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
