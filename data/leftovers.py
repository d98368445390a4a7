"""What systems and programs leave in folders of data, and what nobody means to train on."""

import re

MACOS = ("__macosx", ".appledouble", ".fseventsd", ".spotlight-v100", ".temporaryitems", ".trashes")
MACOS_SHARES = ("network trash folder", "temporary items", "thevolumesettingsfolder")
WINDOWS = ("$recycle.bin", "recycler", "system volume information")
STORAGE = ("@eadir", "#recycle", "#snapshot", ".snapshot", ".snapshots", "lost+found")  # of network disks, and ext4's
QNAP = ("@recycle", "@recently-snapshot", ".@__thumb")  # the last has small copies of the pictures beside it
PROGRAMS = (".ipynb_checkpoints", ".thumbnails", ".picasaoriginals", ".dropbox.cache", "__pycache__", ".git", ".svn")
PROGRAMS += (".hg", ".cache")
FOLDERS = frozenset((*MACOS, *MACOS_SHARES, *WINDOWS, *STORAGE, *QNAP, *PROGRAMS))  # in any case
NUMBERED = re.compile(r"\.trash(es|-\d+)?|found\.\d{3}")  # .Trash-1000, found.000
FILES = frozenset(("thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store"))


def is_leftover(name: str) -> bool:
    """Returns whether a file or a folder of this name is a system's own: __MACOSX, @eaDir, ._1.jpg, .DS_Store …

    Other hidden names are not meant: a folder .jpg may be the user's.
    """
    lower = name.lower()
    known = lower in FOLDERS or lower in FILES or NUMBERED.fullmatch(lower) is not None
    return known or lower.startswith("._")  # AppleDouble
