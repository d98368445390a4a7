"""data/squad.py and data/squad_answers.py: files, windows, the search for answers, its metrics."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import squad_reference
from datasets import Dataset, DatasetDict

from data import squad, squad_answers, vocabulary
from data.squad_answers import SearchLimits
from errors import InputError

GOLDEN = json.loads(Path(__file__).with_name("squad_golden.json").read_text())
ROWS = squad_reference.questions()
SEARCHED = {"1.1": [row for row in ROWS if row.answers], "2.0": ROWS}


# ---- search and metrics --------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["1.1", "2.0"])
def version(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(version) -> list[squad_answers.Found]:
    """What is found for the questions of a version."""
    results = []
    for row in SEARCHED[version]:
        windows = squad_reference.windows_of(int(row.name[1:]), row)
        results.append(squad_answers.search(row.context, windows, SearchLimits(), version == "2.0"))
    return results


def test_answers_are_those_of_run_qa(version, found):
    expected = GOLDEN["search"][version]

    assert [one.answer.text for one in found] == expected["answers"]
    if version == "2.0":
        differences = [one.null_difference for one in found]
        assert differences == pytest.approx(expected["null_odds"], abs=1e-5)
        assert 50 < sum(not one.answer.text for one in found) < 200


def test_the_n_best_answers_are_those_of_run_qa(version, found):
    names = [row.name for row in SEARCHED[version]]
    for name, expected in GOLDEN["search"][version]["n_best"].items():
        candidates = found[names.index(name)].candidates
        assert [one.text for one in candidates] == [text for text, _ in expected]
        probabilities = [one.probability for one in candidates]
        assert probabilities == pytest.approx([share for _, share in expected], abs=1e-6)


def test_the_metrics_are_those_of_the_official_scripts(version, found):
    expected = GOLDEN["metrics"][version]
    questions = squad.Questions(SEARCHED[version])

    metrics = squad_answers.score(questions, found, version == "2.0")

    assert list(metrics) == squad_answers.metric_names(version == "2.0")
    names = {"exact_match": "exact_match", "f1": "f1"}
    if version == "2.0":
        names = {
            "exact_match": "exact",
            "f1": "f1",
            "has_answer_exact_match": "HasAns_exact",
            "has_answer_f1": "HasAns_f1",
            "no_answer_accuracy": "NoAns_f1",
            "best_exact_match": "best_exact",
            "best_f1": "best_f1",
        }
        for name in ("exact", "f1"):
            full_name = {"exact": "exact_match"}.get(name, name)
            threshold = metrics[f"best_{full_name}_threshold"]
            assert threshold == pytest.approx(expected[f"best_{name}_thresh"], abs=1e-5)
    for name, official in names.items():
        assert 100 * metrics[name] == pytest.approx(expected[official], abs=1e-9), name


def test_the_best_threshold_gives_the_best_score():
    """Searched with the threshold that `score` names, these questions have the score it names."""
    questions = squad.Questions(ROWS)

    def scored(threshold: float) -> dict[str, float]:
        results = []
        for row in ROWS:
            windows = squad_reference.windows_of(int(row.name[1:]), row)
            limits = SearchLimits(null_threshold=threshold)
            results.append(squad_answers.search(row.context, windows, limits, True))
        return squad_answers.score(questions, results, may_be_none=True)

    usual = scored(0.0)
    best = scored(usual["best_f1_threshold"])

    assert best["f1"] == pytest.approx(usual["best_f1"]) != usual["f1"]


def test_answers_without_words_are_scored_as_each_version_does():
    assert squad_answers.exact_match("the", "a") == 1
    assert squad_answers.f1("the", "a", may_be_none=False) == 0
    assert squad_answers.f1("the", "a", may_be_none=True) == 1
    assert squad_answers.f1("", "cat", may_be_none=True) == 0


def test_where_no_token_is_of_the_context_nothing_is_found():
    logits = np.zeros(4, np.float32)
    window = squad_answers.WindowLogits(logits, logits, np.full((4, 2), -1), cls=0)
    for may_be_none in (False, True):
        found = squad_answers.search("here", [window], SearchLimits(), may_be_none)
        assert found.answer.text == found.best.text == ""


# ---- windows -------------------------------------------------------------------------------------
LIMITS = squad.Limits(max_length=30, stride=8, max_question=6)


@pytest.fixture(scope="module")
def tokenizers() -> Callable:
    """tokenizers("bert"): one that has learnt the synthetic questions."""
    made = {}

    def get(kind: str):
        if kind not in made:
            lines = []
            for row in squad.open_splits("synthetic").train.rows[:300]:
                lines += [row.text, row.context]
            made[kind] = vocabulary.learn(lines, kind, 400, repeatable=True)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_windows_have_the_answer_at_its_characters(kind, tokenizers):
    questions = squad.Questions(squad.open_splits("synthetic").train.rows[:200])
    limits = squad.Limits(max_length=44, stride=14, max_question=6)  # pieces of words to XLNet
    windows = squad.Windows(questions, tokenizers(kind), limits, keep_offsets=True)
    has_answer = set()
    places = windows.places()

    for index, number in enumerate(windows.question_of):
        row = questions.rows[number]
        example = windows.example(index, None)
        offsets = windows.offsets(index)
        start, end = int(example["start"]), int(example["end"])
        assert [start, end] == places[index].tolist()
        if start == windows.cls(index):
            assert end == start
            continue
        text = row.context[offsets[start, 0] : offsets[end, 1]]
        assert text == row.answers[0]
        has_answer.add(number)

    answered = {number for number, row in enumerate(questions.rows) if row.answers}
    assert has_answer == answered
    assert len(windows) > len(questions), "no context has two windows"


@pytest.mark.parametrize("kind", ["bert", "xlnet"])
def test_windows_cover_the_context_and_share_the_stride(kind, tokenizers):
    context = " ".join(["old dog", *["the small cat"] * 30, "blue river"])
    questions = squad.Questions([squad.Question("a", "which animal?", context)])
    tokenizer = tokenizers(kind)
    windows = squad.Windows(questions, tokenizer, LIMITS, keep_offsets=True)
    assert windows.of_questions() == [range(len(windows))]
    assert len(windows) > 3

    seen = []
    for index in range(len(windows)):
        example = windows.example(index, None)
        assert len(example["input_ids"]) == LIMITS.max_length
        assert example["input_ids"][windows.cls(index)] == tokenizer.cls_token_id
        offsets = windows.offsets(index)
        own = [tuple(pair) for pair in offsets[offsets[:, 0] >= 0].tolist()]
        if seen:
            assert own[: LIMITS.stride] == seen[-LIMITS.stride :]
            seen += own[LIMITS.stride :]
        else:
            seen = own
        padding = example["attention_mask"] == 0
        assert (example["input_ids"][padding] == tokenizer.pad_token_id).all()
    whole = tokenizer(context, add_special_tokens=False).encodings[0].offsets
    assert seen == whole


@pytest.mark.parametrize("answer", [" Otto", "seven ", " says that "])
def test_blanks_around_an_answer_are_not_of_its_tokens(answer, tokenizers):
    context = " Otto says that Anna is seven "
    row = squad.Question("1", "who?", context, (answer,), (context.index(answer),))
    windows = squad.Windows(
        squad.Questions([row]), tokenizers("bert"), squad.Limits(60, 4, 8), keep_offsets=True
    )
    offsets = windows.offsets(0)
    first = offsets[windows.starts[0], 0]
    last = offsets[windows.ends[0], 1]
    assert context[first:last] == answer.strip()


def test_a_question_is_cut_and_the_context_is_not(tokenizers):
    questions = [
        squad.Question("a", "which animal is there? " * 5, "the old dog is here."),
        squad.Question("b", "which animal?", "the old dog is here."),
    ]
    tokenizer = tokenizers("bert")
    windows = squad.Windows(squad.Questions(questions), tokenizer, LIMITS)

    assert windows.cut == 1
    ids = windows.example(0, None)["input_ids"].tolist()
    separators = [place for place, number in enumerate(ids) if number == tokenizer.sep_token_id]
    assert separators[0] == 1 + LIMITS.max_question
    assert "old dog is here." in tokenizer.decode(ids[separators[0] :])


@pytest.mark.parametrize(
    "limits, reason",
    [
        (squad.Limits(20, 10, 8), "--max-length is 20.*leaves 9 tokens.*--stride 10 must be less"),
        (squad.Limits(10_000, 10, 8), "--max-length is 10000; the tokenizer's model takes 512"),
    ],
    ids=["short", "long"],
)
def test_limits_without_room_are_refused(limits, reason, tokenizers):
    questions = squad.Questions([squad.Question("a", "why?", "so.")])
    with pytest.raises(InputError, match=reason):
        squad.Windows(questions, tokenizers("bert"), limits)


# ---- files ---------------------------------------------------------------------------------------
CONTEXTS = [f"Text {number} says that Anna is {number} years old." for number in range(20)]


def article(contexts: list[str], **changes) -> dict:
    """Returns the content of a file in SQuAD's format: who is so old, and how old is she."""
    paragraphs = []
    for context in contexts:
        name = context.split()[1]
        who = {"text": "Anna", "answer_start": context.index("Anna")}
        answers = [who, {"text": f"{name} years", "answer_start": context.index(f"{name} years")}]
        qas = []
        for number, answer in enumerate(answers):
            qa = {"id": f"{name}-{number}", "question": " who or how old?", "answers": [answer]}
            qas.append(qa | changes)
        paragraphs.append({"context": context, "qas": qas})
    return {"version": "1.1", "data": [{"title": "ages", "paragraphs": paragraphs}]}


def write(path: Path, content: dict) -> Path:
    """Writes a file of JSON; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_a_folder_of_squads_files_has_its_splits(tmp_path):
    write(tmp_path / "train-v1.1.json", article(CONTEXTS[:5]))
    write(tmp_path / "dev-v1.1.json", article(CONTEXTS[5:8]))
    write(tmp_path / "test-v1.1.json", article(CONTEXTS[8:9]))

    opened = squad.open_splits(str(tmp_path))

    assert len(opened.train) == 10
    assert len(opened.eval["valid"]) == 6
    first = opened.train.rows[0]
    assert first == squad.Question("0-0", "who or how old?", CONTEXTS[0], ("Anna",), (17,))
    assert opened.train.source == "train-v1.1.json"
    assert opened.train.left_out == ["test-v1.1.json"]
    assert not opened.has_unanswerable
    tested = squad.open_evaluation(str(tmp_path), split="test")
    assert [row.context for row in tested.eval["test"].rows] == [CONTEXTS[8]] * 2


def test_files_of_two_versions_need_a_choice(tmp_path):
    write(tmp_path / "train-v1.1.json", article(CONTEXTS[:5]))
    write(tmp_path / "dev-v1.1.json", article(CONTEXTS[5:8]))
    impossible = article(CONTEXTS[8:12], is_impossible=True)
    write(tmp_path / "train-v2.0.json", impossible)
    write(tmp_path / "dev-v2.0.json", article(CONTEXTS[12:13], is_impossible=True))

    with pytest.raises(InputError, match=r"versions 1.1 and 2.0.*choose one by --version"):
        squad.open_splits(str(tmp_path))
    assert squad.version_of(str(tmp_path)) == ""
    opened = squad.open_splits(str(tmp_path), "2.0")
    assert opened.train.unanswerable == len(opened.train) == 8
    assert {"train-v1.1.json", "dev-v1.1.json"} <= set(opened.train.left_out)
    with pytest.raises(InputError, match=r"--version is 2.0.*has version 1.1"):
        (tmp_path / "train-v2.0.json").unlink()
        (tmp_path / "dev-v2.0.json").unlink()
        squad.open_splits(str(tmp_path), "2.0")


@pytest.mark.parametrize(
    "name, version",
    [
        ("rajpurkar/squad", "1.1"),
        ("rajpurkar/squad_v2", "2.0"),
        ("/nowhere/train-v2.0.json", "2.0"),
        ("/nowhere/questions.json", ""),
        ("/nowhere/q12.0.json", ""),
        ("synthetic", ""),
    ],
)
def test_a_name_says_its_version(name, version):
    assert squad.version_of(name) == version


def test_one_file_holds_out_whole_contexts_whatever_its_order(tmp_path):
    forwards = write(tmp_path / "a.json", article(CONTEXTS))
    backwards = write(tmp_path / "b.json", article(CONTEXTS[::-1]))

    opened = squad.open_splits(str(forwards))
    other = squad.open_splits(str(backwards))

    trained = {row.context for row in opened.train.rows}
    held = {row.context for row in opened.eval["valid"].rows}
    assert len(held) == 2
    assert trained | held == set(CONTEXTS)
    assert not trained & held
    assert held == {row.context for row in other.eval["valid"].rows}
    again = squad.open_evaluation(str(forwards), is_own=True)
    assert again.eval["valid"].rows == opened.eval["valid"].rows
    assert len(squad.open_evaluation(str(forwards), is_own=False).eval["all"]) == 40


def table(contexts: list[str]) -> Dataset:
    """Returns questions as rajpurkar/squad has them."""
    rows = []
    for context in contexts:
        answers = {"text": ["Anna"], "answer_start": [context.index("Anna")]}
        name = context.split()[1]
        rows.append(
            {"id": name, "title": "", "question": "who?", "context": context, "answers": answers}
        )
    return Dataset.from_list(rows)


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_folders_of_datasets_are_read(kind, tmp_path, cache):
    folder = tmp_path / "data"
    splits = {"train": table(CONTEXTS[:3]), "validation": table(CONTEXTS[3:5])}
    if kind == "saved":
        DatasetDict(splits).save_to_disk(folder)
    else:
        for split, rows in splits.items():
            rows.to_parquet(folder / f"plain_text/{split}-00000-of-00001.parquet")

    opened = squad.open_splits(str(folder))

    assert [row.name for row in opened.train.rows] == ["0", "1", "2"]
    assert opened.eval["valid"].rows[1] == squad.Question(
        "4", "who?", CONTEXTS[4], ("Anna",), (17,)
    )


def broken(content: dict, **changes) -> dict:
    """Returns a file's content with another first question."""
    content["data"][0]["paragraphs"][0]["qas"][0].update(changes)
    return content


@pytest.mark.parametrize(
    "content, reason",
    [
        (
            broken(article(CONTEXTS), answers=[{"text": "Anna", "answer_start": 18}]),
            "question 0-0 has the answer 'Anna' at 18, where its context has 'nna '",
        ),
        (
            broken(article(CONTEXTS), answers=[{"text": "Anna", "answer_start": -4}]),
            "question 0-0 has the answer 'Anna' at -4",
        ),
        (broken(article(CONTEXTS), question=" "), "question 0-0 has ' ' as its question"),
        (broken(article(CONTEXTS), question="\ud83d"), "question 0-0 has a question with .*half"),
        (broken(article(CONTEXTS), answers=None), "question 0-0 has None as its answers"),
        (broken(article(CONTEXTS), is_impossible="false"), "0-0 has 'false' as is_impossible"),
        (
            broken(article(CONTEXTS), answers=[{"text": "Anna", "answer_start": "17"}]),
            "question 0-0 has the answer_start '17'; expected a whole number",
        ),
        (broken(article(CONTEXTS), id="1-0"), "two questions with the id 1-0"),
        ({"data": [{"paragraphs": [{"qas": [{"id": 1}]}]}]}, "not in SQuAD's format.*is missing"),
        ([1], "not in SQuAD's format"),
        ({"data": []}, "has no questions"),
    ],
    ids=[
        "shifted",
        "negative",
        "empty",
        "half",
        "null",
        "text",
        "start",
        "twice",
        "format",
        "list",
        "none",
    ],
)
def test_what_is_wrong_in_a_file_is_named(content, reason, tmp_path):
    path = write(tmp_path / "own.json", content)
    with pytest.raises(InputError, match=reason):
        squad.open_splits(str(path))


def test_plausible_answers_of_impossible_questions_do_not_count(tmp_path):
    content = article(CONTEXTS)
    broken(content, is_impossible=True, answers=[], plausible_answers=[{"text": "Anna"}])

    opened = squad.open_splits(str(write(tmp_path / "own.json", content)))

    assert opened.has_unanswerable
    rows = [*opened.train.rows, *opened.eval["valid"].rows]
    assert [row.answers for row in rows if row.name == "0-0"] == [()]


def test_an_impossible_question_needs_no_answers(tmp_path):
    content = article(CONTEXTS)
    del broken(content, is_impossible=True)["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    (first, *_) = squad.read_file(write(tmp_path / "own.json", content))
    assert first.answers == ()


def test_squads_json_may_be_packed(tmp_path):
    for name, contexts in (("train-v2.0", CONTEXTS[2:]), ("dev-v2.0", CONTEXTS[:2])):
        packed = gzip.compress(json.dumps(article(contexts)).encode())
        (tmp_path / f"{name}.json.gz").write_bytes(packed)
    opened = squad.open_splits(str(tmp_path))
    assert len(opened.train) == 36
    assert len(opened.eval["valid"]) == 4
    assert squad.version_of(str(tmp_path)) == "2.0"


def test_a_table_without_lists_of_answers_is_refused(tmp_path, cache):
    rows = {"id": ["1"], "question": ["who?"], "context": ["Anna"], "answers": [None]}
    DatasetDict({"train": Dataset.from_dict(rows)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match="question 1 has None as its answers; expected lists"):
        squad.open_splits(str(tmp_path / "saved"))


def test_a_split_that_is_not_there_is_refused(tmp_path):
    path = write(tmp_path / "test.json", article(CONTEXTS))
    with pytest.raises(InputError, match="has no valid split, only test; give --split test"):
        squad.open_evaluation(str(tmp_path), is_own=False)
    with pytest.raises(InputError, match="one file, without a test split; leave --split test out"):
        squad.open_evaluation(str(path), split="test", is_own=False)


def test_data_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no file or folder /nowhere"):
        squad.open_splits("/nowhere")
    with pytest.raises(InputError, match="neither .json nor .parquet"):
        squad.open_splits(str(tmp_path))
    write(tmp_path / "dev.json", article(CONTEXTS))
    with pytest.raises(InputError, match="no questions to train on, only valid"):
        squad.open_splits(str(tmp_path))


@pytest.mark.parametrize("version, share", [("", 1 / 3), ("1.1", 0.0), ("2.0", 1 / 3)])
def test_synthetic_questions_have_their_answers_after_a_marker(version, share):
    opened = squad.open_splits("synthetic", version)
    rows = opened.train.rows
    assert opened.train.unanswerable / len(rows) == pytest.approx(share, abs=0.05)
    for row in rows:
        marker = row.text.split()[1]
        before = [row.context[:start].split()[-1] for start in row.starts]
        assert before == ([marker] if row.answers else [])
        assert (f" {marker} " in row.context) == bool(row.answers)
    contexts = {row.context for row in rows}
    assert not contexts & {row.context for row in opened.eval["valid"].rows}
