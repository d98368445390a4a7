"""Small texts that the tests of data/prepare/text.py and data/prepare/wmt.py prepare."""

import gzip
import json
from pathlib import Path

import numpy as np

SYLLABLES = ["ba", "di", "lo", "mu", "ne", "ra", "so", "tu", "ga", "hi"]
UMLAUTS = ["ba", "di", "lo", "mu", "ne", "rä", "ßo", "tü", "ga", "hi"]
DIFFERS_BETWEEN_CALLS = ("seconds", "sources", "read_from")  # fields of a preparation's report


def random_word(rng: np.random.Generator, syllables: list[str]) -> str:
    """Returns a word of 1 to 3 syllables."""
    return "".join(rng.choice(syllables, rng.integers(1, 4)))


def random_sentence(rng: np.random.Generator) -> str:
    """Returns a sentence of 3 to 8 words."""
    words = [random_word(rng, SYLLABLES) for _ in range(rng.integers(3, 9))]
    return " ".join(words).capitalize() + "."


def documents(count: int, seed: int = 0) -> list[list[str]]:
    """Returns documents of 1 to 4 lines of 1 to 3 sentences; no two are the same."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lines = []
        for _ in range(rng.integers(1, 5)):
            line = [random_sentence(rng) for _ in range(rng.integers(1, 4))]
            lines.append(" ".join(line))
        made.append(lines)
    return made


def text_of(lines: list[str]) -> str:
    """Returns the text of a file with these lines."""
    return "".join(f"{line}\n" for line in lines)


def written(texts: list[list[str]]) -> bytes:
    """Returns the content of a file with these documents, an empty line between two."""
    return "\n".join(map(text_of, texts)).encode()


def text_corpus(folder: Path, end: str = "", count: int = 60) -> Path:
    """Writes training and validation documents to a.txt, b.txt and valid.txt; returns the folder.

    Args:
        end: .gz for packed files.
        count: documents of each training file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if end else bytes
    files = {
        "a": documents(count),
        "b": documents(count, seed=1),
        "valid": documents(8, seed=2),
    }
    for name, texts in files.items():
        (folder / f"{name}.txt{end}").write_bytes(pack(written(texts)))
    return folder


def sentences(count: int, seed: int = 0) -> list[str]:
    """Returns different sentences whose words share syllables, so that there are pieces to
    learn."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        words = [random_word(rng, UMLAUTS) for _ in range(rng.integers(4, 9))]
        lines.append(f"{' '.join(words)} {seed}{number}.")
    return lines


def translated(lines: list[str]) -> list[str]:
    """Returns other sentences of about equal length."""
    return [line.swapcase() for line in lines]


def write_lines(folder: Path, name: str, lines: list[str], end: str = "") -> None:
    """Writes lines to the file `name`, with `end` .gz packed."""
    folder.mkdir(parents=True, exist_ok=True)
    content = text_of(lines).encode(errors="surrogateescape")
    if end:
        content = gzip.compress(content)
    (folder / f"{name}{end}").write_bytes(content)


def pair_corpus(folder: Path, end: str = "", count: int = 60, **others: list[str]) -> Path:
    """Writes train and valid text in en and de, and other files by name: train_en=[…]."""
    for name, lines in (("train", sentences(count)), ("valid", sentences(7, seed=1))):
        write_lines(folder, f"{name}.en", lines, end)
        write_lines(folder, f"{name}.de", translated(lines), end)
    for name, lines in others.items():
        write_lines(folder, name.replace("_", "."), lines, end)
    return folder


def contents(out: Path) -> dict:
    """Returns all files of a prepared folder by their path: bytes, but of the report the fields in
    which two equal preparations agree."""
    files = {}
    for path in sorted(out.rglob("*")):
        if path.is_file():
            files[str(path.relative_to(out))] = path.read_bytes()

    for name in {"report.json", "prepared.json"} & set(files):
        report = json.loads(files[name])
        for field in DIFFERS_BETWEEN_CALLS:
            report.pop(field, None)
        files[name] = report
    return files
