"""data/prepare/wmt.py on small texts that the tests make."""

import json
import os
import resource
import unicodedata
from pathlib import Path
from string import ascii_letters

import numpy as np
import pytest
from corpora import contents, pair_corpus, sentences, translated, without_network, write_lines
from tokenizers import Tokenizer

from data.prepare import wmt as pre
from data.wmt import EOS, UNK, open_pairs, read_lines
from errors import InputError


def prepare(data: Path, out: Path, **flags) -> dict:
    return pre.prepare(data, out, **({"vocabulary": 160} | flags))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(pre, "CHUNK_LINES", 13)


# End to end


def test_text_becomes_a_folder_that_opens(tmp_path, small_chunks):
    test = ["Ein  Test,\u2028mit Zeichen", "zwei"]
    report = prepare(pair_corpus(tmp_path, test_en=["a", ""], test_de=test), tmp_path / "prepared")
    names = [
        "dict.de.txt",
        "dict.en.txt",
        "report.json",
        "test.de",
        "test.en",
        "tokenizer.json",
        "valid.de",
        "valid.en",
    ]
    names += [f"{s}.en-de.{k}.{e}" for s in ("train", "valid", "test") for k in ("en", "de") for e in ("bin", "idx")]
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == sorted(names)
    assert json.loads((tmp_path / "prepared" / "report.json").read_text()) == report

    pairs = open_pairs(tmp_path, "train")
    assert len(pairs) == report["train"]["pairs"] == 60 == report["train"]["lines"]
    assert pairs.source_dictionary is pairs.target_dictionary
    assert len(pairs.source_dictionary) == report["vocabulary"] == 160
    lines = sentences(60)
    everything = pairs.batch(np.arange(60), (60, 60))
    assert [pairs.decode(row) for row in everything["target"]] == translated(lines)
    assert [row[row > 2].tolist() for row in everything["source"]] == [ids[:-1].tolist() for ids in pairs.encode(lines)]
    # The counts of the dictionary are those of the training text, specials apart.
    tokens = np.concatenate([everything["source"].ravel(), everything["target"].ravel()])
    counts = np.bincount(tokens, minlength=160)
    assert pairs.source_dictionary.counts[4:] == counts[4:].tolist() and counts[UNK] == 0
    assert report["train"]["tokens"] == {"en": int(pairs.lengths[:, 0].sum()), "de": int(pairs.lengths[:, 1].sum())}
    words = sum(len(line.split()) for line in lines)
    assert report["train"]["tokens_per_word"]["en"] == round((report["train"]["tokens"]["en"] - 60) / words, 4)

    assert open_pairs(tmp_path, "valid").references() == translated(sentences(7, 1))
    pairs = open_pairs(tmp_path, "test")
    assert pairs.references() == test, "the text is kept as it is"
    assert pairs.lengths[1, 0] == 1, "an empty side of the test text is kept"


def test_pieces_are_as_fairseq_and_sentencepiece_expect(tmp_path):
    prepare(pair_corpus(tmp_path), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    dictionary = open_pairs(tmp_path / "out", "train").source_dictionary
    assert [tokenizer.id_to_token(number) for number in range(160)] == dictionary.symbols
    for text in (
        "ba diloba  3,5. (ne)",
        " leading and trailing ",
        "ﬁne\u00a0\tspaces\u200b½ Ｗｉｄｅ",
        "a",
        "",
        "▁x▁ y",
    ):
        expected = " ".join(unicodedata.normalize("NFKC", text).replace("\u200b", " ").replace("▁", " ").split())
        encoding = tokenizer.encode(text)
        known = expected.replace("⁄", "")  # of ½, not in the alphabet
        assert tokenizer.decode(encoding.ids).replace("<unk>", "") == known
        # What --remove-bpe sentencepiece does.
        assert "".join(encoding.tokens).replace("▁", " ").strip().replace("<unk>", "") == known
    pieces = [symbol.lstrip("▁") for symbol in dictionary.symbols[4:]]
    assert any(len(piece) > 3 for piece in pieces)
    assert not any(any(map(str.isalpha, piece)) and not piece.isalpha() for piece in pieces), "letters beside others"


def test_special_symbols_in_text_are_text(tmp_path):
    lines = [f"{line} <s> <pad></s> <unk>" for line in sentences(40)]
    prepare(pair_corpus(tmp_path, train_en=lines, train_de=translated(lines)), tmp_path / "out")
    pairs = open_pairs(tmp_path / "out", "train")
    row = pairs.batch(np.array([0]), (200, 200))["source"][0, : pairs.lengths[0, 0]]
    assert row[-1] == EOS and row[:-1].min() > UNK
    assert "".join(pairs.source_dictionary.symbols[i] for i in row[:-1]).endswith("▁<s>▁<pad></s>▁<unk>")


def test_rare_characters_are_unknown_and_counted(tmp_path):
    lines = [
        f"{line} {'☃☃' if number == 3 else ''}{'世界' if number < 30 else ''}"
        for number, line in enumerate(sentences(60))
    ]
    data = pair_corpus(tmp_path, train_en=lines, train_de=translated(lines))
    report = prepare(data, tmp_path / "out", coverage=0.998)
    dictionary = open_pairs(tmp_path / "out", "train").source_dictionary
    assert UNK not in (dictionary.index("世"), dictionary.index("Q")), "frequent, or ASCII"
    assert dictionary.index("☃") == UNK
    shares = report["train"]["unknown_share"]
    assert shares["en"] == round(1 / (report["train"]["tokens"]["en"] - 60), 8) and shares["de"] > 0
    assert report["valid"]["unknown_share"] == {"en": 0.0, "de": 0.0}


def hub_folder(folder: Path, valid: str = "validation", column: str = "translation") -> Path:
    """wmt/wmt18's files, small."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "de-en").mkdir(parents=True)
    for split, lines in (("train", sentences(60)), (valid, sentences(7, 1)), ("test", ["a\nb", "c"])):
        rows = [{"de": other, "en": line} for line, other in zip(lines, translated(lines), strict=True)]
        table = pa.table({column: rows})
        pq.write_table(table, folder / "de-en" / f"{split}-00000-of-00001.parquet")
    return folder


def test_parquet_files_of_the_hub_give_the_same_as_text(tmp_path, monkeypatch):
    without_network(tmp_path, monkeypatch)
    prepare(hub_folder(tmp_path / "hub"), tmp_path / "hub" / "prepared")
    data = pair_corpus(tmp_path / "text", test_en=["a b", "c"], test_de=["A B", "C"])
    prepare(data, tmp_path / "text" / "prepared")
    assert contents(tmp_path / "hub" / "prepared") == contents(tmp_path / "text" / "prepared")
    assert open_pairs(tmp_path / "hub", "test").references() == ["A B", "C"], "a line break would shift the lines"


def test_data_sets_that_do_not_fit_are_explained(tmp_path, monkeypatch):
    without_network(tmp_path, monkeypatch)

    def refused(message: str, data, **flags):
        with pytest.raises(InputError, match=message):
            prepare(data, tmp_path / "out", **flags)

    data = hub_folder(tmp_path / "hub")
    refused(
        r"split train, has the languages de, en; expected a column .* \"fr\" and \"de\"",
        data,
        source="fr",
        config="de-en",
    )
    refused('has the columns pair; expected a column "translation"', hub_folder(tmp_path / "column", column="pair"))
    refused(r"has the splits \w+, \w+; expected train and validation", hub_folder(tmp_path / "split", valid="more"))
    (tmp_path / "broken" / "de-en").mkdir(parents=True)
    (tmp_path / "broken" / "de-en" / "train.parquet").write_bytes(b"no parquet")
    refused("broken cannot be read by datasets", tmp_path / "broken")


def test_a_data_set_of_the_hub_is_taken_in_the_configuration_of_the_languages(tmp_path, monkeypatch):
    import datasets

    without_network(tmp_path, monkeypatch)
    features = datasets.Features({"translation": datasets.Translation(["de", "en"])})
    splits = datasets.load_dataset(str(hub_folder(tmp_path / "hub") / "de-en")).cast(features)
    loaded = []
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["cs-en", "de-en"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: loaded.append(names) or splits)
    with pytest.raises(InputError, match="wmt18 is a data set of the hub; name the folder of the result with --out"):
        pre.prepare("wmt/wmt18")
    report = prepare("wmt/wmt18", tmp_path / "out")
    assert loaded[-1] == ("wmt/wmt18", "de-en") and report["train"]["pairs"] == 60
    assert report["sources"][0] == {"name": "wmt/wmt18", "rows": 60, "split": "train"}
    message = "wmt/wmt18 has the configurations cs-en, de-en; expected fr-en or en-fr, or choose one with --config"
    with pytest.raises(InputError, match=message):
        prepare("wmt/wmt18", tmp_path / "fr", target="fr")
    with pytest.raises(InputError, match="hub has no folder cs-en; expected one for --config"):
        prepare(tmp_path / "hub", tmp_path / "cs", config="cs-en")


# Cleaning


def test_every_reason_is_counted_and_the_right_pairs_stay(tmp_path, small_chunks):
    good = sentences(50)
    pairs = list(zip(good, translated(good), strict=True))
    strange = {
        "empty": [("", "eins"), ("one", " \t"), ("", "")],
        "too_long": [("ba " * 41, "di " * 41), (ascii_letters, "ba ba")],  # words; pieces: of a letter each
        "identical": [("ba di lo", " ba  di lo")],
        "not_text": [("12 13 14 ba", "ba di lo mu"), ("ba di lo", "3.1 / 7 -- ||"), ("\u200b", "zwei")],
        "duplicate": [pairs[3], (pairs[3][0].replace(" ", "  "), pairs[3][1]), pairs[49]],
        "length_ratio": [("ba di lo mu ne ga hi", "ba")],
    }
    added = [pair for of_reason in strange.values() for pair in of_reason]
    order = np.random.default_rng(0).permutation(len(added))
    train = pairs + [added[number] for number in order]
    data = pair_corpus(tmp_path, train_en=[one for one, _ in train], train_de=[one for _, one in train])
    report = prepare(data, tmp_path / "out", max_tokens=40)
    assert report["train"]["dropped"] == {reason: len(of_reason) for reason, of_reason in strange.items()}
    opened = open_pairs(tmp_path / "out", "train")
    assert [opened.decode(opened._sides[1][number]) for number in range(len(opened))] == [one for _, one in pairs]

    flags = {"max_tokens": 1000, "ratio": 0, "letters": 0, "keep_duplicates": True}
    report = prepare(data, tmp_path / "all", **flags)
    assert {reason: count for reason, count in report["train"]["dropped"].items() if count} == {
        "empty": 4,
        "identical": 1,
    }
    assert report["train"]["pairs"] == len(train) - 5 == len(open_pairs(tmp_path / "all", "train"))


def test_exactly_the_ratio_and_exactly_the_limit_stay(tmp_path):
    """As clean-corpus-n.perl has it; the pieces of both sides are counted without EOS."""
    lines = sentences(40)
    more = [("x y z", "Q W"), ("x y z u", "Q W"), ("ba " * 30, "BA " * 30), ("ba " * 31, "BA " * 31)]
    train = [*zip(lines, translated(lines), strict=True), *more]
    data = pair_corpus(tmp_path, train_en=[one for one, _ in train], train_de=[one for _, one in train])
    report = prepare(data, tmp_path / "out", max_tokens=30)
    pairs = open_pairs(tmp_path / "out", "train")
    sizes = pairs.lengths - 1
    assert (sizes.max(1) <= 1.5 * sizes.min(1)).all()
    sources = [pairs.decode(pairs._sides[0][number]) for number in range(len(pairs))]
    kept = [pair[0].strip() in sources for pair in more]
    assert kept == [True, False, True, False] and sizes[-1].tolist() == [30, 30], "▁ba and ▁BA are pieces"
    dropped = report["train"]["dropped"]
    assert (dropped["length_ratio"], dropped["too_long"]) == (1, len(lines) - len(pairs) + 3)


def test_validation_text_is_never_cleaned(tmp_path):
    valid = ["", "same same", "1 2 3 4", "ba " * 300, "ba di", "ba di"]
    other = ["x", "same same", "5", "ba", "di ba", "di ba"]
    report = prepare(pair_corpus(tmp_path, valid_en=valid, valid_de=other), tmp_path / "out")
    pairs = open_pairs(tmp_path / "out", "valid")
    assert report["valid"]["pairs"] == len(pairs) == 6 and pairs.references() == other
    assert pairs.lengths[3, 0] >= 301 and read_lines(tmp_path / "out" / "valid.en") == valid


def test_marks_of_letters_are_letters():
    pair = ("हिन्दी में", "auf Hindi")
    assert pre.clean([pair, ("1 2 a", "b")], 250, 0.95)[0].tolist() == [0, pre.NOT_TEXT]


def test_hundreds_of_chunks_are_not_as_many_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(pre, "CHUNK_LINES", 1)
    data = pair_corpus(tmp_path, 120)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 30, before[1]))
    try:
        prepare(data, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(open_pairs(tmp_path / "out", "train")) == 120


def test_byte_pair_encoding_is_learnt_from_an_evenly_spaced_sample(tmp_path, small_chunks, monkeypatch):
    seen = []
    original = pre.learn_bpe

    def learn(lines, *arguments):
        lines = list(lines)
        seen.extend(line for batch in lines for line in batch)
        return original(iter(lines), *arguments)

    monkeypatch.setattr(pre, "learn_bpe", learn)
    report = prepare(pair_corpus(tmp_path), tmp_path / "out", sample=10)
    expected = [sentences(60)[number] for number in range(5, 60, 6)]
    assert sorted(seen) == sorted(expected + translated(expected)) and report["learnt_from_pairs"] == 10
    assert report["train"]["pairs"] == 60


# Files


def test_files_are_found_by_their_names(tmp_path):
    def found(*names: str, **flags) -> dict[str, str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in names:
            for language in ("en", "de"):
                stem, dot, end = name.partition(".gz")
                write_lines(folder, f"{stem}.{language}", ["a"], dot + end)
        splits = pre.find_text(folder, "en", "de", **flags)
        assert all(one.name.replace(".en", ".de") == other.name for one, other in splits.values())
        return {split: paths[0].name.replace(".en", "") for split, paths in splits.items()}

    assert found("train", "val", "other") == {"train": "train", "valid": "val"}
    assert found("train.gz", "dev", "valid", "test.gz") == {"train": "train.gz", "valid": "valid", "test": "test.gz"}
    newstest = {"train": "train", "valid": "newstest2016", "test": "newstest2017"}
    assert found("train", "train.gz", "newstest2013", "newstest2017", "newstest2016") == newstest
    assert found("train", "newstest2013") == {"train": "train", "valid": "newstest2013"}
    assert found("train", "dev", "newstest2013")["test"] == "newstest2013"
    flags = {"valid": "newstest2012", "test": "test_2016_flickr"}
    assert (
        found("train", "dev", "newstest2012", "newstest2013", "test_2016_flickr", **flags) == {"train": "train"} | flags
    )
    assert pre.find_text(tmp_path, "en", "de") == {}


def test_lines_end_with_line_feeds_alone(tmp_path, small_chunks):
    lines = [f"{line}\x0b und\u2028mehr\x85" for line in sentences(30)]
    data = pair_corpus(tmp_path, train_en=lines, train_de=translated(lines))
    text = "\ufeff" + "\r\n".join(sentences(7, 1))  # as Windows has it, and no end of the last line
    (tmp_path / "valid.en").write_bytes(text.encode())
    report = prepare(data, tmp_path / "out")
    assert report["train"]["pairs"] == 30 and report["valid"]["pairs"] == 7
    assert read_lines(tmp_path / "out" / "valid.en") == sentences(7, 1)


@pytest.mark.parametrize("count", [12, 13, 14, 26])
@pytest.mark.parametrize("last", ["\n", ""])
def test_no_line_is_lost_where_chunks_meet(tmp_path, small_chunks, count, last):
    lines = [f"{number} ü" for number in range(count)]
    path = tmp_path / "text"
    path.write_bytes(("\n".join(lines) + last).encode())
    pre._cut(path, "text", 13, tmp_path / "cut.json")
    cut = json.loads((tmp_path / "cut.json").read_text())
    assert cut["lines"] == count and len(cut["bounds"]) == 1 + -(-count // 13)
    text = pre.TextFile(path, "text", cut["bounds"], 13)
    assert [text.lines(chunk) for chunk in range(len(cut["bounds"]) - 1)] == [
        lines[i : i + 13] for i in range(0, count, 13)
    ]


OUT_OF_RANGE = {"vocabulary": 99, "max_tokens": 0, "sample": 0, "ratio": 0.5, "letters": 1.1, "coverage": -0.1}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        *(({name: value}, f"--{name.replace('_', '-')} is {value}; expected") for name, value in OUT_OF_RANGE.items()),
        ({"source": "e n"}, "--source is e n; expected a language"),
        ({"source": "de"}, "--target is de; expected another language"),
        ({"vocabulary": 100}, "--vocabulary 100 is too small for the text; expected more than its 10[0-9] characters"),
    ],
)
def test_flags_out_of_range_are_refused(tmp_path, flags, message):
    with pytest.raises(InputError, match=message):
        prepare(pair_corpus(tmp_path), tmp_path / "out", **flags)


def test_input_that_cannot_be_prepared_is_explained(tmp_path, monkeypatch):
    without_network(tmp_path, monkeypatch)
    number = 0

    def refused(message: str, name: str = "", **files: list[str] | bytes | None):
        """Prepares the usual corpus with other files; None: without this one."""
        nonlocal number
        number += 1
        data = pair_corpus(tmp_path / f"data{number}", 30)
        for file, lines in files.items():
            path = data / file.replace("_", ".")
            if isinstance(lines, list):
                write_lines(data, path.name, lines)
            elif lines is None:
                path.unlink()
            else:
                path.write_bytes(lines)
        with pytest.raises(InputError, match=message):
            prepare(data / name, tmp_path / f"out{number}", **flags)

    flags = {}
    none = {f"{split}_{language}": None for split in ("train", "valid") for language in ("en", "de")}
    refused("there is no .*nowhere; expected train.en and train.de", "nowhere")
    refused(r"neither train\.en and train\.de \(plain or \.gz\) nor parquet files; found nothing", **none)
    refused(r"no validation text; expected valid\.en and valid\.de", valid_en=None, valid_de=None)
    refused(r"train\.en is a file; expected a folder", "train.en")
    refused(r"has no train\.de \(plain or \.gz\); expected it for the train split", train_de=None)
    refused(r"has no valid\.de", valid_de=None)
    lines = translated(sentences(30))
    refused(r"data\d+/train\.en has 30 lines and .*data\d+/train\.de 29; expected equal", train_de=lines[:29])
    refused(r"valid\.en has 7 lines and .*valid\.de 8", valid_de=lines[:8])
    refused(r"test\.en is empty|test\.de is empty", test_en=[], test_de=[])
    strange = b"\n".join([*(line.encode() for line in lines[:20]), "Straße".encode("latin-1"), b"x\n" * 9])
    refused(r"train\.de line 21 is not UTF-8 \(byte 0xdf: .*\); convert the file to UTF-8", train_de=strange)
    refused(r"train\.en has no pair that can be used; dropped: 30 identical", train_de=sentences(30))
    refused(r"no pair that can be used; dropped: 30 length_ratio", train_de=["di"] * 30)
    flags = {"valid": "newstest2019"}
    refused(r"has no newstest2019\.en .* for the valid split")
    with pytest.raises(InputError, match="nobody/nothing is neither here nor a data set of the hub"):
        pre.load_splits("nobody/nothing", "", "en", "de")
