"""Small texts that the tests of data/prepare/text.py and data/prepare/wmt.py prepare."""

import gzip
import json
from pathlib import Path

import numpy as np

SYLLABLES = ["ba", "di", "lo", "mu", "ne", "ra", "so", "tu", "ga", "hi"]
UMLAUTS = ["ba", "di", "lo", "mu", "ne", "rä", "ßo", "tü", "ga", "hi"]


def documents(count: int, seed: int = 0) -> list[list[str]]:
    """Returns documents of 1 to 4 lines of 1 to 3 sentences; no two are the same."""
    rng = np.random.default_rng(seed)

    def sentence() -> str:
        words = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(rng.integers(3, 9))]
        return " ".join(words).capitalize() + "."

    return [
        [" ".join(sentence() for _ in range(rng.integers(1, 4))) for _ in range(rng.integers(1, 5))]
        for _ in range(count)
    ]


def written(texts: list[list[str]]) -> bytes:
    return "\n".join("".join(f"{line}\n" for line in lines) for lines in texts).encode()


def text_corpus(folder: Path, end: str = "", count: int = 60) -> Path:
    """Writes training and validation documents to files a, b and valid.txt, with `end` .gz packed."""
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if end else bytes
    for name, part in (("a", documents(count)), ("b", documents(count, 1)), ("valid", documents(8, 2))):
        (folder / f"{name}.txt{end}").write_bytes(pack(written(part)))
    return folder


def sentences(count: int, seed: int = 0) -> list[str]:
    """Returns different sentences whose words share syllables, so that there are pieces to learn."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        words = ["".join(rng.choice(UMLAUTS, rng.integers(1, 4))) for _ in range(rng.integers(4, 9))]
        lines.append(f"{' '.join(words)} {seed}{number}.")
    return lines


def translated(lines: list[str]) -> list[str]:
    """Returns other sentences of about equal length."""
    return [line.swapcase() for line in lines]


def write_lines(folder: Path, name: str, lines: list[str], end: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    (folder / f"{name}{end}").write_bytes(gzip.compress(text) if end else text)


def pair_corpus(folder: Path, end: str = "", count: int = 60, **others: list[str]) -> Path:
    """Writes train and valid text in en and de, and other files by name: train_en=[…]."""
    for name, lines in (("train", sentences(count)), ("valid", sentences(7, 1))):
        write_lines(folder, f"{name}.en", lines, end)
        write_lines(folder, f"{name}.de", translated(lines), end)
    for name, lines in others.items():
        write_lines(folder, name.replace("_", "."), lines, end)
    return folder


def contents(out: Path) -> dict:
    """Returns every file of a prepared folder, and its report without what two calls may differ in."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    for name in {"report.json", "prepared.json"} & set(files):
        report = json.loads(files[name])
        files[name] = {key: value for key, value in report.items() if key not in ("seconds", "sources", "read_from")}
    return files
