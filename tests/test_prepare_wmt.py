"""data/prepare/wmt.py on small texts that the tests make."""

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path
from string import ascii_letters

import numpy as np
import pytest
from tokenizers import Tokenizer

from data.prepare import wmt as pre
from data.wmt import EOS, UNK, open_pairs, read_lines
from errors import InputError

ROOT = Path(__file__).parent.parent
SYLLABLES = ["ba", "di", "lo", "mu", "ne", "rä", "ßo", "tü", "ga", "hi"]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Different ones, whose words share syllables, so that there are pieces to learn."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        words = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(rng.integers(4, 9))]
        lines.append(f"{' '.join(words)} {seed}{number}.")
    return lines


def translated(lines: list[str]) -> list[str]:
    """Pairs of about equal length that are not identical."""
    return [line.swapcase() for line in lines]


def write(folder: Path, name: str, lines: list[str], end: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines).encode()
    (folder / f"{name}{end}").write_bytes(gzip.compress(text) if end == ".gz" else text)


def corpus(folder: Path, count: int = 60, end: str = "", valid: str = "valid", **others: list[str]) -> Path:
    """train and valid text in en and de; other files by name: train_en=[…]."""
    for name, lines in (("train", sentences(count)), (valid, sentences(7, 1))):
        write(folder, f"{name}.en", lines, end)
        write(folder, f"{name}.de", translated(lines), end)
    for name, lines in others.items():
        write(folder, name.replace("_", "."), lines, end)
    return folder


def prepare(data: Path, out: Path, **flags) -> dict:
    return pre.prepare(data, out, **({"vocabulary": 160} | flags))


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a prepared folder but its report."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.name != "report.json"}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(pre, "CHUNK_LINES", 13)


# End to end


@pytest.mark.parametrize("end", ["", ".gz"])
def test_text_becomes_a_folder_that_opens(tmp_path, small_chunks, end):
    test = ["Ein  Test,\u2028mit Zeichen", "zwei"]
    report = prepare(corpus(tmp_path, end=end, test_en=["a", ""], test_de=test), tmp_path / "prepared")
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
    prepare(corpus(tmp_path), tmp_path / "out")
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
    prepare(corpus(tmp_path, train_en=lines, train_de=translated(lines)), tmp_path / "out")
    pairs = open_pairs(tmp_path / "out", "train")
    row = pairs.batch(np.array([0]), (200, 200))["source"][0, : pairs.lengths[0, 0]]
    assert row[-1] == EOS and row[:-1].min() > UNK
    assert "".join(pairs.source_dictionary.symbols[i] for i in row[:-1]).endswith("▁<s>▁<pad></s>▁<unk>")


def test_rare_characters_are_unknown_and_counted(tmp_path):
    lines = [
        f"{line} {'☃☃' if number == 3 else ''}{'世界' if number < 30 else ''}"
        for number, line in enumerate(sentences(60))
    ]
    data = corpus(tmp_path, train_en=lines, train_de=translated(lines))
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


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_parquet_files_of_the_hub_give_the_same_as_text(tmp_path, no_network):
    prepare(hub_folder(tmp_path / "hub"), tmp_path / "hub" / "prepared")
    data = corpus(tmp_path / "text", test_en=["a b", "c"], test_de=["A B", "C"])
    prepare(data, tmp_path / "text" / "prepared")
    assert contents(tmp_path / "hub" / "prepared") == contents(tmp_path / "text" / "prepared")
    assert open_pairs(tmp_path / "hub", "test").references() == ["A B", "C"], "a line break would shift the lines"


def test_data_sets_that_do_not_fit_are_explained(tmp_path, no_network):
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


def test_a_data_set_of_the_hub_is_taken_in_the_configuration_of_the_languages(tmp_path, no_network, monkeypatch):
    import datasets

    features = datasets.Features({"translation": datasets.Translation(["de", "en"])})
    splits = datasets.load_dataset(str(hub_folder(tmp_path / "hub") / "de-en")).cast(features)
    loaded = []
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["cs-en", "de-en"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: loaded.append(names) or splits)
    with pytest.raises(InputError, match="wmt18 is a data set of the hub; give the folder of the result with --out"):
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
    data = corpus(tmp_path, train_en=[one for one, _ in train], train_de=[one for _, one in train])
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
    data = corpus(tmp_path, train_en=[one for one, _ in train], train_de=[one for _, one in train])
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
    report = prepare(corpus(tmp_path, valid_en=valid, valid_de=other), tmp_path / "out")
    pairs = open_pairs(tmp_path / "out", "valid")
    assert report["valid"]["pairs"] == len(pairs) == 6 and pairs.references() == other
    assert pairs.lengths[3, 0] >= 301 and read_lines(tmp_path / "out" / "valid.en") == valid


def test_marks_of_letters_are_letters():
    pair = ("हिन्दी में", "auf Hindi")
    assert pre.clean([pair, ("1 2 a", "b")], 250, 0.95)[0].tolist() == [0, pre.NOT_TEXT]


# Going on, and what does not change the result


def test_neither_workers_nor_the_size_of_chunks_change_the_result(tmp_path, monkeypatch):
    data = corpus(tmp_path, 100)
    prepare(data, tmp_path / "whole")
    monkeypatch.setattr(pre, "CHUNK_LINES", 17)
    prepare(data, tmp_path / "one")
    prepare(data, tmp_path / "two", workers=2)
    assert contents(tmp_path / "whole") == contents(tmp_path / "one") == contents(tmp_path / "two")


STEPS = ["_unpack", "_cut", "_clean_chunk", "_find_duplicates", "learn_bpe", "_encode_chunk", "_join", "write_mmap"]


@pytest.mark.parametrize("function", STEPS)
def test_a_killed_preparation_goes_on(tmp_path, small_chunks, monkeypatch, capsys, function):
    data = corpus(tmp_path, end=".gz")
    calls, killed_at = 0, 0
    original = getattr(pre, function)

    def kill(*arguments):
        nonlocal calls
        calls += 1
        if calls == killed_at:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(pre, function, kill)
    prepare(data, tmp_path / "expected")
    needed, calls, killed_at = calls, 0, 1 if function in ("learn_bpe", "_find_duplicates") else 2
    first = killed_at
    with pytest.raises(KeyboardInterrupt):
        prepare(data, tmp_path / "out")
    with pytest.raises(InputError, match="not prepared to its end"):
        open_pairs(tmp_path / "out", "train")
    with pytest.raises(InputError, match="prepared with other flag ratio: 1.5, now 2"):
        prepare(data, tmp_path / "out", ratio=2)
    calls, killed_at = 0, 0
    monkeypatch.setattr(pre, "CHUNK_LINES", 8)  # the chunks that are there still fit
    capsys.readouterr()
    prepare(data, tmp_path / "out")
    assert "going on with the unfinished" in capsys.readouterr().out
    done = 0 if function == "write_mmap" else first - 1  # the small splits are written anew
    assert calls == needed - done, "what was finished is done again, or what was not is left out"
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_hundreds_of_chunks_are_not_as_many_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(pre, "CHUNK_LINES", 1)
    data = corpus(tmp_path, 120)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 30, before[1]))
    try:
        prepare(data, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(open_pairs(tmp_path / "out", "train")) == 120


KILLED = """
import os, signal, sys
import numpy as np
from data.prepare import wmt as pre
pre.CHUNK_LINES, write, calls = 13, np.savez, 0
def savez(file, **arrays):
    global calls
    calls += 1
    file.write(b"half of it")
    file.flush()
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    file.seek(0)
    write(file, **arrays)
np.savez = savez
pre.prepare(sys.argv[1], sys.argv[2], vocabulary=160)
"""


def test_kill_9_in_the_middle_of_a_file_and_start_again(tmp_path, small_chunks):
    data = corpus(tmp_path)
    prepare(data, tmp_path / "expected")
    for calls in (3, 4, 2):  # cleaning has 5 chunks, encoding 5: killed in both, three times
        command = [sys.executable, "-c", KILLED, str(data), str(tmp_path / "out"), str(calls)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == -9, result.stderr
    assert list((tmp_path / "out" / "parts").glob("*.partial"))
    prepare(data, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_finished_preparation_is_not_done_again(tmp_path, monkeypatch, capsys):
    data = corpus(tmp_path)
    first = prepare(data, tmp_path / "out")
    monkeypatch.setattr(pre, "clean", lambda *arguments: pytest.fail("cleaned again"))
    assert prepare(data, tmp_path / "out") == first
    assert "already prepared: 60 training pairs" in capsys.readouterr().out
    with pytest.raises(InputError, match="prepared with other flag vocabulary: 160, now 152; choose another folder"):
        prepare(data, tmp_path / "out", vocabulary=152)
    write(data, "train.en", sentences(61))
    with pytest.raises(InputError, match=r"prepared with other text: train\.en \(\d+ bytes\)"):
        prepare(data, tmp_path / "out")


def test_byte_pair_encoding_is_learnt_from_an_evenly_spaced_sample(tmp_path, small_chunks, monkeypatch):
    seen = []
    original = pre.learn_bpe

    def learn(lines, *arguments):
        lines = list(lines)
        seen.extend(line for batch in lines for line in batch)
        return original(iter(lines), *arguments)

    monkeypatch.setattr(pre, "learn_bpe", learn)
    report = prepare(corpus(tmp_path), tmp_path / "out", sample=10)
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
                write(folder, f"{stem}.{language}", ["a"], dot + end)
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
    assert pre.find_text(tmp_path, "en", "de") is None


def test_lines_end_with_line_feeds_alone(tmp_path, small_chunks):
    lines = [f"{line}\x0b und\u2028mehr\x85" for line in sentences(30)]
    data = corpus(tmp_path, train_en=lines, train_de=translated(lines))
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
    text = pre.Text(path, "text", cut["bounds"], 13)
    assert [text.lines(chunk) for chunk in range(len(cut["bounds"]) - 1)] == [
        lines[i : i + 13] for i in range(0, count, 13)
    ]


def test_input_that_cannot_be_prepared_is_explained(tmp_path, small_chunks):
    def refused(message: str, data, **flags):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with pytest.raises(InputError, match=message):
            prepare(data, tmp_path / "out", **flags)

    refused("there is no folder .*nowhere; expected one with train.en and train.de", tmp_path / "nowhere")
    data = tmp_path / "data"
    data.mkdir()
    refused(r"neither train\.en and train\.de \(plain or \.gz\) nor parquet files; found nothing", data)
    write(data, "train.en", sentences(30))
    refused(r"no validation text; expected valid\.en and valid\.de", data)
    refused(r"train\.en is a file; expected a folder", data / "train.en")
    write(data, "valid.en", sentences(3))
    refused(r"has no train\.de \(plain or \.gz\); expected it for the train split", data)
    write(data, "train.de", translated(sentences(29)))
    refused(r"has no valid\.de", data)
    refused(r"has no newstest2019\.en .* for the valid split", data, valid="newstest2019")
    write(data, "valid.de", sentences(3))
    refused(r"data/train\.en has 30 lines and .*data/train\.de 29; expected as many", data)
    write(data, "train.de", translated(sentences(30)))
    write(data, "valid.de", sentences(4))
    refused(r"valid\.en has 3 lines and .*valid\.de 4", data)
    write(data, "valid.de", sentences(3))
    write(data, "test.en", [])
    write(data, "test.de", [])
    refused(r"test\.en is empty|test\.de is empty", data)
    (data / "test.en").unlink()
    (data / "test.de").unlink()

    lines = [line.encode() for line in translated(sentences(30))]
    lines[20] = "Straße".encode("latin-1")
    (data / "train.de").write_bytes(b"\n".join(lines))
    refused(r"train\.de line 21 is not UTF-8 \(byte 0xdf: .*\); convert it to UTF-8", data)
    (data / "train.de").unlink()
    (data / "train.de.gz").write_bytes(gzip.compress(b"\n".join(lines))[:-20])
    refused(r"train\.de\.gz cannot be decompressed", data)
    (data / "train.de.gz").write_bytes(b"text")
    refused(r"train\.de\.gz cannot be decompressed: Not a gzipped file", data)
    write(data, "train.de", sentences(30))
    refused(r"train\.en has no pair that can be used; dropped: 30 identical", data)
    write(data, "train.de", ["di"] * 30)
    refused(r"no pair that can be used; dropped: 30 length_ratio", data)
    write(data, "train.de", translated(sentences(30)))
    refused("vocabulary 100 is too small for the text; expected more than its 10[0-9] characters", data, vocabulary=100)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/?\S* cannot be written"):
        prepare(data, tmp_path / "file")
    for name, value in {
        "vocabulary": 99,
        "max_tokens": 0,
        "sample": 0,
        "ratio": 0.5,
        "letters": 1.1,
        "coverage": -0.1,
        "workers": 0,
    }.items():
        refused(f"{name} {value} is out of range", data, **{name: value})
    refused("source 'e n' is no language", data, source="e n")
    refused("source and target are both de", data, source="de")
    with pytest.raises(InputError, match="is neither a folder nor a data set of the hub|--out"):
        pre.load_splits(str(data / "train.en"), "", "en", "de")


def test_the_command_prepares_and_its_errors_are_one_line(tmp_path, capsys):
    data = corpus(tmp_path, train_en=[*sentences(30), ""], train_de=[*translated(sentences(30)), "x"])
    pre.main(["--data", str(data), "--vocabulary", "160", "--workers", "1", "--source", "de", "--target", "en"])
    printed = capsys.readouterr().out
    assert "31 training pairs read; dropped: 1 empty\n" in printed and "tokens a word: de " in printed
    assert "30 training pairs, 7 valid; 160 symbols" in printed
    assert open_pairs(data, "train").source_language == "de"
    command = [sys.executable, "-m", "data.prepare.wmt", "--data", str(tmp_path / "nowhere")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: there is no folder") and result.stderr.count("\n") == 1
