"""Entities in the tags of words: which words they are, and how well a tagger finds them.

    entities(["B-PER", "I-PER", "O", "B-LOC"])    # PER: words 0 and 1; LOC: word 3
    score(gold, predicted).overall.f1             # seqeval's f1_score

A tag is O, or a prefix, a hyphen and a type. Which prefixes there are depends on the scheme:

    IOB2     B- begins an entity, I- is within it (Tjong Kim Sang and Veenstra 1999)
    IOB1     I- is an entity; B- only begins one right after another of its type (Ramshaw and
             Marcus 1995); the original files of CoNLL-2003
    BIOES    IOB2 with E- at the end, and S- for a single word; BILOU and BMES: the same by other
             letters

One rule reads all of them, conlleval's, which is also that of seqeval without `mode`: a word
continues the entity of the word before it if both have one type, the word before has B- or I-, and
this one I- or E-; any other word with a type begins an entity.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

OUTSIDE = "O"
TAG = re.compile(r"([BIESLUM])(?:-(.+))?", re.DOTALL)
# Prefixes of BILOU and BMES -> those of BIOES.
SAME_AS = {"L": "E", "U": "S", "M": "I"}
NO_TYPE = "ENTITY"  # the type of tags without one: B, I and O
EXPECTED_TAG = "expected O, or a type with B- or I- (also E-, S-, L-, U-, M-) before it, as B-PER"


@dataclass(frozen=True)
class Entity:
    """Words start to end - 1 of a sentence."""

    type: str
    start: int
    end: int


def is_tag(text: str) -> bool:
    """Returns whether a text is a tag of one of the schemes."""
    return text == OUTSIDE or TAG.fullmatch(text) is not None


@functools.cache
def split_tag(tag: str) -> tuple[str, str]:
    """Returns the prefix of a tag, one of O, B, I, E and S, and its type, "" of O.

    Raises ValueError for what is no tag.
    """
    if tag == OUTSIDE:
        return OUTSIDE, ""
    found = TAG.fullmatch(tag)
    if found is None:
        raise ValueError(f"{tag!r} is no tag of an entity")
    prefix = SAME_AS.get(found[1], found[1])
    return prefix, found[2] or NO_TYPE


def entities(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities of a sentence, in the order of its words; see the top of this file."""
    found = []
    start = 0  # of the entity of the word before
    last_prefix, last_type = OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(tag)
        goes_on = last_prefix in ("B", "I") and prefix in ("I", "E") and kind == last_type
        if not goes_on:
            if last_prefix != OUTSIDE:
                found.append(Entity(last_type, start, index))
            start = index
        last_prefix, last_type = prefix, kind
    return found


def to_iob2(found: Iterable[Entity], words: int) -> list[str]:
    """Returns the IOB2 tags of a sentence of so many words with these entities."""
    tags = [OUTSIDE] * words
    for entity in found:
        tags[entity.start] = f"B-{entity.type}"
        for index in range(entity.start + 1, entity.end):
            tags[index] = f"I-{entity.type}"
    return tags


def class_names(types: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of a tagger's classes: O, and B- and I- of each type."""
    names = [OUTSIDE]
    for kind in types:
        names += [f"B-{kind}", f"I-{kind}"]
    return tuple(names)


# Schemes


@dataclass
class Scheme:
    """How the sentences of a split are tagged; `add` reads them one by one.

    Attributes:
        letters: the prefixes that there are, as the data write them.
        total: entities.
        irregular: those that the scheme of the others would begin, or end, by another prefix.
        first: place of the first of them, as given to `add`.
    """

    letters: set[str] = field(default_factory=set)
    total: int = 0
    _by_b: int = 0  # that B- begins, where I- would do in IOB1
    _by_i: int = 0  # that I- or E- begins
    _first_by_b: tuple[int, int] | None = None
    _first_by_i: tuple[int, int] | None = None

    def add(self, number: int, tags: Sequence[str], found: Sequence[Entity]) -> None:
        """Reads the tags of sentence `number`, and its entities."""
        self.letters.update(tag[0] for tag in tags)
        self.total += len(found)
        before = None
        for entity in found:
            prefix, _ = split_tag(tags[entity.start])
            touches = False  # the entity before it, which has its type
            if before is not None and before.type == entity.type:
                touches = before.end == entity.start
            if prefix == "B" and not touches:
                self._by_b += 1
                self._first_by_b = self._first_by_b or (number, entity.start)
            elif prefix in ("I", "E"):
                self._by_i += 1
                self._first_by_i = self._first_by_i or (number, entity.start)
            before = entity

    @property
    def name(self) -> str:
        """The scheme's name."""
        if self.letters & set("LU"):
            return "BILOU"
        if "M" in self.letters:
            return "BMES"
        if self.letters & set("ES"):
            return "BIOES"
        return "IOB1" if self._by_i > self._by_b else "IOB2"

    @property
    def irregular(self) -> int:
        return self._by_b if self.name == "IOB1" else self._by_i

    @property
    def first(self) -> tuple[int, int] | None:
        """The number of the sentence, and that of the word."""
        return self._first_by_b if self.name == "IOB1" else self._first_by_i


# Metrics


@dataclass
class Counts:
    """Entities that are there, that are predicted, and that are both: in type, first and last
    word."""

    gold: int = 0
    predicted: int = 0
    right: int = 0

    @property
    def precision(self) -> float:
        """Share of the predicted entities that are right; 0 where none is predicted."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the entities that are found; 0 where there are none."""
        return self.right / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both; 0 where there is neither."""
        together = self.gold + self.predicted
        return 2 * self.right / together if together else 0.0


@dataclass(frozen=True)
class Scores:
    """What `score` computes.

    Attributes:
        overall: of the entities of all types together ("micro").
        by_type: of each type that is there or is predicted, sorted.
        accuracy: share of the words with the right tag.
    """

    overall: Counts
    by_type: dict[str, Counts]
    accuracy: float


def score(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """Scores tags as seqeval does by default, and conlleval.

    Args:
        gold, predicted: the tags of each sentence. As seqeval compares them, accuracy wants both in
            one scheme; entities do not.
    Raises:
        ValueError: another number of sentences or words; no words.
    """
    by_type = {}
    words = 0
    right_tags = 0
    for tags, guesses in zip(gold, predicted, strict=True):
        words += len(tags)
        right_tags += sum(one == other for one, other in zip(tags, guesses, strict=True))
        is_there = set(entities(tags))
        is_found = set(entities(guesses))
        _count(by_type, "gold", is_there)
        _count(by_type, "predicted", is_found)
        _count(by_type, "right", is_there & is_found)
    if not words:
        raise ValueError("there are no words to score")

    overall = Counts()
    for counts in by_type.values():
        overall.gold += counts.gold
        overall.predicted += counts.predicted
        overall.right += counts.right
    return Scores(overall, dict(sorted(by_type.items())), right_tags / words)


def _count(by_type: dict[str, Counts], name: str, found: set[Entity]) -> None:
    """Adds entities to one of the counts of their types."""
    for kind, number in Counter(entity.type for entity in found).items():
        counts = by_type.setdefault(kind, Counts())
        setattr(counts, name, getattr(counts, name) + number)
