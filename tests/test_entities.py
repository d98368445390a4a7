"""Tests data/entities.py: entities and their scores are seqeval's, whatever the scheme of the
tags."""

import json
from pathlib import Path

import pytest

from data import entities
from data.entities import Entity

# What seqeval computes of tags at random, all prefixes in any order: tests/seqeval_reference.py.
CASES = json.loads(Path(__file__).with_name("seqeval.json").read_text())


def split(sentences: list[str]) -> list[list[str]]:
    return [tags.split() for tags in sentences]


def test_scores_are_those_of_seqeval():
    assert len(CASES) == 300
    for case in CASES:
        scores = entities.score(split(case["gold"]), split(case["predicted"]))

        overall = scores.overall
        found = [overall.precision, overall.recall, overall.f1, scores.accuracy]
        expected = [case[name] for name in ("precision", "recall", "f1", "accuracy")]
        assert found == pytest.approx(expected, abs=1e-12), case
        of_types = {}
        for kind, counts in scores.by_type.items():
            of_types[kind] = [counts.precision, counts.recall, counts.f1, counts.gold]
        assert of_types.keys() == case["by_type"].keys(), case
        for kind, values in of_types.items():
            assert values == pytest.approx(case["by_type"][kind], abs=1e-12), case


def test_without_entities_all_scores_are_0_but_accuracy():
    scores = entities.score([["O", "O"]], [["O", "O"]])
    overall = scores.overall
    assert (overall.precision, overall.recall, overall.f1) == (0, 0, 0)
    assert scores.accuracy == 1
    with pytest.raises(ValueError, match="no words"):
        entities.score([], [])


# The same entities, two of which touch, in every scheme.
SAME = [Entity("PER", 0, 2), Entity("PER", 2, 3), Entity("geo-loc", 4, 7)]
SCHEMES = {
    "IOB1": "I-PER I-PER B-PER O I-geo-loc I-geo-loc I-geo-loc",
    "IOB2": "B-PER I-PER B-PER O B-geo-loc I-geo-loc I-geo-loc",
    "BIOES": "B-PER E-PER S-PER O B-geo-loc I-geo-loc E-geo-loc",
    "BILOU": "B-PER L-PER U-PER O B-geo-loc I-geo-loc L-geo-loc",
    "BMES": "B-PER E-PER S-PER O B-geo-loc M-geo-loc E-geo-loc",
}


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_means_the_same_entities(name):
    tags = SCHEMES[name].split()
    found = entities.entities(tags)
    scheme = entities.Scheme()
    scheme.add(0, tags, found)

    assert found == SAME
    assert " ".join(entities.to_iob2(found, 7)) == SCHEMES["IOB2"]
    assert (scheme.name, scheme.total, scheme.irregular) == (name, 3, 0)


def test_tags_without_a_type_are_one_type():
    assert entities.entities(["B", "I", "O"]) == [Entity(entities.NO_TYPE, 0, 2)]


def test_what_breaks_the_rule_of_its_scheme_is_counted():
    scheme = entities.Scheme()
    for number, line in enumerate(["B-PER O B-LOC", "O I-LOC", "I-PER"]):
        tags = line.split()
        scheme.add(number, tags, entities.entities(tags))
    assert (scheme.name, scheme.irregular, scheme.first) == ("IOB2", 2, (1, 1))

    for number in (3, 4):
        tags = ["I-PER", "O", "I-LOC"]
        scheme.add(number, tags, entities.entities(tags))
    assert (scheme.name, scheme.irregular, scheme.first) == ("IOB1", 2, (0, 0))


@pytest.mark.parametrize("tag", ["NN", "b-PER", "B_PER", "B-", "", "PER", "0"])
def test_what_is_no_tag_is_refused(tag):
    assert not entities.is_tag(tag)
    with pytest.raises(ValueError, match="no tag"):
        entities.split_tag(tag)
