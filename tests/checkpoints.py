"""What tests of checkpoints share: a look into a folder, ways to damage a file."""

from collections.abc import Callable

import fsspec


def names(place: str) -> set[str]:
    """Returns the names in a folder."""
    fs, root = fsspec.core.url_to_fs(place)
    return {name.rstrip("/").rpartition("/")[2] for name in fs.ls(root, detail=False)}


def damage(place: str, step: int, file: str, edit: Callable[[bytes], bytes] | None) -> None:
    """Rewrites a file of a step's checkpoint; removes it where `edit` is None."""
    fs, root = fsspec.core.url_to_fs(f"{place}/step_{step:08d}/{file}")
    if edit is None:
        fs.rm(root)
    else:
        content = fs.cat_file(root)
        assert edit(content) != content
        fs.pipe_file(root, edit(content))


def flip(content: bytes, at: int) -> bytes:
    """Changes one bit of the byte at a position."""
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)
