"""Names that systems and programs leave in folders of data, and that nobody means to train on."""

import re

MACOS = ("__macosx", ".appledouble", ".fseventsd", ".spotlight-v100", ".temporaryitems", ".trashes")
MACOS_SHARES = ("network trash folder", "temporary items", "thevolumesettingsfolder")
WINDOWS = ("$recycle.bin", "recycler", "system volume information")
NETWORK_DISKS = ("@eadir", "#recycle", "#snapshot", ".snapshot", ".snapshots")
EXT4 = ("lost+found",)
QNAP = ("@recycle", "@recently-snapshot", ".@__thumb")  # .@__thumb has small copies of pictures
DESKTOPS = (".thumbnails", ".picasaoriginals", ".dropbox.cache", ".cache")
DEVELOPMENT = (".ipynb_checkpoints", "__pycache__", ".git", ".svn", ".hg")

# In lower case: they are left out in any case.
FOLDERS = frozenset(
    (
        *MACOS,
        *MACOS_SHARES,
        *WINDOWS,
        *NETWORK_DISKS,
        *EXT4,
        *QNAP,
        *DESKTOPS,
        *DEVELOPMENT,
    )
)
NUMBERED_FOLDERS = re.compile(r"\.trash(es|-\d+)?|found\.\d{3}")  # .Trash-1000, found.000
FILES = frozenset(("thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store"))
APPLE_DOUBLE = "._"  # begins the name of a file's metadata


def is_leftover(name: str) -> bool:
    """Returns whether a file or a folder is a system's own: __MACOSX, @eaDir, ._1.jpg, .DS_Store …

    Other hidden names are not meant: a folder .jpg may be the user's.
    """
    lower = name.lower()
    if lower in FOLDERS or lower in FILES:
        return True
    return lower.startswith(APPLE_DOUBLE) or NUMBERED_FOLDERS.fullmatch(lower) is not None
