"""data/glue.py on small files that the tests write; plain loops and transformers' own padding are the reference."""

import copy
import pickle
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from data import glue
from data.glue import TASKS, Encoded, Examples, read, score
from data.splits import said
from data.vocabulary import learn
from errors import InputError

PAIR_HEADER, SCORE_HEADER = "index\tsentence1\tsentence2\tlabel\n", "sentence1\tsentence2\tscore\n"


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def tsv(*rows: str) -> str:
    """Returns lines of the words of these, separated by tabs."""
    return "".join(row.replace(" ", "\t") + "\n" for row in rows)


TWO = [["A", "C"], ["B", "D"]]
FILES = {  # folder, text, columns
    "cola": ("CoLA", 'gj04\t1\t\tHe came.\ngj04\t0\t*\tCame he today "\n', [["He came.", 'Came he today "']]),
    "sst2": ("SST-2", "sentence\tlabel\na fine film \t0\nwell-conceived\t1\n", [["a fine film ", "well-conceived"]]),
    "mrpc": (
        "MRPC",
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
        '0\t1\t2\t"The pie business.\tHe said "fair".\r\n1\t3\t4\tA\u2028b\x85c\tB\r\n',
        [['"The pie business.', "A\u2028b\x85c"], ['He said "fair".', "B"]],
    ),
    "stsb": (
        "STS-B",
        tsv("index genre filename year old_index source1 source2 sentence1 sentence2 score")
        + tsv("0 g f 2012 1 none none A B 0.000", "1 g f 2012 4 none none C D 3.800"),
        TWO,
    ),
    "qqp": ("QQP", tsv("id qid1 qid2 question1 question2 is_duplicate", "1 2 3 A B 0", "4 5 6 C D 1"), TWO),
    "mnli": (
        "MNLI",
        tsv("index promptID pairID genre sentence1_binary_parse sentence1_parse sentence1 sentence2 label1 gold_label")
        + tsv("0 1 1n g ( ( A B neutral entailment", "1 2 2e g ( ( C D x neutral"),
        TWO,
    ),
    "qnli": ("QNLI", tsv("index question sentence label", "0 A B entailment", "1 C D not_entailment"), TWO),
    "rte": ("RTE", PAIR_HEADER + tsv("0 A B entailment", "1 C D not_entailment"), TWO),
    "wnli": ("WNLI", PAIR_HEADER + tsv("0 A B 0", "1 C D 1") + "\n", TWO),
}


def test_at_a_url_other_tasks_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    for folder, text, _ in FILES.values():
        write(tmp_path / folder / "train.tsv", text)
        fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{folder}/train.tsv", text.encode())
    for task in ("sst2", "stsb"):
        for url in (f"memory://{tmp_path.name}/", f"memory://{tmp_path.name}/{FILES[task][0]}"):
            assert read(url, task, "train").first == read(tmp_path, task, "train").first
    assert [*(tmp_path / "cache").rglob("SST-2")] and not [*(tmp_path / "cache").rglob("QQP")]
    with pytest.raises(InputError, match="STS-B is the folder of stsb, and the task is rte"):
        read(f"memory://{tmp_path.name}/STS-B", "rte", "train")


@pytest.mark.parametrize("task", TASKS)
def test_official_files_are_read_as_they_stand(tmp_path, task):
    assert TASKS["rte"].labels == ("entailment", "not_entailment") == TASKS["wnli"].labels[::-1]
    folder, text, columns = FILES[task]
    names = {"train": "train.tsv", "validation": "dev.tsv"}
    names |= {f"validation_{kind}": f"dev_{kind}.tsv" for kind in ("matched", "mismatched")}
    for split in ("train", *TASKS[task].evaluation):
        write(tmp_path / folder / names[split], text)
        for data in (str(tmp_path), tmp_path / folder):
            examples = read(data, task, split)
            assert [examples.first, *([examples.second] if examples.second else [])] == columns
            expected = {"stsb": [0, np.float32(3.8)], "cola": [1, 0]}.get(task, [0, 1])
            assert examples.labels.tolist() == expected
            assert examples.labels.dtype == (np.float32 if task == "stsb" else np.int64)
            assert len(examples) == 2 and examples.skipped == 0
    write(tmp_path / "otherwise" / task / "train.tsv", text)
    assert len(read(tmp_path / "otherwise", task, "train")) == 2


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("cola", "gj04\t1\t\tFine.\ngj04\t1\tFine.\n", r"train\.tsv line 2 has 3 fields, .*expected 4: .*without"),
        ("cola", "a\tlabel\tc\tsentence\n", "line 1 has the label 'label'; expected one of 0 .unacceptable., 1"),
        ("sst2", "sentence\nx\n", r"train\.tsv line 1 has the columns sentence; expected label among them"),
        ("sst2", "", "line 1 has the columns nothing; expected sentence, label"),
        ("sst2", "sentence\tlabel\n", r"train\.tsv has no examples"),
        ("sst2", "sentence\tlabel\nfine\t1\nfine\t2\n", "line 3 has the label '2'; expected one of 0 .negative., 1"),
        ("sst2", "sentence\tlabel\nfine\t1\n\nfine\t1\n", "line 3 has 1 fields, separated by tabs; expected 2"),
        ("sst2", "sentence,label\nfine,1\n", r"train\.tsv line 1 has no tab, but commas: .*separated by tabs"),
        ("rte", 'index;sentence1;sentence2;label\n0;"a";"b";x\n', "line 1 has no tab, but semicolons: .* by tabs"),
        ("cola", "gj04,1,,He came.\n", "line 1 has no tab, but commas: 'gj04,1,,He came.'; .*separated by tabs"),
        ("sst2", "sentence label\nfine 1\n", "line 1 has the columns sentence label; .*separated by tabs"),
        ("sst2", b"sentence\tlabel\nStra\xdfe\t1\n", r"train\.tsv is not UTF-8 \(byte 19\)"),
        ("rte", PAIR_HEADER + '0\t"A\tb"\tB\tentailment\n', 'line 2 has 5 fields.*begins with ".*QUOTE_NONE'),
        ("rte", PAIR_HEADER + "0\tA\t \tentailment\n", "line 2 has an empty sentence2; expected a sentence"),
        ("qqp", FILES["qqp"][1] + "7\t8\t9\tA\n", "line 4 has 4 fields"),
        ("stsb", SCORE_HEADER + "A\tB\t5.2\n", "line 2 has the score '5.2'; expected a number from 0 to"),
        ("stsb", SCORE_HEADER + "A\tB\tnan\n", "line 2 has the score 'nan'"),
        ("stsb", SCORE_HEADER + "A\tB\tfive\n", "line 2 has the score 'five'"),
    ],
)
def test_a_damaged_file_is_explained_with_its_line(tmp_path, task, text, message):
    write(tmp_path / "train.tsv", text)
    refused(message, tmp_path, task)


def test_qqps_few_broken_rows_are_left_out_with_a_warning(tmp_path):
    rows = [f"{n}\t1\t2\tWho is {n}?\tWhat?\t1" for n in range(4000)]
    rows[1000] = '1000\t1\t2\t"A line\nbreak?"\tWhat?\t1'
    rows[2000] = "2000\t1\t2\tA question?\t\t0"
    write(tmp_path / "train.tsv", "\n".join([FILES["qqp"][1].partition("\n")[0], *rows]))
    with pytest.warns(UserWarning, match=r"3 broken rows are left out, the first: .* line 1002 has 4 fields"):
        examples = read(tmp_path, "qqp", "train")
    assert len(examples) == len(examples.second) == len(examples.labels) == 3998 and examples.skipped == 3
    assert examples.first[999:1001] == ["Who is 999?", "Who is 1001?"]


def refused(message: str, data, task="sst2", split="train"):
    with pytest.raises(InputError, match=message):
        read(data, task, split)


def test_what_cannot_be_found_is_explained(tmp_path):
    refused("task is 'sst'; expected one of cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli", tmp_path, "sst")
    refused("split is 'test'; expected one of train, validation for sst2; .*GLUE's test", tmp_path, split="test")
    refused("expected one of train, validation_matched, validation_mismatched", tmp_path, "mnli", "validation")
    refused(r"has no train\.tsv .* found nothing; expected GLUE's SST-2/train\.tsv", tmp_path)
    refused("there is no folder .*nowhere", tmp_path / "nowhere")
    path = write(tmp_path / "SST-2/dev.tsv", FILES["sst2"][1])
    refused(r"SST-2 has no train\.tsv .* found dev\.tsv", tmp_path)
    refused(r"dev\.tsv is a file", path)
    write(tmp_path / "RTE/train.tsv", FILES["rte"][1])
    refused("RTE is the folder of rte, and the task is wnli", tmp_path / "RTE", "wnli")
    for name in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / f"MNLI/{name}.tsv", FILES["mnli"][1])
    refused("MNLI is the folder of mnli, and the task is rte; give one of both", tmp_path / "MNLI", "rte", "validation")


@pytest.mark.parametrize("name", ["dev", "validation", "Val", "valid_set", "sst2-dev"])
def test_the_names_of_splits_are_those_of_every_data_set(tmp_path, name):
    write(tmp_path / "SST-2/Training.tsv", FILES["sst2"][1])
    write(tmp_path / f"SST-2/{name}.tsv", FILES["sst2"][1])
    write(tmp_path / "SST-2/test.tsv", "index\tsentence\n0\thidden\n")
    train, valid = (read(tmp_path, "sst2", split) for split in ("train", "validation"))
    found = f"trained on SST-2/Training.tsv, evaluated on SST-2/{name}.tsv; left out: test.tsv"
    assert said(train, valid) == f" ({found})"
    write(tmp_path / "SST-2/train.tsv", FILES["sst2"][1])
    refused("SST-2 has Training, train, which all say the train split; keep one", tmp_path)


def test_the_two_splits_of_mnli_go_by_all_of_their_names(tmp_path):
    for name, label in (("dev_matched", "neutral"), ("dev-mismatched", "contradiction"), ("train", "entailment")):
        write(tmp_path / f"MNLI/{name}.tsv", FILES["mnli"][1].replace("entailment", label))
    for split, label in (("train", 0), ("validation_matched", 1), ("validation_mismatched", 2)):
        assert read(tmp_path, "mnli", split).labels[0] == label


@pytest.mark.parametrize(
    "form", ["{}.parquet", "{}-00000-of-00001.parquet", "data/{}-00000-of-00001.parquet", "{}/0.parquet"]
)
def test_parquet_files_of_any_of_the_names_are_read(tmp_path, cache, form):
    for name, count in (("training", 3), ("dev", 2), ("test", 1)):
        path = tmp_path / "sst2" / form.format(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        table("sst2", labels=(0, 1, 0)[:count]).to_parquet(path)
    train, valid = (read(tmp_path, "sst2", split) for split in ("train", "validation"))
    assert [len(train), len(valid)] == [3, 2]
    names = [form.format(name) for name in ("training", "dev", "test")]
    assert said(train, valid) == f" (trained on {names[0]}, evaluated on {names[1]}; left out: {names[2]})"


@pytest.mark.parametrize("form", ["parquet", "parquet in folders", "disk"])
@pytest.mark.parametrize("folder", ["sst2", "SST-2"])
def test_tables_of_another_task_with_the_same_columns_are_refused(tmp_path, cache, form, folder):
    rows = table("sst2").cast_column("label", datasets.Value("int64"))  # else its names tell it from CoLA's
    data = tmp_path / folder
    if form == "disk":
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(data)
    for split in ("train", "validation") if form != "disk" else ():
        path = data / (f"{split}.parquet" if form == "parquet" else f"{split}/0.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(path)
    for split in ("train", "validation"):
        assert len(read(data, "sst2", split)) == 3
        refused(f"{folder} is the folder of sst2, and the task is cola; give one of both", data, "cola", split)


@pytest.mark.parametrize("score", ["nan", "inf", "-inf", "NaN"])
def test_a_score_that_is_not_finite_is_named_with_its_line(tmp_path, score):
    write(tmp_path / "STS-B/train.tsv", SCORE_HEADER + tsv("A B 1.0", f"C D {score}"))
    refused(f"train.tsv line 3 has the score '{score}'; expected a number from 0 to 5", tmp_path, "stsb")


def table(task: str, names=None, labels=(0, 1, 0), **columns) -> datasets.Dataset:
    chosen = TASKS[task]
    values = {column: [f"{column} {n}" for n in range(len(labels))] for column in chosen.columns}
    values |= {"label": list(labels), "idx": list(range(len(labels)))} | columns
    rows = datasets.Dataset.from_dict(values)
    if chosen.labels:
        rows = rows.cast_column("label", datasets.ClassLabel(names=list(names or chosen.labels)))
    return rows


@pytest.mark.parametrize("layout", ["parquet", "disk, task", "arrow"])
@pytest.mark.parametrize("task", ["sst2", "mnli", "stsb"])
def test_a_local_folder_of_datasets_is_read(tmp_path, cache, layout, task):
    labels = (0.5, 5.0, 2.25) if task == "stsb" else (0, 1, 0)
    folder = tmp_path / "data" / (task if "task" in layout else "")
    splits = {"train": labels, **{split: labels[::-1][n:] for n, split in enumerate(TASKS[task].evaluation)}}
    tables = datasets.DatasetDict({split: table(task, labels=values) for split, values in splits.items()})
    if layout.startswith("parquet"):
        folder.mkdir(parents=True)
        for split, rows in tables.items():
            rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    else:
        tables.save_to_disk(folder)
    if layout == "arrow":
        (folder / "dataset_dict.json").unlink()
    for split, values in splits.items():
        examples = read(tmp_path / "data", task, split)
        assert examples.labels.tolist() == list(values)
        assert examples.first == [f"{TASKS[task].columns[0]} {n}" for n in range(len(values))]
        assert (examples.second is None) == (task == "sst2")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda: table("rte", labels=(0, -1)), "train, row 1 has the label -1, which stands for a hidden one"),
        (lambda: table("rte", ("yes", "no")), "has the labels yes, no; expected entailment, not_entailment"),
        (lambda: table("rte").remove_columns("label"), "has the columns sentence1, sentence2, idx; expected label for"),
        (lambda: table("rte").remove_columns("sentence2"), "expected sentence2 for rte"),
        (lambda: table("rte", sentence1=["a", "", "b"]), "row 1 has '' as its sentence1; expected a sentence"),
        (lambda: table("rte", sentence2=["a", "b", None]), "row 2 has None as its sentence2"),
        (lambda: table("rte").cast_column("label", datasets.Value("int64")).map(lambda _: {"label": 3}), "label '3'"),
        (lambda: table("rte").filter(lambda _: False), "has no examples"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_explained(tmp_path, cache, rows, message):
    datasets.DatasetDict({"train": rows()}).save_to_disk(tmp_path / "rte")
    refused(message, tmp_path, "rte")


def test_labels_go_by_their_names_and_folders_of_datasets_that_do_not_fit_are_explained(tmp_path, cache):
    datasets.DatasetDict({"train": table("rte", ("not_entailment", "entailment"))}).save_to_disk(tmp_path / "rte")
    assert read(tmp_path, "rte", "train").labels.tolist() == [1, 0, 1]
    named = table("rte", ("Not_Entailment", "ENTAILMENT "))
    datasets.DatasetDict({"train": named}).save_to_disk(tmp_path / "any case/rte")
    assert read(tmp_path / "any case", "rte", "train").labels.tolist() == [1, 0, 1]
    write(tmp_path / "tsv/RTE/train.tsv", PAIR_HEADER + tsv("0 A B Not_Entailment", "1 C D ENTAILMENT"))
    assert read(tmp_path / "tsv", "rte", "train").labels.tolist() == [1, 0]
    table("rte").save_to_disk(tmp_path / "one")
    refused("is a single split written by save_to_disk", tmp_path / "one", "rte")
    refused("has the splits train; expected validation for rte", tmp_path / "rte", "rte", "validation")
    write(tmp_path / "three/train.parquet", b"PAR1, but no more")
    refused("three cannot be read by datasets", tmp_path / "three", "rte")


def test_a_hub_id_is_given_to_datasets_with_the_task(monkeypatch):
    def load(data, config, split):
        if data == "some/where":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/where' doesn't exist")
        assert (data, config, split) == ("nyu-mll/glue", "mnli", "validation_matched")
        return table("mnli", labels=(2, 1))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("nyu-mll/glue", "mnli", "validation_matched").labels.tolist() == [2, 1]
    refused("some/where is neither a folder nor a data set of the hub .*doesn't exist", "some/where", "rte")


@pytest.mark.parametrize("task", ["sst2", "mrpc", "qqp", "mnli", "stsb", "wnli"])
def test_synthetic_examples_follow_their_rule(task):
    kind, found = TASKS[task], {}
    for split in ("train", *kind.evaluation):
        examples = read("synthetic", task, split)
        assert len(examples) == len(examples.labels) == (2048 if split == "train" else 512)
        sides = [examples.first] + ([examples.second] if examples.second else [])
        assert len(sides) == len(kind.columns)
        words = [[line.replace(",", "").removesuffix(".").split() for line in side] for side in sides]
        assert {word for side in words for line in side for word in line} == {*glue._FILLERS, *glue._NUMBERS}
        values = [[[glue._NUMBERS.index(w) for w in line if w in glue._NUMBERS] for line in side] for side in words]
        for label, first, second in zip(examples.labels.tolist(), values[0], values[-1], strict=True):
            name = kind.labels[label] if kind.labels else ""
            assert len(first) == 1 and len(second) == (name != "neutral")
            if len(sides) == 1:
                assert (first[0] >= 5) == (label == 1)
            elif not name:
                assert label == pytest.approx(2.5 + 2.5 * (first[0] - second[0]) / 9)
            elif name != "neutral":
                assert abs(first[0] - second[0]) >= 2
                assert (first > second) == (name in ("entailment", "equivalent", "duplicate"))
        if kind.labels:
            counts = np.bincount(examples.labels)
            assert len(counts) == len(kind.labels) and np.ptp(counts) <= 1
        lengths = [len(line.split()) for line in examples.first]
        assert min(lengths) == 4 and max(lengths) == 25 and 7 < np.mean(lengths) < 13
        found[split] = examples.first
    again, other = (read("synthetic", task, split, seed=seed).first for seed in (0, 1))
    assert again == found[split] != other and not set(found["train"]) & set(again)


def test_a_bag_of_words_does_not_solve_a_task_of_pairs():
    train, valid = (read("synthetic", "mrpc", split) for split in ("train", "validation"))
    words = CountVectorizer()
    known, new = ([f"{a} {b}" for a, b in zip(e.first, e.second, strict=True)] for e in (train, valid))
    model = LogisticRegression(max_iter=1000).fit(words.fit_transform(known), train.labels)
    assert abs(model.score(words.transform(new), valid.labels) - 0.5) < 0.15


@pytest.fixture(scope="module", params=["bert", "distilbert", "roberta", "xlnet"])
def tokenizer(request):
    """One whose vocabulary has all words of the synthetic sentences."""
    return learn(read("synthetic", "mrpc", "train").first, request.param, 400)


def sentences(pairs: bool) -> Examples:
    rng = np.random.default_rng(0)
    sides = [[" ".join(rng.choice(glue._FILLERS, size)) for size in rng.integers(1, 30, 250)] for _ in range(2)]
    return Examples(sides[0], sides[1] if pairs else None, rng.integers(0, 2, 250))


@pytest.mark.parametrize("pairs", [False, True])
def test_batches_are_what_transformers_pads_and_examples_travel_without_the_tokenizer(tokenizer, pairs, monkeypatch):
    monkeypatch.setattr(glue, "CHUNK", 100)
    examples = sentences(pairs)
    encoded = Encoded(examples, tokenizer, 32)
    pickled = pickle.dumps(encoded)
    assert len(pickled) < encoded.tokens * 5 + 250 * 20 + 1000, "more than the arrays travels"
    indices = np.array([0, 99, 100, 249, 7, 7])
    chosen = [[side[index] for index in indices] for side in (examples.first, examples.second) if side]
    # XLNet's token types are 3 in padding; transformers 5 leaves them out, and would pad with 0.
    typed, type_padding = (True, 3) if tokenizer.padding_side == "left" else (None, 0)
    short = tokenizer(*chosen, max_length=32, truncation="longest_first", return_token_type_ids=typed)
    expected = tokenizer.pad(short, padding="max_length", max_length=40, return_tensors="np")
    types = expected.setdefault("token_type_ids", np.zeros((6, 40), int))
    types[expected["attention_mask"] == 0] = type_padding
    batch = pickle.loads(pickled).batch(np.insert(indices, 2, -1), (40,))
    expected["labels"] = examples.labels[indices]
    paddings = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": type_padding, "labels": 0}
    assert batch.keys() == paddings.keys()
    # A row without an example attends to one place, where another row has a token: a mean over none is not finite.
    attended = batch["attention_mask"][2]
    assert attended.sum() == 1 and attended[-1 if tokenizer.padding_side == "left" else 0] == 1
    batch["attention_mask"][2] = 0
    for name, padding in paddings.items():
        assert batch[name].dtype == np.int32
        np.testing.assert_array_equal(batch[name], np.insert(expected[name], 2, padding, axis=0), err_msg=name)
    whole = np.array([len(ids) for ids in tokenizer(examples.first, examples.second)["input_ids"]])
    assert encoded.lengths.dtype == np.int32 and encoded.lengths.tolist() == np.minimum(whole, 32).tolist()
    assert encoded.truncated == (whole > 32).sum() and (encoded.truncated > 10) == pairs
    assert encoded.tokens == np.minimum(whole, 32).sum() and len(encoded) == 250


def test_what_cannot_be_encoded_is_explained(tokenizer):
    examples = Examples(["the dog then"], ["tree"], np.array([1]))
    special = tokenizer.num_special_tokens_to_add(pair=True)
    with pytest.raises(InputError, match=f"max_length is {special + 1}; expected {special + 2} .* to 512"):
        Encoded(examples, tokenizer, special + 1)
    with pytest.raises(InputError, match="max_length is 513"):
        Encoded(examples, tokenizer, 513)
    encoded = Encoded(examples, tokenizer, special + 2)
    assert (encoded.truncated, encoded.lengths.tolist()) == (1, [special + 2])
    with pytest.raises(ValueError, match=f"example 0 has {special + 2} tokens, and the shape has {special + 1} places"):
        encoded.batch(np.array([0]), (special + 1,))
    with pytest.raises(InputError, match="object is not a fast tokenizer"):
        Encoded(examples, object(), 16)
    without = copy.deepcopy(tokenizer)
    without.pad_token = None
    with pytest.raises(InputError, match="has no padding token"):
        Encoded(examples, without, 16)


def test_scores_are_those_of_the_definitions():
    labels = np.array([1, 1, 1, 0, 0, 1, 0, 0])
    found = np.array([1, 0, 1, 0, 1, 1, 0, 0])  # 3 true positives, 1 false, 1 missed, 3 true negatives
    assert score("cola", found, labels) == {"mcc": pytest.approx((3 * 3 - 1) / (4 * 4))}
    assert score("mrpc", found, labels) == {"accuracy": 0.75, "f1": pytest.approx(0.75)}
    assert score("qqp", 1 - found, labels) == {"accuracy": 0.25, "f1": pytest.approx(0.25)}
    for task in ("sst2", "mnli", "qnli", "rte", "wnli"):
        assert score(task, found.tolist(), labels) == {"accuracy": 0.75}
    scores = np.array([0, 1, 2, 5], np.float32)
    expected = {"pearson": pytest.approx(np.corrcoef(scores, scores**2)[0, 1]), "spearman": 1.0}
    assert score("stsb", scores**2, scores) == expected
    # Constant predictions score nothing.
    labels = np.array([0, 1, 1, 0])
    assert score("cola", [1, 1, 1, 1], labels) == {"mcc": 0}
    assert score("stsb", np.full(4, 2.5, np.float32), labels.astype(np.float32)) == {"pearson": 0, "spearman": 0}
    assert score("mrpc", [0, 0, 0, 0], labels) == {"accuracy": 0.5, "f1": 0}
    with pytest.raises(ValueError, match="not finite"):
        score("stsb", [1, float("nan")], [1, 2])
