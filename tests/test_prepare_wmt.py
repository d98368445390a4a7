"""data/prepare/wmt.py on small texts that the tests make."""

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


def prepare(data: Path, out: Path, **flags) -> dict:
    return pre.prepare(data, out, **({"vocabulary": 160} | flags))


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pre, "CHUNK_LINES", 13)
        yield


SPECIAL, BREAKS, RARE = " <s> <pad></s> <unk>", "\x0b und\u2028mehr\x85", " ☃☃"
ENDS = {0: SPECIAL, 1: BREAKS, 2: RARE, **dict.fromkeys(range(3, 30), " 世界")}
LINES = [line + ENDS.get(number, "") for number, line in enumerate(sentences(60))]
VALID = ["", "same same", "1 2 3 4", "ba " * 300, "ba di", "ba di"], ["x", "same same", "5", "ba", "di ba", "di ba"]
TEST = ["a", ""], ["Ein  Test,\u2028mit Zeichen", "zwei"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A prepared folder of unusual text."""
    data = tmp_path_factory.mktemp("wmt")
    others = {"valid_en": VALID[0], "valid_de": VALID[1], "test_en": TEST[0], "test_de": TEST[1]}
    pair_corpus(data, train_en=LINES, train_de=translated(LINES), **others)
    (data / "valid.en").write_bytes(("\ufeff" + "\r\n".join([*VALID[0], ""])).encode())  # as Windows has it
    (data / "test.de").write_bytes("\n".join(TEST[1]).encode())  # the last line has no end
    prepare(data, data / "prepared", vocabulary=200, coverage=0.995)
    return data / "prepared"


def test_text_becomes_a_folder_that_opens(prepared):
    report = json.loads((prepared / "report.json").read_text())
    names = {"report.json", "tokenizer.json", *(f"{name}.{k}" for name in ("valid", "test") for k in ("en", "de"))}
    names |= {"dict.en.txt", "dict.de.txt"}
    names |= {f"{s}.en-de.{k}.{e}" for s in ("train", "valid", "test") for k in ("en", "de") for e in ("bin", "idx")}
    assert {path.name for path in prepared.iterdir()} == names
    pairs = open_pairs(prepared, "train")
    assert len(pairs) == report["train"]["pairs"] == 60 == report["train"]["lines"], "only \\n ends a line"
    dictionary = pairs.source_dictionary
    assert dictionary is pairs.target_dictionary and len(dictionary) == report["vocabulary"] == 200
    everything = pairs.batch(np.arange(60), (200, 200))
    assert [pairs.decode(row) for row in everything["target"]][3:] == translated(LINES)[3:]
    assert [row[row > 2].tolist() for row in everything["source"]] == [ids[:-1].tolist() for ids in pairs.encode(LINES)]
    # The counts of the dictionary are those of the training text, specials apart.
    tokens = np.concatenate([everything["source"].ravel(), everything["target"].ravel()])
    counts = np.bincount(tokens, minlength=200)
    assert dictionary.counts[4:] == counts[4:].tolist() and counts[UNK] == 2
    tokens = report["train"]["tokens"]
    assert tokens == {"en": int(pairs.lengths[:, 0].sum()), "de": int(pairs.lengths[:, 1].sum())}
    words = sum(len(line.split()) for line in LINES)
    assert report["train"]["tokens_per_word"]["en"] == round((tokens["en"] - 60) / words, 4)

    special = everything["source"][0, : pairs.lengths[0, 0]]
    assert special[-1] == EOS and special[:-1].min() > UNK
    assert "".join(dictionary.symbols[i] for i in special[:-1]).endswith("▁<s>▁<pad></s>▁<unk>")
    assert UNK not in (dictionary.index("世"), dictionary.index("Q")), "frequent, or ASCII"
    assert dictionary.index("☃") == UNK
    assert report["train"]["unknown_share"]["en"] == round(1 / (tokens["en"] - 60), 8)


def test_validation_and_test_text_is_kept_whole(prepared):
    report = json.loads((prepared / "report.json").read_text())
    for split, (lines, others) in {"valid": VALID, "test": TEST}.items():
        pairs = open_pairs(prepared, split)
        assert report[split]["pairs"] == len(pairs) == len(lines) and pairs.references() == others
        assert read_lines(prepared / f"{split}.en") == lines
        assert report[split]["unknown_share"] == {"en": 0.0, "de": 0.0}
        assert pairs.lengths[lines.index(""), 0] == 1, "an empty side is kept"
    assert open_pairs(prepared, "valid").lengths[3, 0] >= 301


def test_pieces_are_as_fairseq_and_sentencepiece_expect(prepared):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    for text in ("ba diloba  3,5. (ne)", " on both sides ", "ﬁne\u00a0\tspaces\u200b½ Ｗｉｄｅ", "a", "", "▁x▁ y"):
        encoding = tokenizer.encode(text)
        expected = " ".join(unicodedata.normalize("NFKC", text).replace("\u200b", " ").replace("▁", " ").split())
        known = expected.replace("⁄", "")  # of ½, not in the alphabet
        assert tokenizer.decode(encoding.ids).replace("<unk>", "") == known
        # What --remove-bpe sentencepiece does.
        assert "".join(encoding.tokens).replace("▁", " ").strip().replace("<unk>", "") == known
    symbols = open_pairs(prepared, "train").source_dictionary.symbols
    assert [tokenizer.id_to_token(number) for number in range(200)] == symbols
    pieces = [symbol.lstrip("▁") for symbol in symbols[4:]]
    assert any(len(piece) > 3 for piece in pieces)
    assert not any(any(map(str.isalpha, piece)) and not piece.isalpha() for piece in pieces), "letters beside others"


def hub_folder(folder: Path, valid: str = "validation", column: str = "translation") -> Path:
    """wmt/wmt18's files, small."""
    import datasets

    (folder / "de-en").mkdir(parents=True)
    for split, lines in (("train", sentences(60)), (valid, sentences(7, 1)), ("test", ["a\nb", "c"])):
        rows = [{column: {"de": other, "en": line}} for line, other in zip(lines, translated(lines), strict=True)]
        datasets.Dataset.from_list(rows).to_parquet(folder / "de-en" / f"{split}-00000-of-00001.parquet")
    return folder


def test_parquet_files_of_the_hub_give_the_same_as_text(tmp_path, cache):
    prepare(hub_folder(tmp_path / "hub"), tmp_path / "hub" / "prepared")
    data = pair_corpus(tmp_path / "text", test_en=["a b", "c"], test_de=["A B", "C"])
    prepare(data, tmp_path / "text" / "prepared")
    assert contents(tmp_path / "hub" / "prepared") == contents(tmp_path / "text" / "prepared")
    assert open_pairs(tmp_path / "hub", "test").references() == ["A B", "C"], "a line break would shift the lines"


def test_data_sets_that_do_not_fit_are_explained(tmp_path, cache):
    def refused(message: str, data, **flags):
        with pytest.raises(InputError, match=message):
            prepare(data, tmp_path / "out", **flags)

    data = hub_folder(tmp_path / "hub")
    languages = 'split train, has the languages de, en; expected a column .* "fr" and "de"'
    refused(languages, data, source="fr", config="de-en")
    refused('has the columns pair; expected a column "translation"', hub_folder(tmp_path / "column", column="pair"))
    refused(r"has the splits \w+, \w+; expected train and validation", hub_folder(tmp_path / "split", valid="more"))
    write_lines(tmp_path / "broken" / "de-en", "train.parquet", ["no parquet"])
    refused("broken cannot be read by datasets", tmp_path / "broken")
    refused(r"train\.parquet is a file; expected a folder with train\.en", tmp_path / "broken/de-en/train.parquet")
    refused("hub has no folder cs-en; expected one for --config", data, config="cs-en")
    refused("nobody/nothing is neither here nor a data set of the hub", "nobody/nothing")


def test_a_data_set_of_the_hub_is_taken_in_the_configuration_of_the_languages(tmp_path, cache, monkeypatch):
    import datasets

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
    with pytest.raises(InputError, match="has the configurations cs-en, de-en; expected fr-en .*with --config"):
        prepare("wmt/wmt18", tmp_path / "fr", target="fr")


def test_every_reason_is_counted_and_the_right_pairs_stay(tmp_path):
    good = sentences(50)
    # As clean-corpus-n.perl has it, exactly the ratio and exactly the limit stay; pieces are counted without EOS.
    exactly = [("x y z", "Q W"), (" ".join(["ba"] * 40), " ".join(["BA"] * 40))]
    pairs = [*zip(good, translated(good), strict=True), *exactly]
    strange = {
        "empty": [("", "eins"), ("one", " \t"), ("", "")],
        "too_long": [("ba " * 41, "di " * 41), (ascii_letters, "ba ba")],  # words; pieces: of a letter each
        "identical": [("ba di lo", " ba  di lo")],
        "not_text": [("12 13 14 ba", "ba di lo mu"), ("ba di lo", "3.1 / 7 -- ||"), ("\u200b", "zwei")],
        "duplicate": [pairs[3], (pairs[3][0].replace(" ", "  "), pairs[3][1]), pairs[49]],
        "length_ratio": [("ba di lo mu ne ga hi", "ba"), ("x y z u", "Q W")],
        "long_word": [("ba di " + "lo" * 501, "mu ne"), ("mu ne", "Q" * 80_000)],
    }
    added = [pair for of_reason in strange.values() for pair in of_reason]
    order = np.random.default_rng(0).permutation(len(added))
    train = pairs + [added[number] for number in order]
    data = pair_corpus(tmp_path, train_en=[one for one, _ in train], train_de=[one for _, one in train])
    report = prepare(data, tmp_path / "out", max_tokens=40)
    assert report["train"]["dropped"] == {reason: len(of_reason) for reason, of_reason in strange.items()}
    opened = open_pairs(tmp_path / "out", "train")
    assert [opened.decode(opened._sides[1][number]) for number in range(len(opened))] == [one for _, one in pairs]
    sizes = opened.lengths - 1
    assert (sizes.max(1) <= 1.5 * sizes.min(1)).all()
    assert sizes[-2:].tolist() == [[6, 4], [40, 40]], "▁ba and ▁BA are pieces"

    flags = {"max_tokens": 1000, "ratio": 0, "letters": 0, "keep_duplicates": True}
    report = prepare(data, tmp_path / "all", **flags)
    dropped = {reason: count for reason, count in report["train"]["dropped"].items() if count}
    assert dropped == {"empty": 4, "identical": 1, "long_word": 2}
    assert report["train"]["pairs"] == len(train) - 7 == len(open_pairs(tmp_path / "all", "train"))


JUNK = "".join(np.random.default_rng(0).choice(list("qxzjk"), 80_000))
PAIR = sentences(1)[0], translated(sentences(1))[0]
DROPPED = {
    "long_word": [("ba di", f"mu {JUNK}")],
    "too_long": [("ba di lo", " ".join(JUNK[start : start + 5] for start in range(0, 5000, 5)))],
    "too_long, in pieces": [("ba di " + JUNK[:900], "mu ne " + JUNK[900:1800])],
    "length_ratio": [("zq " * 40 + "q\u4e16\u754c" * 9, "ba")],
    "duplicate": [(f"{PAIR[0]} \u4e16\u754c", f"{PAIR[1]} \u4e16\u754c")] * 40,
}


@pytest.mark.parametrize("reason", DROPPED)
def test_nothing_is_learnt_from_a_pair_that_is_dropped(reason, tmp_path, capsys):
    lines = [line for line in sentences(200) if len(line) > 20]
    train = [*zip(lines, translated(lines), strict=True), *DROPPED[reason][:1] * (reason == "duplicate")]
    for name, pairs in (("clean", train), ("dirty", train + DROPPED[reason])):
        texts = {f"train_{k}": list(side) for k, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True)}
        report = prepare(pair_corpus(tmp_path / name, **texts), tmp_path / name / "out", coverage=0.999)
        dropped = {"clean": 0, "dirty": len(DROPPED[reason])}[name]
        assert (
            report["train"]["dropped"][reason.partition(",")[0]] == dropped == sum(report["train"]["dropped"].values())
        )
        assert report["learnt_from_pairs"] == len(train) == report["train"]["pairs"]
    for file in ("tokenizer.json", "dict.en.txt", "train.en-de.en.bin"):
        assert (tmp_path / "dirty/out" / file).read_bytes() == (tmp_path / "clean/out" / file).read_bytes(), file
    if reason in ("too_long, in pieces", "length_ratio"):
        assert f"1 of {len(train) + 1} pairs are not learnt from: they are dropped for their" in capsys.readouterr().out


def test_languages_may_have_a_hyphen(tmp_path):
    train, valid = sentences(30), sentences(7, 1)
    for name, lines in (("train", train), ("valid", valid)):
        write_lines(tmp_path, f"{name}.en", lines)
        write_lines(tmp_path, f"{name}.pt-BR", translated(lines))
    prepare(tmp_path, tmp_path / "out", target="pt-BR")
    pairs = open_pairs(tmp_path / "out", "valid")
    assert (pairs.target_language, pairs.references()) == ("pt-BR", translated(valid))


def test_marks_of_letters_are_letters():
    pair = ("हिन्दी में", "auf Hindi")
    assert pre.clean([pair, ("1 2 a", "b")], 250, 0.95)[0].tolist() == [0, pre.NOT_TEXT]


def test_hundreds_of_chunks_are_not_as_many_open_files_and_a_sample_is_evenly_spaced(tmp_path, monkeypatch):
    seen, learn = [], pre.learn_bpe
    monkeypatch.setattr(pre, "learn_bpe", lambda lines, *rest: learn(seen.extend(lines) or iter(seen), *rest))
    monkeypatch.setattr(pre, "CHUNK_LINES", 1)
    data = pair_corpus(tmp_path, count=120)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 30, before[1]))
    try:
        report = prepare(data, tmp_path / "out", sample=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(open_pairs(tmp_path / "out", "train")) == 120 == report["train"]["pairs"]
    expected = [sentences(120)[number] for number in range(5, 120, 6)]
    assert sorted(itertools.chain.from_iterable(seen)) == sorted(expected + translated(expected))
    assert report["learnt_from_pairs"] == 20


NEWSTESTS = ["newstest2013", "newstest2017", "newstest2016"]


@pytest.mark.parametrize(
    ("names", "chosen", "found"),
    [
        (["train", "val", "other"], {}, ["train", "val"]),
        (["train.gz", "dev", "test.gz"], {}, ["train.gz", "dev", "test.gz"]),
        (["train", "train.tok", "dev", "valid"], {"valid": "valid"}, ["train", "valid"]),
        (["Training", "my.eval", "a_test", "contest"], {}, ["Training", "my.eval", "a_test"]),
        (["train", "train.gz", *NEWSTESTS], {}, ["train", "newstest2016", "newstest2017"]),
        (["train", "newstest2013"], {}, ["train", "newstest2013"]),
        (["train", "dev", "newstest2013"], {}, ["train", "dev", "newstest2013"]),
        (["train", "dev", *NEWSTESTS, "x"], {"valid": "newstest2013", "test": "x"}, ["train", "newstest2013", "x"]),
        (["dev"], {}, []),
    ],
)
def test_files_are_found_by_their_names(tmp_path, names, chosen, found):
    for name, language in itertools.product(names, ("en", "de")):
        write_lines(tmp_path, name.replace(".gz", "") + f".{language}", ["a"], ".gz" if name.endswith(".gz") else "")
    splits = pre.find_text(tmp_path, "en", "de", **chosen)
    for language, paths in zip(("en", "de"), zip(*splits.values(), strict=True), strict=bool(found)):
        assert [path.name.replace(f".{language}", "") for path in paths] == found
    assert list(splits) == ["train", "valid", "test"][: len(found)]


def test_what_is_trained_on_is_said_and_what_is_left_out(tmp_path, capsys):
    pair_corpus(tmp_path / "text")
    for language in ("en", "de"):
        write_lines(tmp_path / "text", f"train.tok.{language}", ["a"])
    prepare(tmp_path / "text", tmp_path / "out")
    sentence = "trained on train.en, train.de, evaluated on valid.en, valid.de; left out: train.tok.de, train.tok.en"
    assert sentence in capsys.readouterr().out
    assert said(*(open_pairs(tmp_path / "out", split) for split in ("train", "valid"))) == f" ({sentence})"


TRAIN = translated(sentences(30))
NOT_UTF8 = [*TRAIN[:20], "Stra\udcdfe", *TRAIN[21:]]
NO_TRAIN = {"train.en": None, "train.de": None}
UNUSABLE = {
    r"neither train\.en and train\.de \(plain or \.gz\) nor parquet files; found valid": NO_TRAIN,
    r"no validation text; expected valid\.en and valid\.de": {"valid.en": None, "valid.de": None},
    r"has no train\.de \(plain or \.gz\); expected it for the train split": {"train.de": None},
    r"\S+/train\.en has 30 lines and \S+/train\.de 29; expected equal": {"train.de": TRAIN[:29]},
    r"has dev, valid, which all say the valid split; keep one": {"dev.en": ["a"], "dev.de": ["b"]},
    r"test\.(en|de) is empty": {"test.en": [], "test.de": []},
    r"train\.de line 21 is not UTF-8 \(byte 0xdf: .*\); convert the file to UTF-8": {"train.de": NOT_UTF8},
    r"train\.en has no pair that can be used; dropped: 30 identical": {"train.de": sentences(30)},
    r"no pair that can be used; dropped: 30 length_ratio": {"train.de": ["di"] * 30},
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_input_that_cannot_be_prepared_is_explained(tmp_path, message):
    pair_corpus(tmp_path, count=30)
    for file, lines in UNUSABLE[message].items():
        (tmp_path / file).unlink(missing_ok=True)
        if lines is not None:
            write_lines(tmp_path, file, lines)
    with pytest.raises(InputError, match=message):
        prepare(tmp_path, tmp_path / "out")
