"""data/prepare/wmt.py on small texts that the tests make."""

import contextlib
import dataclasses
import itertools
import json
import os
import resource
import unicodedata
from pathlib import Path
from string import ascii_letters

import numpy as np
import pytest
from corpora import contents, pair_corpus, sentences, translated, write_lines
from tokenizers import Tokenizer

from data.prepare import wmt as pre
from data.splits import said
from data.wmt import EOS, UNK, open_pairs, read_lines
from errors import InputError

LANGUAGES = ("en", "de")


def prepare(data: Path, out: Path, **flags) -> dict:
    """Prepares with a small vocabulary; returns the report."""
    return pre.prepare(data, out, **({"vocabulary": 160} | flags))


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pre, "CHUNK_LINES", 13)
        yield


# ---- a folder of unusual text ------------------------------------------------------------------
SPECIAL_SYMBOLS = " <s> <pad></s> <unk>"
LINE_BREAKS = "\x0b und\u2028mehr\x85"  # only \n ends a line
RARE_LETTERS = " ☃☃"
FREQUENT_LETTERS = " 世界"


def unusual_lines() -> list[str]:
    """Returns 60 lines, most of the first half with unusual ends."""
    lines = sentences(60)
    lines[0] += SPECIAL_SYMBOLS
    lines[1] += LINE_BREAKS
    lines[2] += RARE_LETTERS
    for number in range(3, 30):
        lines[number] += FREQUENT_LETTERS
    return lines


@dataclasses.dataclass(frozen=True)
class Side:
    """The two sides of a split."""

    en: list[str]
    de: list[str]


LINES = unusual_lines()
VALID = Side(
    en=["", "same same", "1 2 3 4", "ba " * 300, "ba di", "ba di"],
    de=["x", "same same", "5", "ba", "di ba", "di ba"],
)
TEST = Side(en=["a", ""], de=["Ein  Test,\u2028mit Zeichen", "zwei"])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A prepared folder of unusual text."""
    data = tmp_path_factory.mktemp("wmt")
    pair_corpus(
        data,
        train_en=LINES,
        train_de=translated(LINES),
        valid_en=VALID.en,
        valid_de=VALID.de,
        test_en=TEST.en,
        test_de=TEST.de,
    )
    as_windows_has_it = "\ufeff" + "\r\n".join([*VALID.en, ""])
    (data / "valid.en").write_bytes(as_windows_has_it.encode())
    last_line_without_end = "\n".join(TEST.de)
    (data / "test.de").write_bytes(last_line_without_end.encode())

    prepare(data, data / "prepared", vocabulary=200, coverage=0.995)
    return data / "prepared"


@pytest.fixture
def report(prepared) -> dict:
    return json.loads((prepared / "report.json").read_text())


def test_a_prepared_folder_has_its_files(prepared):
    expected = {"report.json", "tokenizer.json", "dict.en.txt", "dict.de.txt"}
    for language in LANGUAGES:
        expected |= {f"valid.{language}", f"test.{language}"}
        for split in ("train", "valid", "test"):
            expected |= {f"{split}.en-de.{language}.bin", f"{split}.en-de.{language}.idx"}

    assert {path.name for path in prepared.iterdir()} == expected


def test_training_pairs_decode_to_their_lines(prepared, report):
    pairs = open_pairs(prepared, "train")
    batch = pairs.batch(np.arange(60), (200, 200))

    assert len(pairs) == 60
    assert report["train"]["pairs"] == 60
    assert report["train"]["lines"] == 60, "only \\n ends a line"
    targets = [pairs.decode(row) for row in batch["target"]]
    assert targets[3:] == translated(LINES)[3:]
    source_ids = [row[row > 2].tolist() for row in batch["source"]]
    assert source_ids == [ids[:-1].tolist() for ids in pairs.encode(LINES)]


def test_the_dictionary_counts_the_training_text(prepared, report):
    pairs = open_pairs(prepared, "train")
    dictionary = pairs.source_dictionary
    batch = pairs.batch(np.arange(60), (200, 200))

    assert dictionary is pairs.target_dictionary
    assert len(dictionary) == 200
    assert report["vocabulary"] == 200
    tokens = np.concatenate([batch["source"].ravel(), batch["target"].ravel()])
    counts = np.bincount(tokens, minlength=200)
    assert dictionary.counts[4:] == counts[4:].tolist()  # specials apart
    assert counts[UNK] == 2


def test_the_report_has_the_tokens_of_each_side(prepared, report):
    pairs = open_pairs(prepared, "train")

    tokens = report["train"]["tokens"]
    assert tokens == {"en": int(pairs.lengths[:, 0].sum()), "de": int(pairs.lengths[:, 1].sum())}
    words = sum(len(line.split()) for line in LINES)
    without_eos = tokens["en"] - 60
    assert report["train"]["tokens_per_word"]["en"] == round(without_eos / words, 4)
    assert report["train"]["unknown_share"]["en"] == round(1 / without_eos, 8)


def test_special_symbols_in_text_are_pieces_of_text(prepared):
    pairs = open_pairs(prepared, "train")
    symbols = pairs.source_dictionary.symbols

    row = pairs.batch(np.arange(60), (200, 200))["source"][0]
    *pieces, last = row[: pairs.lengths[0, 0]]

    assert last == EOS
    assert min(pieces) > UNK
    assert "".join(symbols[i] for i in pieces).endswith("▁<s>▁<pad></s>▁<unk>")


def test_only_rare_letters_are_unknown(prepared):
    dictionary = open_pairs(prepared, "train").source_dictionary

    assert dictionary.index("世") != UNK, "frequent"
    assert dictionary.index("Q") != UNK, "ASCII"
    assert dictionary.index("☃") == UNK


@pytest.mark.parametrize(("split", "sides"), [("valid", VALID), ("test", TEST)])
def test_validation_and_test_text_is_kept_whole(prepared, report, split, sides):
    pairs = open_pairs(prepared, split)

    assert report[split]["pairs"] == len(sides.en)
    assert len(pairs) == len(sides.en)
    assert pairs.references() == sides.de
    assert read_lines(prepared / f"{split}.en") == sides.en
    assert report[split]["unknown_share"] == {"en": 0.0, "de": 0.0}
    assert pairs.lengths[sides.en.index(""), 0] == 1, "an empty side is kept"


def test_a_long_validation_line_is_kept_whole(prepared):
    assert open_pairs(prepared, "valid").lengths[3, 0] >= 301


@pytest.mark.parametrize(
    "text",
    [
        "ba diloba  3,5. (ne)",
        " on both sides ",
        "ﬁne\u00a0\tspaces\u200b½ Ｗｉｄｅ",
        "a",
        "",
        "▁x▁ y",
    ],
)
def test_pieces_decode_to_the_normalized_text(prepared, text):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))

    encoding = tokenizer.encode(text)

    normalized = unicodedata.normalize("NFKC", text).replace("\u200b", " ").replace("▁", " ")
    expected = " ".join(normalized.split())
    expected = expected.replace("⁄", "")  # of ½, not in the alphabet
    assert tokenizer.decode(encoding.ids).replace("<unk>", "") == expected
    # What --remove-bpe sentencepiece does.
    joined = "".join(encoding.tokens).replace("▁", " ").strip()
    assert joined.replace("<unk>", "") == expected


def test_the_tokenizer_and_the_dictionary_share_their_ids(prepared):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    symbols = open_pairs(prepared, "train").source_dictionary.symbols

    assert [tokenizer.id_to_token(number) for number in range(200)] == symbols


def test_no_piece_has_letters_beside_other_characters(prepared):
    symbols = open_pairs(prepared, "train").source_dictionary.symbols

    pieces = [symbol.lstrip("▁") for symbol in symbols[4:]]

    assert any(len(piece) > 3 for piece in pieces)
    for piece in pieces:
        has_letters = any(map(str.isalpha, piece))
        assert not has_letters or piece.isalpha(), piece


# ---- data sets of the hub ----------------------------------------------------------------------
def hub_folder(folder: Path, valid: str = "validation", column: str = "translation") -> Path:
    """Writes small files as wmt/wmt18 has them; returns the folder."""
    import datasets

    (folder / "de-en").mkdir(parents=True)
    splits = {
        "train": sentences(60),
        valid: sentences(7, seed=1),
        "test": ["a\nb", "c"],
    }
    for split, lines in splits.items():
        rows = []
        for line, other in zip(lines, translated(lines), strict=True):
            rows.append({column: {"de": other, "en": line}})
        path = folder / "de-en" / f"{split}-00000-of-00001.parquet"
        datasets.Dataset.from_list(rows).to_parquet(path)
    return folder


def test_parquet_files_of_the_hub_give_the_same_as_text(tmp_path, cache):
    hub = hub_folder(tmp_path / "hub")
    text = pair_corpus(tmp_path / "text", test_en=["a b", "c"], test_de=["A B", "C"])

    prepare(hub, hub / "prepared")
    prepare(text, text / "prepared")

    assert contents(hub / "prepared") == contents(text / "prepared")
    references = open_pairs(hub, "test").references()
    assert references == ["A B", "C"], "a line break would shift the lines"


def test_data_sets_that_do_not_fit_are_explained(tmp_path, cache):
    def refused(message: str, data, **flags):
        with pytest.raises(InputError, match=message):
            prepare(data, tmp_path / "out", **flags)

    hub = hub_folder(tmp_path / "hub")
    refused(
        'split train, has the languages de, en; expected a column .* "fr" and "de"',
        hub,
        source="fr",
        config="de-en",
    )
    refused("hub has no folder cs-en; expected one for --config", hub, config="cs-en")

    other_column = hub_folder(tmp_path / "column", column="pair")
    refused('has the columns pair; expected a column "translation"', other_column)
    other_split = hub_folder(tmp_path / "split", valid="more")
    refused(r"has the splits \w+, \w+; expected train and validation", other_split)

    broken = tmp_path / "broken"
    write_lines(broken / "de-en", "train.parquet", ["no parquet"])
    refused("broken cannot be read by datasets", broken)
    refused(
        r"train\.parquet is a file; expected a folder with train\.en",
        broken / "de-en/train.parquet",
    )
    refused("nobody/nothing is neither here nor a data set of the hub", "nobody/nothing")


def test_the_hubs_configuration_is_that_of_the_languages(tmp_path, cache, monkeypatch):
    import datasets

    features = datasets.Features({"translation": datasets.Translation(["de", "en"])})
    hub = hub_folder(tmp_path / "hub")
    splits = datasets.load_dataset(str(hub / "de-en")).cast(features)
    loaded = []

    def load(*names):
        loaded.append(names)
        return splits

    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["cs-en", "de-en"])
    monkeypatch.setattr(datasets, "load_dataset", load)

    message = "wmt18 is a data set of the hub; name the folder of the result with --out"
    with pytest.raises(InputError, match=message):
        pre.prepare("wmt/wmt18")

    report = prepare("wmt/wmt18", tmp_path / "out")
    assert loaded[-1] == ("wmt/wmt18", "de-en")
    assert report["train"]["pairs"] == 60
    source = report["sources"][0]
    assert len(source.pop("fingerprint")) == 16
    assert source == {"name": "wmt/wmt18", "rows": 60, "split": "train"}

    message = "has the configurations cs-en, de-en; expected fr-en .*with --config"
    with pytest.raises(InputError, match=message):
        prepare("wmt/wmt18", tmp_path / "fr", target="fr")


# ---- pairs that are dropped --------------------------------------------------------------------
def as_pairs(lines: list[str]) -> list[tuple[str, str]]:
    """Returns the lines with their translations."""
    return list(zip(lines, translated(lines), strict=True))


def train_corpus(folder: Path, pairs: list[tuple[str, str]]) -> Path:
    """Writes a corpus with these training pairs; returns its folder."""
    en, de = zip(*pairs, strict=True)
    return pair_corpus(folder, train_en=list(en), train_de=list(de))


# As clean-corpus-n.perl has it, exactly the ratio and exactly the limit stay; pieces are counted
# without EOS.
EXACTLY_AT_THE_LIMITS = [
    ("x y z", "Q W"),
    (" ".join(["ba"] * 40), " ".join(["BA"] * 40)),
]
GOOD = as_pairs(sentences(50)) + EXACTLY_AT_THE_LIMITS
BAD = {
    "empty": [("", "eins"), ("one", " \t"), ("", "")],
    "too_long": [
        ("ba " * 41, "di " * 41),  # in words
        (ascii_letters, "ba ba"),  # in pieces: of a letter each
    ],
    "identical": [("ba di lo", " ba  di lo")],
    "not_text": [
        ("12 13 14 ba", "ba di lo mu"),
        ("ba di lo", "3.1 / 7 -- ||"),
        ("\u200b", "zwei"),
    ],
    "duplicate": [GOOD[3], (GOOD[3][0].replace(" ", "  "), GOOD[3][1]), GOOD[49]],
    "length_ratio": [("ba di lo mu ne ga hi", "ba"), ("x y z u", "Q W")],
    "long_word": [("ba di " + "lo" * 501, "mu ne"), ("mu ne", "Q" * 80_000)],
}


def good_and_bad() -> list[tuple[str, str]]:
    """Returns the good pairs, and after them the bad ones in a random order."""
    bad = list(itertools.chain.from_iterable(BAD.values()))
    order = np.random.default_rng(0).permutation(len(bad))
    return GOOD + [bad[number] for number in order]


def test_each_reason_is_counted_and_the_right_pairs_stay(tmp_path):
    data = train_corpus(tmp_path, good_and_bad())

    report = prepare(data, tmp_path / "out", max_tokens=40)

    assert report["train"]["dropped"] == {reason: len(pairs) for reason, pairs in BAD.items()}
    opened = open_pairs(tmp_path / "out", "train")
    targets = [opened._sides[1][number] for number in range(len(opened))]
    assert [opened.decode(ids) for ids in targets] == [target for _, target in GOOD]
    sizes = opened.lengths - 1
    assert (sizes.max(1) <= 1.5 * sizes.min(1)).all()
    assert sizes[-2:].tolist() == [[6, 4], [40, 40]], "▁ba and ▁BA are pieces"


def test_without_limits_only_unusable_pairs_are_dropped(tmp_path):
    train = good_and_bad()
    data = train_corpus(tmp_path, train)

    report = prepare(
        data, tmp_path / "all", max_tokens=1000, ratio=0, letters=0, keep_duplicates=True
    )

    dropped = {}
    for reason, count in report["train"]["dropped"].items():
        if count:
            dropped[reason] = count
    assert dropped == {"empty": 4, "identical": 1, "long_word": 2}
    assert report["train"]["pairs"] == len(train) - 7
    assert len(open_pairs(tmp_path / "all", "train")) == len(train) - 7


JUNK = "".join(np.random.default_rng(0).choice(list("qxzjk"), 80_000))
JUNK_WORDS = " ".join(JUNK[start : start + 5] for start in range(0, 5000, 5))
LINE = sentences(1)[0]
REPEATED = (f"{LINE} \u4e16\u754c", f"{translated([LINE])[0]} \u4e16\u754c")
DROPPED = {
    "long_word": [("ba di", f"mu {JUNK}")],
    "too_long": [("ba di lo", JUNK_WORDS)],
    "too_long, in pieces": [("ba di " + JUNK[:900], "mu ne " + JUNK[900:1800])],
    "length_ratio": [("zq " * 40 + "q\u4e16\u754c" * 9, "ba")],
    "duplicate": [REPEATED] * 40,
}


@pytest.mark.parametrize("reason", DROPPED)
def test_nothing_is_learnt_from_a_pair_that_is_dropped(reason, tmp_path, capsys):
    train = as_pairs([line for line in sentences(200) if len(line) > 20])
    if reason == "duplicate":
        train.append(REPEATED)  # the first of equal pairs stays
    counted_as = reason.partition(",")[0]

    for name, added in (("clean", []), ("dirty", DROPPED[reason])):
        data = train_corpus(tmp_path / name, train + added)
        report = prepare(data, data / "out", coverage=0.999)

        dropped = report["train"]["dropped"]
        assert dropped[counted_as] == len(added)
        assert sum(dropped.values()) == len(added)
        assert report["learnt_from_pairs"] == len(train)
        assert report["train"]["pairs"] == len(train)

    clean = tmp_path / "clean/out"
    dirty = tmp_path / "dirty/out"
    for file in ("tokenizer.json", "dict.en.txt", "train.en-de.en.bin"):
        assert (dirty / file).read_bytes() == (clean / file).read_bytes(), file
    if reason in ("too_long, in pieces", "length_ratio"):
        sentence = f"1 of {len(train) + 1} pairs are not learnt from: they are dropped for their"
        assert sentence in capsys.readouterr().out


def test_languages_may_have_a_hyphen(tmp_path):
    valid = sentences(7, seed=1)
    for name, lines in (("train", sentences(30)), ("valid", valid)):
        write_lines(tmp_path, f"{name}.en", lines)
        write_lines(tmp_path, f"{name}.pt-BR", translated(lines))

    prepare(tmp_path, tmp_path / "out", target="pt-BR")

    pairs = open_pairs(tmp_path / "out", "valid")
    assert pairs.target_language == "pt-BR"
    assert pairs.references() == translated(valid)


def test_marks_of_letters_are_letters():
    pairs = [("हिन्दी में", "auf Hindi"), ("1 2 a", "b")]

    assert pre.clean(pairs, 250, 0.95)[0].tolist() == [0, pre.NOT_TEXT]


# ---- large corpora -----------------------------------------------------------------------------
@contextlib.contextmanager
def open_files_limited(more: int):
    """Lets this process open that many files more than it has open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/dev/fd")) + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_hundreds_of_chunks_are_not_as_many_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(pre, "CHUNK_LINES", 1)
    data = pair_corpus(tmp_path, count=120)

    with open_files_limited(30):
        report = prepare(data, tmp_path / "out", sample=20)

    assert len(open_pairs(tmp_path / "out", "train")) == 120
    assert report["train"]["pairs"] == 120


def test_a_sample_is_evenly_spaced(tmp_path, monkeypatch):
    learn_bpe = pre.learn_bpe
    seen = []

    def learn(lines, *rest):
        seen.extend(lines)
        return learn_bpe(iter(seen), *rest)

    monkeypatch.setattr(pre, "learn_bpe", learn)
    monkeypatch.setattr(pre, "CHUNK_LINES", 1)
    data = pair_corpus(tmp_path, count=120)

    report = prepare(data, tmp_path / "out", sample=20)

    lines = sentences(120)[5::6]
    seen_lines = itertools.chain.from_iterable(seen)
    assert sorted(seen_lines) == sorted(lines + translated(lines))
    assert report["learnt_from_pairs"] == 20


# ---- which files are read ----------------------------------------------------------------------
NEWSTESTS = ["newstest2013", "newstest2017", "newstest2016"]


@pytest.mark.parametrize(
    ("names", "chosen", "found"),
    [
        (["train", "val", "other"], {}, ["train", "val"]),
        (["train.gz", "dev", "test.gz"], {}, ["train.gz", "dev", "test.gz"]),
        (["train", "train.tok", "dev", "valid"], {"valid": "valid"}, ["train", "valid"]),
        (
            ["Training", "my.eval", "a_test", "contest"],
            {},
            ["Training", "my.eval", "a_test"],
        ),
        (["train", "train.gz", *NEWSTESTS], {}, ["train", "newstest2016", "newstest2017"]),
        (["train", "newstest2013"], {}, ["train", "newstest2013"]),
        (["train", "dev", "newstest2013"], {}, ["train", "dev", "newstest2013"]),
        (
            ["train", "dev", *NEWSTESTS, "x"],
            {"valid": "newstest2013", "test": "x"},
            ["train", "newstest2013", "x"],
        ),
        (["dev"], {}, []),
    ],
)
def test_files_are_found_by_their_names(tmp_path, names, chosen, found):
    for name in names:
        end = ".gz" if name.endswith(".gz") else ""
        for language in LANGUAGES:
            write_lines(tmp_path, f"{name.removesuffix('.gz')}.{language}", ["a"], end)

    splits = pre.find_text(tmp_path, "en", "de", **chosen)

    assert list(splits) == ["train", "valid", "test"][: len(found)]
    for side, language in enumerate(LANGUAGES):
        paths = [files[side] for files in splits.values()]
        assert [path.name.replace(f".{language}", "") for path in paths] == found


def test_what_is_trained_on_is_said_and_what_is_left_out(tmp_path, capsys):
    data = pair_corpus(tmp_path / "text")
    write_lines(data, "train.tok.en", ["a"])
    write_lines(data, "train.tok.de", ["a"])

    prepare(data, tmp_path / "out")

    used = "trained on train.en, train.de, evaluated on valid.en, valid.de"
    sentence = f"{used}; left out: train.tok.de, train.tok.en"
    assert sentence in capsys.readouterr().out
    train = open_pairs(tmp_path / "out", "train")
    valid = open_pairs(tmp_path / "out", "valid")
    assert said(train, valid) == f" ({sentence})"


# ---- input that cannot be prepared -------------------------------------------------------------
TRAIN = translated(sentences(30))
NOT_UTF8 = [*TRAIN[:20], "Stra\udcdfe", *TRAIN[21:]]
# By the message: the files that differ from a good corpus; None: removed.
UNUSABLE = {
    r"neither train\.en and train\.de \(plain or \.gz\) nor parquet files; found valid": {
        "train.en": None,
        "train.de": None,
    },
    r"no validation text; expected valid\.en and valid\.de": {
        "valid.en": None,
        "valid.de": None,
    },
    r"has no train\.de \(plain or \.gz\); expected it for the train split": {
        "train.de": None,
    },
    r"\S+/train\.en has 30 lines and \S+/train\.de 29; expected equal": {
        "train.de": TRAIN[:29],
    },
    r"has dev, valid, which all say the valid split; keep one": {
        "dev.en": ["a"],
        "dev.de": ["b"],
    },
    r"test\.(en|de) is empty": {"test.en": [], "test.de": []},
    r"train\.de line 21 is not UTF-8 \(byte 0xdf: .*\); convert the file to UTF-8": {
        "train.de": NOT_UTF8,
    },
    r"train\.en has no pair that can be used; dropped: 30 identical": {
        "train.de": sentences(30),
    },
    r"no pair that can be used; dropped: 30 length_ratio": {
        "train.de": ["di"] * 30,
    },
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_input_that_cannot_be_prepared_is_explained(tmp_path, message):
    pair_corpus(tmp_path, count=30)
    for file, lines in UNUSABLE[message].items():
        if lines is None:
            (tmp_path / file).unlink()
        else:
            write_lines(tmp_path, file, lines)

    with pytest.raises(InputError, match=message):
        prepare(tmp_path, tmp_path / "out")
