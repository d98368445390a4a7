"""Prepares parallel text for translation, once before training: cleans, learns BPE, binarises.

    make data DATASET=wmt18 DATA=TEXT
    python -m data.prepare.wmt --data TEXT [--out DIR] [--source en --target de]

TEXT is one of
  * a folder of text files, a sentence per line, plain or .gz: train.en and train.de; valid, val or
    dev; and test (see data/splits.py). A folder without test or validation text may have files such
    as newstest2017.en instead: the newest is the test text, the one before it the validation text.
    --valid and --test choose others, by the name without the language.
  * a folder of parquet files with a column "translation" of {"en": …, "de": …}, or the id of such a
    data set on the hub (wmt/wmt18; its configuration is --config, de-en by default).

The result has the layout of fairseq-preprocess (see data/wmt.py), with one dictionary for both
languages.

Cleaning. Training pairs are dropped, each counted under the first of these reasons that holds:
    empty         a side has no characters but spaces
    too_long      a side has more than --max-tokens (250) words or, later, pieces
    long_word     a word of a side has more than 1,000 characters, as in Moses' clean-corpus-n.perl
    identical     both sides are the same
    not_text      less than --letters (half) of a side's characters other than spaces are letters:
                  tables, lists, markup
    duplicate     the same pair came before (a hash of 64 bits is compared)
    length_ratio  one side has more than --ratio (1.5) times the pieces of the other
The limits of 250 and 1.5, in pieces, are those of fairseq's recipe for WMT
(examples/translation/prepare-wmt14en2de.sh, with clean-corpus-n.perl of Moses). The language is not
identified. Validation and test text is always kept whole.

Byte-pair encoding is learnt from both languages together, from --sample evenly spaced pairs, and
from none that is dropped. Where the number of pieces drops some of the sample, it is learnt again
without them, until at most a thousandth of what it was learnt from is dropped: those pairs lie on
the border of the limits. Text is normalised by Unicode's NFKC, and every run of spaces, control
characters and invisible ones becomes one space. No piece mixes words, numbers and punctuation. The
alphabet is printable ASCII and the most frequent characters that make up --coverage of the text;
other characters are <unk>.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data import splits
from data.fairseq_format import (
    EOS,
    SPECIALS,
    UNK,
    Dictionary,
    token_dtype,
    write_index,
    write_mmap,
)
from data.prepare import pipeline
from data.prepare.files import read_json, whole, write_json
from data.prepare.pipeline import Preparation, expect, load_array, save_arrays
from data.prepare.sources import SourceFile, files_in, folder_of, note_rows
from errors import InputError

CHUNK_LINES = 100_000  # pairs that a worker handles at once: the most work that a kill costs
ENCODED_LINES = 10_000  # lines given to the tokenizer at once; its results take much memory
BLOCK_BYTES = 16 << 20  # of text read at once to count its lines
NEWSTEST = re.compile(r"newstest(\d{4})\w*")

# Why a training pair is dropped. 0: it is kept.
EMPTY = 1
TOO_LONG = 2
IDENTICAL = 3
NOT_TEXT = 4
DUPLICATE = 5
LENGTH_RATIO = 6
LONG_WORD = 7
# Their names, from 1 on.
REASONS = (
    "empty",
    "too_long",
    "identical",
    "not_text",
    "duplicate",
    "length_ratio",
    "long_word",
)

LONGEST_WORD = 1000  # characters; Moses' default
ROUNDS = 5  # of learning byte-pair encoding, at most
BORDER = 0.001  # share of dropped pairs that ends the learning

# As in sentencepiece's nmt_nfkc: also control characters, invisible ones, and its sign for a space.
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
    config: str = ""  # configuration of a data set; default: that of both languages, such as de-en
    valid: str = ""  # name of the validation text in a folder; default: valid, val, dev or newstest
    test: str = ""  # name of the test text in a folder; default: test or newstest, if there is one
    vocabulary: int = 32_000  # symbols of the joint dictionary, rounded up to a multiple of 8
    max_tokens: int = 250  # training pairs with a longer side are dropped
    ratio: float = 1.5  # training pairs are dropped whose lengths differ by a larger factor; 0: off
    letters: float = 0.5  # training pairs with a smaller share of letters are dropped; 0: off
    keep_duplicates: bool = False  # keep training pairs that came before
    coverage: float = 0.9999  # share of all characters that the alphabet covers
    sample: int = 5_000_000  # pairs at most from which byte-pair encoding is learnt
    workers: int = os.cpu_count() or 1  # processes; byte-pair encoding is learnt on all cores


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A plain file with the lines of one language, cut into chunks of lines."""

    path: Path  # the user's own file, or a copy of it in `parts`
    name: str  # for messages: the user's file
    bounds: list[int]  # bytes at which chunks begin, and the file's size
    total_lines: int

    def lines(self, chunk: int) -> list[str]:
        """Returns the lines of a chunk; only line feeds end them. InputError if it is not UTF-8."""
        start = self.bounds[chunk]
        stop = self.bounds[chunk + 1]
        text = pipeline.read_text(self.path, self.name, start, stop)
        return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


@dataclasses.dataclass(frozen=True)
class ParallelText:
    """The text of a split in both languages; each line is the translation of the other's."""

    source: TextFile
    target: TextFile
    chunk_lines: int

    @property
    def sides(self) -> dict[str, TextFile]:
        """The files by the names of their sides, "source" and "target"."""
        return {"source": self.source, "target": self.target}

    @property
    def chunks(self) -> range:
        """The numbers of the chunks."""
        return range(len(self.source.bounds) - 1)

    def pairs(self, chunk: int) -> slice:
        """Returns where the pairs of a chunk lie among all; the last chunk may have fewer."""
        start = chunk * self.chunk_lines
        return slice(start, start + self.chunk_lines)


# Finding the text


def find_text(
    folder: Path, source: str, target: str, valid: str = "", test: str = ""
) -> dict[str, tuple[Path, Path]]:
    """Returns the files of each split, of source and target language.

    There are no splits if there is no training text. Raises InputError if one language of a split
    is missing, or there is no validation text.
    """
    # Name without language -> language -> path. Plain files come last, and replace .gz ones.
    paths: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir(), reverse=True):
        stem, _, language = path.name.removesuffix(".gz").rpartition(".")
        if language in (source, target) and stem and path.is_file():
            paths.setdefault(stem, {})[language] = path

    train = splits.named(paths, "train", str(folder))
    if not train:
        return {}
    newstests = [stem for stem in paths if NEWSTEST.fullmatch(stem)]
    newstests.sort(key=lambda stem: (stem[8:12], stem))  # by the year
    valid = valid or splits.named(paths, "valid", str(folder))
    if not valid and newstests:
        valid = newstests[-2:][0]  # the one before the newest, or the only one
    test = test or splits.named(paths, "test", str(folder))
    if not test and newstests and newstests[-1] != valid:
        test = newstests[-1]
    if not valid:
        raise InputError(
            f"{folder} has no validation text; "
            f"expected valid.{source} and valid.{target} (or val, dev, newstest…; plain or .gz), "
            "or name it with --valid"
        )

    found = {}
    for split, name in {"train": train, "valid": valid, "test": test}.items():
        if not name:
            continue
        files = paths.get(name, {})
        for language in (source, target):
            if language not in files:
                raise InputError(
                    f"{folder} has no {name}.{language} (plain or .gz); "
                    f"expected it for the {split} split"
                )
        found[split] = (files[source], files[target])
    return found


def left_out(
    folder: Path, files: dict[str, tuple[Path, Path]], languages: tuple[str, str]
) -> list[str]:
    """Returns the names of what a folder has besides `files` that may be meant for training.

    These are files of the two languages, and whatever else has a name that says a split: valid/,
    val.tsv.
    """
    used = set()
    for pair in files.values():
        for path in pair:
            used.add(path.name)
            used.add(f"{path.name}.gz")  # not read beside a plain one
    endings = tuple(f".{language}" for language in languages)

    others = []
    for path in folder.iterdir():
        if path.name in used:
            continue
        of_language = path.name.removesuffix(".gz").endswith(endings)
        says_split = splits.says_split(Path(path.name)) and not path.name.startswith(".")
        if (of_language or says_split) and not splits.made_by_make(path):
            others.append(path.name)
    return sorted(others)


def load_splits(data: str, config: str, source: str, target: str) -> pipeline.Splits:
    """Opens the splits train, valid and, if there is one, test of a `datasets` data set.

    Raises InputError if a split is missing or has not both languages.
    """

    def load_arguments(folder: Path) -> tuple[str, ...]:
        return _load_arguments(data, folder, config, source, target)

    text = f"train.{source} and train.{target} (plain or .gz)"
    found = pipeline.load_splits(data, text, load_arguments, ["train", "valid"], "test")
    for split, rows in found.datasets_by_split.items():
        feature = rows.features.get("translation")
        languages = getattr(feature, "languages", None) or list(feature or ())
        if source in languages and target in languages:
            continue
        has = f"the columns {', '.join(rows.column_names)}"
        if feature is not None:
            has = f"the languages {', '.join(languages)}"
        raise InputError(
            f"{data}, split {split}, has {has}; "
            f'expected a column "translation" with "{source}" and "{target}"'
        )
    return found


def _load_arguments(
    data: str, folder: Path, config: str, source: str, target: str
) -> tuple[str, ...]:
    """Returns what datasets.load_dataset is called with: a folder, or an id and a configuration.

    Args:
        folder: the path that `data` may be.
    """
    configs = [f"{target}-{source}", f"{source}-{target}"]
    if config:
        configs = [config]

    if folder.is_dir():
        for name in configs:
            if (folder / name).is_dir():
                return (str(folder / name),)
        if config:
            raise InputError(
                f"{data} has no folder {config}; expected one for --config, or leave the flag out"
            )
        return (str(folder),)

    import datasets

    names = datasets.get_dataset_config_names(data)
    for name in configs:
        if name in names:
            return data, name
    raise InputError(
        f"{data} has the configurations {', '.join(names)}; "
        f"expected {' or '.join(configs)}, or choose one with --config"
    )


def _dump(rows, languages: tuple[str, str], plain: tuple[Path, Path]) -> None:
    """Writes a split of a data set as two text files; line breaks in a sentence become spaces."""
    with whole(plain[0]) as source_file, whole(plain[1]) as target_file:
        files = (source_file, target_file)
        for batch in rows.iter(10_000):
            for language, file in zip(languages, files, strict=True):
                for pair in batch["translation"]:
                    sentence = re.sub(r"[\r\n]+", " ", pair[language] or "")
                    file.write(f"{sentence}\n".encode())


def _cut(path: Path, name: str, chunk_lines: int, cut: Path) -> None:
    """Counts a file's lines, and notes in the file `cut` the byte at which each chunk begins."""
    bounds = [0]
    lines = 0
    size = 0
    last = b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            line_ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            # The first line of the block that is the last one of a chunk.
            first = chunk_lines - 1 - lines % chunk_lines
            chunk_ends = line_ends[first::chunk_lines]
            bounds += (size + 1 + chunk_ends).tolist()
            lines += len(line_ends)
            size += len(block)
            last = block[-1:]

    if not size:
        raise InputError(f"{name} is empty; expected a sentence per line")
    if last != b"\n":
        lines += 1
    if bounds[-1] < size:
        bounds.append(size)
    write_json(cut, {"lines": lines, "bounds": bounds})


# Cleaning


def clean(
    pairs: Sequence[tuple[str, str]], max_tokens: int, letters: float
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the pairs to drop for their own text, without a comparison with others.

    Returns: the reason for dropping each of n pairs, uint8 [n], 0 for none; and a hash of each
        pair, uint64 [n], that disregards the number of spaces.
    """
    reasons = np.zeros(len(pairs), np.uint8)
    hashes = []
    for number, (source, target) in enumerate(pairs):
        source_words = source.split()
        target_words = target.split()
        source = " ".join(source_words)
        target = " ".join(target_words)
        pair_hash = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8)
        hashes.append(pair_hash.digest())

        if not source or not target:
            reasons[number] = EMPTY
        elif max(len(source_words), len(target_words)) > max_tokens:
            reasons[number] = TOO_LONG
        elif _has_long_word(source, source_words) or _has_long_word(target, target_words):
            reasons[number] = LONG_WORD
        elif source == target:
            reasons[number] = IDENTICAL
        elif not (_is_text(source_words, letters) and _is_text(target_words, letters)):
            reasons[number] = NOT_TEXT
    return reasons, np.frombuffer(b"".join(hashes), "<u8")


def _has_long_word(text: str, words: list[str]) -> bool:
    """Returns whether a word of `text` is too long; most texts are shorter than such a word."""
    return len(text) > LONGEST_WORD and max(map(len, words)) > LONGEST_WORD


def _is_text(words: list[str], letters: float) -> bool:
    """Returns whether at least this share of the words' characters are letters or their marks."""
    text = "".join(words)
    needed = letters * len(text)
    if sum(map(str.isalpha, text)) >= needed:  # most often, and fast
        return True
    with_marks = sum(unicodedata.category(character)[0] in "LM" for character in text)
    return with_marks >= needed


def clean_pieces(sizes: np.ndarray, max_tokens: int, ratio: float) -> np.ndarray:
    """Returns the reason for dropping each pair, uint8 [n], by its numbers of pieces, [2, n]."""
    longer = sizes.max(0)
    shorter = sizes.min(0)
    reasons = np.zeros(sizes.shape[1], np.uint8)
    if ratio:
        reasons[longer > ratio * shorter] = LENGTH_RATIO
    reasons[longer > max_tokens] = TOO_LONG
    reasons[shorter == 0] = EMPTY
    return reasons


def _clean_chunk(
    train: ParallelText, chunk: int, max_tokens: int, letters: float, path: Path
) -> None:
    """Saves what `clean` finds in a chunk."""
    source = train.source.lines(chunk)
    target = train.target.lines(chunk)
    pairs = list(zip(source, target, strict=True))
    reasons, hashes = clean(pairs, max_tokens, letters)
    save_arrays(path, why=reasons, hashes=hashes)


def _find_duplicates(cleaned: list[Path], keep_duplicates: bool, path: Path) -> None:
    """Writes the reason for dropping each pair, uint8 [n]: that of `clean`, or DUPLICATE.

    Args:
        cleaned: the files of `_clean_chunk`.
        path: of the result.
    """
    reasons_of_chunks = [load_array(chunk, "why") for chunk in cleaned]
    reasons = np.concatenate(reasons_of_chunks)
    if not keep_duplicates:
        hashes = []  # of the kept pairs
        for chunk, reasons_of_chunk in zip(cleaned, reasons_of_chunks, strict=True):
            hashes.append(load_array(chunk, "hashes")[reasons_of_chunk == 0])
        _, firsts = np.unique(np.concatenate(hashes), return_index=True)
        kept = np.flatnonzero(reasons == 0)
        is_duplicate = np.ones(len(kept), bool)
        is_duplicate[firsts] = False
        reasons[kept[is_duplicate]] = DUPLICATE
    with whole(path) as file:
        np.save(file, reasons)


# Byte-pair encoding


def _characters(lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the characters of normalised text as code points, and how often each occurs."""
    text = unicodedata.normalize("NFKC", "".join(lines))
    code_points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return np.unique(code_points, return_counts=True)


def _count_characters(train: ParallelText, chunk: int, reasons: Path, path: Path) -> None:
    """Saves the counts of the characters of a chunk's kept pairs."""
    kept = np.load(reasons, mmap_mode="r")[train.pairs(chunk)] == 0
    lines = []
    for text in train.sides.values():
        lines += itertools.compress(text.lines(chunk), kept)
    characters, counts = _characters(lines)
    save_arrays(path, characters=characters, counts=counts)


def _add_counts(total: Counter, characters: np.ndarray, counts: np.ndarray) -> None:
    """Adds the counts of characters to those in `total`."""
    total.update(dict(zip(characters.tolist(), counts.tolist(), strict=True)))


def learn_bpe(lines: Iterable[list[str]], vocabulary: int, alphabet: str) -> Tokenizer:
    """Learns byte-pair encoding of at most `vocabulary` symbols, fairseq's special symbols first.

    Args:
        lines: lists of sentences, for example of some thousands each.
        alphabet: all characters that are not <unk>, apart from the sign for a space.

    Special symbols in the text are text: "<s>" is three characters. Raises InputError if the
    alphabet does not fit.
    """
    alphabet = sorted({*alphabet, "▁"})
    if vocabulary < len(SPECIALS) + len(alphabet):
        raise InputError(
            f"--vocabulary {vocabulary} is too small for the text; expected more than "
            f"its {len(alphabet)} characters and {len(SPECIALS)} special symbols"
        )

    tokenizer = _with_model(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIALS),
        min_frequency=2,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),  # only these
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)

    # The same pieces, but numbered after the special symbols.
    learnt = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].get)
    ids = {symbol: number for number, symbol in enumerate([*SPECIALS, *pieces])}
    merges = [tuple(merge) for merge in learnt["merges"]]
    return _with_model(models.BPE(ids, merges, unk_token=SPECIALS[UNK], fuse_unk=True))


def _with_model(model: models.BPE) -> Tokenizer:
    """Returns a tokenizer that normalises and splits text as the module's docstring says."""
    tokenizer = Tokenizer(model)
    one_space = normalizers.Replace(Regex(SPACES), " ")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), one_space, normalizers.Strip()]
    )
    sign_for_space = pre_tokenizers.Metaspace(split=False)
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([sign_for_space, words])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _alphabet(counts: Counter, coverage: float) -> str:
    """Returns ASCII and the most frequent characters that make up this share of all."""
    by_falling_count = []
    total = 0
    for character, count in counts.items():
        if not _is_space(chr(character)):
            by_falling_count.append((-count, character))
            total += count
    by_falling_count.sort()

    alphabet = ASCII
    covered = 0
    for negative_count, character in by_falling_count:
        if covered >= coverage * total:
            break
        covered -= negative_count
        alphabet += chr(character)
    return alphabet


def _is_space(character: str) -> bool:
    """Returns whether the normaliser takes a character for a space."""
    return not normalizers.Replace(Regex(SPACES), "").normalize_str(character)


def _sampled(reasons: np.ndarray, sample: int) -> np.ndarray:
    """Returns the numbers of the kept pairs, int64, or of `sample` evenly spaced ones."""
    kept = np.flatnonzero(reasons == 0)
    sample = min(sample, len(kept))
    taken_before = np.arange(len(kept) + 1) * sample // len(kept)
    return kept[np.diff(taken_before) > 0]


def _lines(train: ParallelText, pairs: np.ndarray) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the lines of these pairs chunk by chunk: those of the source, and of the target.

    Args:
        pairs: their numbers, rising.
    """
    for chunk in train.chunks:
        of_chunk = train.pairs(chunk)
        first, after = np.searchsorted(pairs, [of_chunk.start, of_chunk.stop])
        if first == after:
            continue

        wanted = pairs[first:after] - of_chunk.start
        source = train.source.lines(chunk)
        target = train.target.lines(chunk)
        wanted_source = [source[number] for number in wanted]
        wanted_target = [target[number] for number in wanted]
        yield wanted_source, wanted_target


def _find_dropped(
    tokenizer: Tokenizer, train: ParallelText, pairs: np.ndarray, flags: Flags
) -> tuple[np.ndarray, Counter]:
    """Finds which of these pairs are dropped for their numbers of pieces.

    Returns: bool [pairs], which are; and how often each character occurs in the dropped ones.
    """
    dropped = []
    characters = Counter()
    for sides in _lines(train, pairs):
        encoded = [_encode(tokenizer, lines) for lines in sides]
        reasons = clean_pieces(_count_pieces(*encoded), flags.max_tokens, flags.ratio)
        dropped.append(reasons > 0)
        dropped_lines = []
        for lines in sides:
            dropped_lines += itertools.compress(lines, reasons > 0)
        _add_counts(characters, *_characters(dropped_lines))
    return np.concatenate(dropped), characters


def _learn(
    flags: Flags, train: ParallelText, reasons: Path, counted: list[Path], path: Path
) -> None:
    """Learns from a sample of the kept pairs, and again without those that the result drops.

    Besides the tokenizer, the number of pairs that it was learnt from is written, as learnt.json.

    Args:
        reasons: file with the reason for dropping each pair.
        counted: files with the counts of the characters of each chunk.
        path: of the tokenizer.
    """
    print("learning byte-pair encoding", flush=True)
    counts = Counter()
    for chunk in counted:
        _add_counts(counts, load_array(chunk, "characters"), load_array(chunk, "counts"))
    pairs = _sampled(np.load(reasons, mmap_mode="r"), flags.sample)
    sampled = len(pairs)

    for number in range(ROUNDS):
        lines = itertools.chain.from_iterable(_lines(train, pairs))
        tokenizer = learn_bpe(lines, flags.vocabulary, _alphabet(counts, flags.coverage))
        dropped, characters = _find_dropped(tokenizer, train, pairs, flags)
        # The first round accepts none: whatever it drops is left out of the next.
        accepted = 0 if number == 0 else BORDER * len(pairs)
        if dropped.sum() <= accepted or dropped.all():
            break
        counts -= characters
        pairs = pairs[~dropped]

    if len(pairs) < sampled:
        print(
            f"{sampled - len(pairs)} of {sampled} pairs are not learnt from: "
            "they are dropped for their lengths"
        )
    write_json(path.parent / "parts" / "learnt.json", {"pairs": len(pairs)})
    with whole(path) as file:
        file.write(tokenizer.to_str(pretty=True).encode())


# Encoding


def _encode(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    """Returns the ids of each line's pieces."""
    encoded = []
    for start in range(0, len(lines), ENCODED_LINES):
        batch = lines[start : start + ENCODED_LINES]
        encoded += [line.ids for line in tokenizer.encode_batch_fast(batch)]
    return encoded


def _count_pieces(source: list[list[int]], target: list[list[int]]) -> np.ndarray:
    """Returns the numbers of pieces of n pairs of encoded sentences, int64 [2, n]."""
    sizes = np.empty((2, len(source)), np.int64)
    sizes[0] = [len(sentence) for sentence in source]
    sizes[1] = [len(sentence) for sentence in target]
    return sizes


def _flatten(sentences: list[list[int]], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of all sentences, each ended by EOS; and the sizes with EOS, int32."""
    sizes = np.array([len(sentence) for sentence in sentences], np.int32)
    ends = np.cumsum(sizes, dtype=np.int64)
    flat = itertools.chain.from_iterable(sentences)
    tokens = np.fromiter(flat, dtype, int(sizes.sum(dtype=np.int64)))
    return np.insert(tokens, ends, EOS), sizes + 1


def _encode_chunk(
    train: ParallelText, chunk: int, out: Path, max_tokens: int, ratio: float, path: Path
) -> None:
    """Encodes the kept pairs of a chunk, and drops those that `clean_pieces` gives a reason for.

    Saves the tokens of each side, their counts, and how many pairs are dropped for each reason.
    """
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    symbols = tokenizer.get_vocab_size()
    reasons = np.load(out / "parts" / "why.npy", mmap_mode="r")[train.pairs(chunk)]
    lines = {}  # by side, of the kept pairs
    encoded = {}
    for side, text in train.sides.items():
        lines[side] = list(itertools.compress(text.lines(chunk), reasons == 0))
        encoded[side] = _encode(tokenizer, lines[side])

    sizes = _count_pieces(encoded["source"], encoded["target"])
    piece_reasons = clean_pieces(sizes, max_tokens, ratio)
    kept = piece_reasons == 0
    dropped = np.bincount(np.concatenate([reasons, piece_reasons]), minlength=len(REASONS) + 1)
    arrays = {"dropped": dropped[1:]}  # by reason, without those that are kept

    for side in train.sides:
        sentences = list(itertools.compress(encoded[side], kept))
        tokens, token_sizes = _flatten(sentences, token_dtype(symbols + 8))
        words = 0
        for line in itertools.compress(lines[side], kept):
            words += len(line.split())
        arrays[f"{side}_tokens"] = tokens
        arrays[f"{side}_sizes"] = token_sizes
        arrays[f"{side}_counts"] = np.bincount(tokens, minlength=symbols)
        arrays[f"{side}_words"] = words
    save_arrays(path, **arrays)


def _join(encoded: list[Path], side: str, prefix: Path, index: Path) -> None:
    """Writes the .bin file of a language from its chunks, then the .idx file `index`."""
    sizes = []
    with whole(prefix.with_name(prefix.name + ".bin")) as file:
        for chunk in encoded:
            tokens = load_array(chunk, f"{side}_tokens")
            file.write(tokens)
            sizes.append(load_array(chunk, f"{side}_sizes"))
    partial = index.with_name(index.name + ".partial")
    write_index(partial, np.concatenate(sizes), tokens.dtype)
    os.replace(partial, index)


# The command


@dataclasses.dataclass(frozen=True)
class Found:
    """The user's text: files, or the splits of a data set."""

    files: dict[str, tuple[Path, Path]]  # of each split; empty: it is a data set
    loaded: pipeline.Splits
    read_from: dict[str, str]  # what the report says of it

    def source_files(self, data: str) -> list[SourceFile]:
        """Returns the files, as the plan notes them."""
        files = []
        for split, pair in self.files.items():
            files += files_in(folder_of(data), pair, split)
        return files

    def rows(self, data: str) -> list[dict]:
        """Returns what the plan notes of the splits of a data set."""
        noted = []
        for split, rows in self.loaded.datasets_by_split.items():
            noted.append(note_rows(data, rows) | {"split": split})
        return noted


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes parallel text as the folder that data.wmt.open_pairs reads; see Flags.

    The passes: decompress .gz files, count lines; clean chunks of lines; find duplicates; count
    characters; learn byte-pair encoding; encode the chunks; join them.

    Memory: about 0.5 GB per worker, 30 bytes per training pair for duplicates, and what byte-pair
    encoding takes for the words of the sample. Disk: the result twice, and .gz files decompressed,
    in the folder `parts` until the end.

    Returns: the contents of report.json.
    Raises InputError: there is no such text, it cannot be used, or `out` holds something that was
        prepared differently.
    """
    flags = Flags(str(data), str(out), workers=workers, **flags)
    _check_flags(flags)
    found = _find(flags)
    print(splits.sentence(found.read_from), flush=True)
    job = Preparation(flags, found.source_files(flags.data), found.rows(flags.data))
    report = job.finished_report()
    if report:
        return report

    chunk_lines = job.begin_with_piece_size("chunk_lines", CHUNK_LINES)
    texts = _open_texts(job, flags, found, chunk_lines)
    train = texts.pop("train")
    reasons = _clean_all(job, flags, train)
    tokenizer = _learn_all(job, flags, train)
    encoded = _encode_all(job, flags, train)

    languages = (flags.source, flags.target)
    figures = {"train": _train_report(encoded, len(reasons), languages)}
    _check_pairs(train.source.name, len(reasons), figures["train"]["dropped"].values())
    dictionary = _dictionary(tokenizer, encoded)
    for split, text in texts.items():
        figures[split] = _write_whole(text, split, languages, tokenizer, len(dictionary), job.out)
    for language in languages:
        dictionary.save(job.out / f"dict.{language}.txt")

    # Where an older version learnt, it learnt from the whole sample and noted no number.
    learnt = min(flags.sample, int((reasons == 0).sum()))
    if (job.parts / "learnt.json").exists():
        learnt = read_json(job.parts / "learnt.json")["pairs"]
    figures["vocabulary"] = len(dictionary)
    figures["learnt_from_pairs"] = learnt
    figures["read_from"] = found.read_from
    figures["seconds"] = job.seconds
    return job.finish(figures)


def _check_flags(flags: Flags) -> None:
    """Raises InputError for a flag's value that cannot be."""
    for name in ("source", "target"):
        is_language = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", getattr(flags, name))
        expect(flags, name, bool(is_language), "a language as in the files' names, such as en")
    expect(flags, "target", flags.source != flags.target, "another language than --source")
    _expect_between(flags, "vocabulary", 100, 2**30)
    _expect_between(flags, "max_tokens", 1, 2**20)
    _expect_between(flags, "sample", 1, 2**62)
    expect(flags, "ratio", flags.ratio == 0 or flags.ratio >= 1, "at least 1, or 0 for none")
    for name in ("letters", "coverage"):
        expect(flags, name, 0 <= getattr(flags, name) <= 1, "a share, 0 to 1")


def _expect_between(flags: Flags, name: str, least: int, most: int) -> None:
    """Raises InputError unless a flag's value is from `least` to `most`."""
    expect(flags, name, least <= getattr(flags, name) <= most, f"{least} to {most}")


def _find(flags: Flags) -> Found:
    """Finds the files, or opens the data set. Raises InputError where there is neither."""
    folder = Path(flags.data).expanduser()
    if folder.is_file():
        raise InputError(
            f"{flags.data} is a file; "
            f"expected a folder with train.{flags.source} and train.{flags.target}"
        )
    files = {}
    if folder.is_dir():
        files = find_text(folder, flags.source, flags.target, flags.valid, flags.test)

    if files:
        loaded = pipeline.Splits()
        names = {}
        for split, pair in files.items():
            names[split] = [path.name for path in pair]
        others = left_out(folder, files, (flags.source, flags.target))
    else:
        loaded = load_splits(flags.data, flags.config, flags.source, flags.target)
        names = loaded.names
        others = loaded.left_out
    evaluation = names.get("valid", []) + names.get("test", [])
    read_from = splits.read_from(splits.shown(names["train"]), splits.shown(evaluation), others)
    return Found(files, loaded, read_from)


@dataclasses.dataclass(frozen=True)
class PlainFile:
    """A plain file with the text of a split in one language."""

    split: str
    language: str
    path: Path
    name: str  # for messages


def _open_texts(
    job: Preparation, flags: Flags, found: Found, chunk_lines: int
) -> dict[str, ParallelText]:
    """Decompresses, dumps and cuts what is not yet; returns the text of each split.

    Raises InputError if the two files of a split have different numbers of lines.
    """
    plain_files = _plain_files(job, flags, found)
    tasks = []
    cuts = []
    for file in plain_files:
        cut = job.parts / f"{file.split}.{file.language}.json"
        cuts.append(cut)
        tasks.append((file.path, file.name, chunk_lines, cut))
    job.run(_cut, tasks, "counting lines")

    opened = {}
    for file, cut in zip(plain_files, cuts, strict=True):
        noted = read_json(cut)
        text = TextFile(file.path, file.name, noted["bounds"], noted["lines"])
        opened.setdefault(file.split, []).append(text)

    texts = {}
    for split, (source, target) in opened.items():
        if source.total_lines != target.total_lines:
            raise InputError(
                f"{source.name} has {source.total_lines} lines "
                f"and {target.name} {target.total_lines}; "
                "expected equal numbers, each line the translation of the other's"
            )
        texts[split] = ParallelText(source, target, chunk_lines)
    return texts


def _plain_files(job: Preparation, flags: Flags, found: Found) -> list[PlainFile]:
    """Returns plain files with the user's text: source and target of each split."""
    if found.files:
        return _decompress_all(job, flags, found.files)
    return _dump_all(job, flags, found.loaded.datasets_by_split)


def _decompress_all(
    job: Preparation, flags: Flags, files: dict[str, tuple[Path, Path]]
) -> list[PlainFile]:
    """Decompresses the user's .gz files; returns the plain files of all splits."""
    copies = {}
    for split, (source, target) in files.items():
        copies[source] = job.parts / f"{split}.{flags.source}"
        copies[target] = job.parts / f"{split}.{flags.target}"
    plain = job.decompress(copies)

    plain_files = []
    for split, (source, target) in files.items():
        plain_files.append(PlainFile(split, flags.source, plain[source], str(source)))
        plain_files.append(PlainFile(split, flags.target, plain[target], str(target)))
    return plain_files


def _dump_all(job: Preparation, flags: Flags, datasets_by_split: dict) -> list[PlainFile]:
    """Writes the splits of a data set as plain files, where they are not there; returns these."""
    languages = (flags.source, flags.target)
    plain_files = []
    for split, rows in datasets_by_split.items():
        paths = [job.parts / f"{split}.{language}" for language in languages]
        are_there = all(path.exists() for path in paths)
        if not are_there:
            _dump(rows, languages, paths)
        for language, path in zip(languages, paths, strict=True):
            name = f"{flags.data}, split {split}, {language}"
            plain_files.append(PlainFile(split, language, path, name))
    return plain_files


def _clean_all(job: Preparation, flags: Flags, train: ParallelText) -> np.ndarray:
    """Cleans the training text; returns the reason for dropping each pair, uint8 [n], mapped."""
    cleaned = [job.parts / f"{chunk:06d}.clean.npz" for chunk in train.chunks]
    tasks = []
    for chunk, path in zip(train.chunks, cleaned, strict=True):
        tasks.append((train, chunk, flags.max_tokens, flags.letters, path))
    job.run(_clean_chunk, tasks, "cleaning")

    why = job.parts / "why.npy"
    job.run(_find_duplicates, [(cleaned, flags.keep_duplicates, why)], "finding duplicates")
    reasons = np.load(why, mmap_mode="r")

    counts = np.bincount(reasons, minlength=len(REASONS) + 1)
    dropped = counts[1:]  # without reason 0, which keeps a pair
    _check_pairs(train.source.name, len(reasons), dropped)
    return reasons


def _learn_all(job: Preparation, flags: Flags, train: ParallelText) -> Tokenizer:
    """Counts characters and learns byte-pair encoding; returns the tokenizer."""
    reasons = job.parts / "why.npy"
    counted = [job.parts / f"{chunk:06d}.characters.npz" for chunk in train.chunks]
    tasks = []
    for chunk, path in zip(train.chunks, counted, strict=True):
        tasks.append((train, chunk, reasons, path))
    job.run(_count_characters, tasks, "counting characters")

    path = job.out / "tokenizer.json"
    job.run(_learn, [(flags, train, reasons, counted, path)], "byte-pair encoding")
    return Tokenizer.from_file(str(path))


def _encode_all(job: Preparation, flags: Flags, train: ParallelText) -> list[Path]:
    """Encodes the training text and joins its chunks; returns the files of the chunks."""
    encoded = [job.parts / f"{chunk:06d}.tokens.npz" for chunk in train.chunks]
    tasks = []
    for chunk, path in zip(train.chunks, encoded, strict=True):
        tasks.append((train, chunk, job.out, flags.max_tokens, flags.ratio, path))
    job.run(_encode_chunk, tasks, "encoding")

    tasks = []
    for side, language in {"source": flags.source, "target": flags.target}.items():
        prefix = job.out / f"train.{flags.source}-{flags.target}.{language}"
        tasks.append((encoded, side, prefix, prefix.with_name(prefix.name + ".idx")))
    job.run(_join, tasks, "joining")
    return encoded


def _check_pairs(name: str, lines: int, dropped: Iterable[int]) -> None:
    """Raises InputError if all pairs are dropped, of which `dropped` has the number by reason."""
    if sum(dropped) == lines:
        raise InputError(f"{name} has no pair that can be used; dropped: {_reasons(dropped)}")


def _write_whole(
    text: ParallelText,
    split: str,
    languages: tuple[str, str],
    tokenizer: Tokenizer,
    vocabulary: int,
    out: Path,
) -> dict:
    """Writes text and tokens of a validation or test split; returns the report's entry for it."""
    report = {"pairs": text.source.total_lines, "tokens": {}, "unknown_share": {}}
    for file, language in zip(text.sides.values(), languages, strict=True):
        lines = []
        for chunk in text.chunks:
            lines += file.lines(chunk)
        content = "".join(f"{line}\n" for line in lines)
        (out / f"{split}.{language}").write_bytes(content.encode())

        tokens, sizes = _flatten(_encode(tokenizer, lines), token_dtype(vocabulary))
        prefix = out / f"{split}.{languages[0]}-{languages[1]}.{language}"
        write_mmap(prefix, tokens, sizes, vocabulary)
        report["tokens"][language] = len(tokens)
        report["unknown_share"][language] = round(float((tokens == UNK).mean()), 8)
    return report


def _dictionary(tokenizer: Tokenizer, encoded: list[Path]) -> Dictionary:
    """Returns the tokenizer's symbols and their counts in training.

    They are padded to a multiple of 8, as in fairseq.
    """
    totals = _token_counts(encoded, "source") + _token_counts(encoded, "target")
    counts = totals.tolist()
    symbols = [tokenizer.id_to_token(number) for number in range(len(counts))]
    missing = -len(symbols) % 8
    symbols += [f"madeupword{number:04d}" for number in range(missing)]
    counts += [0] * missing
    first = len(SPECIALS)  # a Dictionary has these by itself
    return Dictionary(symbols[first:], counts[first:])


def _token_counts(encoded: list[Path], side: str) -> np.ndarray:
    """Returns how often each token occurs in a side of the training text, int64 [symbols]."""
    return sum(load_array(chunk, f"{side}_counts") for chunk in encoded)


def _train_report(encoded: list[Path], lines: int, languages: tuple[str, str]) -> dict:
    """Returns the report's entry for the training text of so many lines."""
    dropped = np.zeros(len(REASONS), np.int64)
    for chunk in encoded:
        counts = load_array(chunk, "dropped")
        dropped[: len(counts)] += counts  # an older version had fewer reasons
    dropped = dropped.tolist()
    report = {
        "lines": lines,
        "dropped": dict(zip(REASONS, dropped, strict=True)),
        "pairs": lines - sum(dropped),
        "tokens": {},
        "tokens_per_word": {},
        "unknown_share": {},
    }
    for side, language in zip(("source", "target"), languages, strict=True):
        counts = _token_counts(encoded, side)
        words = sum(int(load_array(chunk, f"{side}_words")) for chunk in encoded)
        pieces = int(counts.sum() - counts[EOS])
        report["tokens"][language] = int(counts.sum())  # and EOS
        report["tokens_per_word"][language] = round(pieces / max(words, 1), 4)
        report["unknown_share"][language] = round(int(counts[UNK]) / max(pieces, 1), 8)
    return report


def _reasons(dropped: Iterable[int]) -> str:
    """Returns a text such as "3 duplicate, 813 length_ratio".

    Args:
        dropped: numbers of pairs, in the order of REASONS.
    """
    named = []
    for reason, count in zip(REASONS, dropped, strict=True):
        if count:
            named.append(f"{count} {reason}")
    return ", ".join(named) or "none"


def _summary(report: dict) -> None:
    """Prints what was read and dropped, and the sizes of the result."""
    train = report["train"]
    print(f"{train['lines']} training pairs read; dropped: {_reasons(train['dropped'].values())}")
    for name in ("tokens", "tokens_per_word"):
        values = [f"{language} {value}" for language, value in train[name].items()]
        print(f"{name.replace('_', ' ')}: {', '.join(values)}")
    others = []
    for split in ("valid", "test"):
        if split in report:
            others.append(f"{report[split]['pairs']} {split}")
    print(
        f"{train['pairs']} training pairs, {', '.join(others)}; "
        f"{report['vocabulary']} symbols; {report['seconds']} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
