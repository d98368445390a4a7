"""Predictions with a trial's export: the pictures and sentences that an acceptance makes for them,
and how far the answers of two ways to compute them are apart.

Standard library only: pictures are PNG files without a filter.
"""

from __future__ import annotations

import json
import math
import random
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu.accept.children import Child

SMALLEST = 1e-300  # of a probability: below it has no logarithm
PICTURES = 512
SIDE = 40  # pixels; the trial's network looks at 32
SENTENCES = 2048

# Sentences are like those of the trial, data/glue.py: the class says whether the number in them is
# above five.
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SMALL, LARGE = "negative", "positive"  # names of the classes
WORDS = ("the", "a", "some", "old", "new", "red", "blue", "and", "of", "near", "at", "dog", "cat")


class Wrong(Exception):
    """The answers are not what they must be; the message says why."""


@dataclass
class Inputs:
    """What is predicted.

    Attributes:
        data: the folder or the file, as DATA=.
        names: what the answers must name, in order.
        right: the right labels; []: not known.
    """

    data: Path
    names: list[str]
    right: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """The answer for one input.

    Attributes:
        label: the most probable class.
        shares: the probability of each class.
    """

    label: str
    shares: dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """The answers of a prediction.

    Attributes:
        child: the program that predicted, and what it has reported.
        precision: of the network.
        answers: in the order of the inputs.
    """

    child: Child
    precision: str
    answers: list[Answer]

    def speed(self) -> float:
        """Returns the inputs a second, of those after the first batch."""
        end = self.child.event("end")
        return end["timed"] / end["seconds"]


@dataclass(frozen=True)
class Comparison:
    """How far answers are from those that they are compared with.

    Attributes:
        apart: the largest `distance` of a probability.
        where: in which answer and class it is, in words.
        same: the share of inputs that have the same label.
    """

    apart: float
    where: str
    same: float


# ---- what is predicted -------------------------------------------------------------------------


def write_inputs(kind: str, folder: Path) -> Inputs:
    """Writes what is predicted into a folder, the same ones each time.

    Args:
        kind: "pictures" or "sentences".
    """
    if kind == "pictures":
        return write_pictures(folder / "pictures")
    return write_sentences(folder / "sentences.txt")


def write_pictures(folder: Path) -> Inputs:
    """Writes pictures of coloured waves."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    names = []
    for number in range(PICTURES):
        path = folder / f"{number:04d}.png"
        path.write_bytes(png(waves(draw), SIDE))
        names.append(str(path))
    return Inputs(folder, names)


def waves(draw: random.Random) -> bytes:
    """Returns the pixels of a picture, red, green and blue of each, with a wave in each colour."""
    channels = []
    for _ in range(3):
        strength = draw.uniform(10, 60)
        wave = []
        for step in range(SIDE):
            wave.append(int(128 + strength * math.cos(2 * math.pi * step / SIDE)))
        down = draw.randrange(1, 5)  # waves
        across = draw.randrange(1, 5)
        shift = draw.randrange(SIDE)
        values = []
        for y in range(SIDE):
            for x in range(SIDE):
                values.append(wave[(down * y + across * x + shift) % SIDE])
        channels.append(values)

    pixels = bytearray(3 * SIDE * SIDE)
    for number, values in enumerate(channels):
        pixels[number::3] = bytes(values)
    return bytes(pixels)


def png(pixels: bytes, side: int) -> bytes:
    """Returns a PNG file of a square picture; 3 bytes a pixel."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    bits, colours = 8, 2  # colours: red, green, blue
    header = struct.pack(">IIBBBBB", side, side, bits, colours, 0, 0, 0)
    no_filter = b"\0"
    rows = []
    for y in range(side):
        rows.append(no_filter + pixels[3 * side * y : 3 * side * (y + 1)])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"".join(rows)))
        + chunk(b"IEND", b"")
    )


def write_sentences(path: Path) -> Inputs:
    """Writes sentences of 4 to 9 words, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    sentences = []
    right = []
    for _ in range(SENTENCES):
        value = draw.randrange(len(NUMBERS))
        words = draw.choices(WORDS, k=draw.randint(3, 8))
        words.insert(draw.randint(1, 3), NUMBERS[value])
        sentences.append(" ".join(words) + ".")
        right.append(SMALL if value < len(NUMBERS) // 2 else LARGE)
    path.write_text("".join(f"{sentence}\n" for sentence in sentences))
    return Inputs(path, sentences, right)


# ---- what was answered -------------------------------------------------------------------------


def check_report(child: Child, inputs: Inputs, hardware: dict[str, Any]) -> None:
    """Checks what a prediction has reported of itself.

    Args:
        hardware: of the trial; {}: it may be another.
    Raises:
        Wrong: it reported nothing, ran elsewhere than the trial, was compiled again, fell back to
            the host, or predicted fewer than there are.
    """
    start = child.event("start")
    end = child.event("end")
    if not start or not end:
        raise Wrong("it ended with 0, but did not report a result; look at its log")
    for name in ("kind", "devices"):
        if hardware and start[name] != hardware[name]:
            ran = f"{start['devices']} x {start['kind']}"
            trained = f"{hardware['devices']} x {hardware['kind']}"
            raise Wrong(f"it ran on {ran}, and the trial on {trained}")
    for name in ("recompilations", "fallbacks"):
        found = end["graphs"].get(name)
        if found:
            raise Wrong(f"{len(found)} {name}, expected none: {found[0]}")
    if end["count"] != len(inputs.names):
        raise Wrong(f"it reported {end['count']} answers, expected {len(inputs.names)}")
    if not end["timed"] or not end["seconds"]:
        raise Wrong("it was not timed: all answers came at once; look at its log")


def read_answers(path: Path, inputs: Inputs) -> list[Answer]:
    """Reads the answers of all inputs.

    Raises:
        Wrong: an input has none, or another's; or see `read_answer`; or all are alike.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise Wrong(f"there are no answers: {path} was not written") from None
    if len(lines) != len(inputs.names):
        raise Wrong(f"{path} has {len(lines)} answers, expected {len(inputs.names)}")

    answers = []
    for number, name in enumerate(inputs.names):
        try:
            answers.append(read_answer(lines[number], name))
        except Wrong as error:
            raise Wrong(f"line {number + 1} of {path} {error}") from None
    if len({answer.label for answer in answers}) == 1:
        label = answers[0].label
        raise Wrong(f"all {len(answers)} answers are {label!r}, and no two inputs are alike")
    return answers


def read_answer(line: str, name: str) -> Answer:
    """Reads the answer of one input.

    Raises:
        Wrong: it is another's, has no label, or has a number that is no probability.
    """
    found = read_json(line)
    if found.get("input") != name:
        raise Wrong(f"is the answer for {found.get('input')!r}, expected {name!r}")
    if "error" in found:
        raise Wrong(f"is an error: {found['error']}")

    shares = {}
    for one in found.get("top", []):
        share = one["probability"]
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:  # as NaN is not
            raise Wrong(f"has the probability {share} of {one['label']!r}")
        shares[one["label"]] = share
    if "label" not in found or found["label"] not in shares:
        raise Wrong(f"has no label with a probability: {line[:200]}")
    return Answer(found["label"], shares)


def read_json(line: str) -> dict[str, Any]:
    """Reads a line of JSON; raises Wrong where it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Wrong(f"is no answer: {line[:200]}")
    return found


def compare(answers: list[Answer], reference: list[Answer], inputs: Inputs) -> Comparison:
    """Compares answers with those of a reference, probability by probability.

    Raises:
        Wrong: their classes have other names.
    """
    apart = 0.0
    where = "nothing is apart"
    same = 0
    for number, name in enumerate(inputs.names):
        answer = answers[number]
        other = reference[number]
        if answer.shares.keys() != other.shares.keys():
            classes = ", ".join(sorted(answer.shares))
            others = ", ".join(sorted(other.shares))
            raise Wrong(f"{name!r} has the classes {classes}, and {others} by plain PyTorch")
        same += answer.label == other.label
        for label, share in answer.shares.items():
            found = distance(share, other.shares[label])
            if found > apart:
                apart = found
                shown = f"the probability {share:.6g}, and {other.shares[label]:.6g}"
                where = f"{label!r} of {name!r} has {shown}"
    return Comparison(apart, where, same / len(answers))


def distance(share: float, other: float) -> float:
    """Returns how far the logarithms of two probabilities are apart, by their size:
    |log a - log b| / (1 + |log b|).

    A network that is sure has probabilities next to 0 and 1, which hide what became of its logits.
    """
    log = math.log(max(share, SMALLEST))
    log_of_other = math.log(max(other, SMALLEST))
    return abs(log - log_of_other) / (1 + abs(log_of_other))


def share_right(answers: list[Answer], inputs: Inputs, least: float) -> float:
    """Returns the share of answers that have the right label; raises Wrong where it is less than
    `least`."""
    hits = 0
    for number, answer in enumerate(answers):
        hits += answer.label == inputs.right[number]
    share = hits / len(answers)
    if share < least:
        expected = f"expected {100 * least:.0f} % or more"
        raise Wrong(f"{100 * share:.1f} % of the labels are right, {expected}")
    return share
