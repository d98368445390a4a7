"""What tests of checkpoints share: a look into a folder, ways to damage a file."""

from collections.abc import Callable

import fsspec


def names(place: str) -> set[str]:
    """Returns the names in a folder, a path or URL."""
    fs, root = fsspec.core.url_to_fs(place)
    paths = fs.ls(root, detail=False)
    return {path.rstrip("/").rpartition("/")[2] for path in paths}


def damage(place: str, step: int, file: str, edit: Callable[[bytes], bytes] | None) -> None:
    """Rewrites a file of a step's checkpoint; removes it where `edit` is None."""
    fs, path = fsspec.core.url_to_fs(f"{place}/step_{step:08d}/{file}")
    if edit is None:
        fs.rm(path)
        return
    content = fs.cat_file(path)
    assert edit(content) != content
    fs.pipe_file(path, edit(content))


def flip(content: bytes, at: int) -> bytes:
    """Changes one bit of the byte at a position."""
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)
