"""A terminal for tests: a pseudo-terminal, and what a person sees on it."""

import contextlib
import fcntl
import os
import re
import select
import struct
import termios
import threading

PARTS = re.compile(r"\x1b\[K|\x1b\[A|.", re.DOTALL)  # what `shown` knows


class Terminal:
    """A pseudo-terminal whose other end is read, as a person's is.

    Args:
        columns: 0 where nobody has said how wide it is.

    Attributes:
        stream, errors: what a program has as its standard output and error.
    """

    def __init__(self, columns: int):
        self._columns = columns
        self._read_end, write_end = os.openpty()
        self.stream = os.fdopen(write_end, "w", buffering=1, encoding="utf-8")
        self.errors = os.fdopen(os.dup(write_end), "w", buffering=1, encoding="utf-8")
        size = struct.pack("HHHH", 24 if columns else 0, columns, 0, 0)
        fcntl.ioctl(write_end, termios.TIOCSWINSZ, size)
        self._content = b""
        self._hung_up = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # when nobody has the streams any more
            while not self._hung_up:
                ready, _, _ = select.select([self._read_end], [], [], 0.01)
                if ready:
                    self._content += os.read(self._read_end, 4096)

    def hang_up(self) -> None:
        """Takes the other end away, as an ssh connection that breaks does."""
        self._hung_up = True
        self._reader.join()
        os.close(self._read_end)

    def content(self) -> str:
        """Closes the streams; returns all that was written to them."""
        for stream in (self.stream, self.errors):
            with contextlib.suppress(OSError):
                stream.close()
        self._reader.join()
        return self._content.decode()

    def lines(self) -> list[str]:
        """Closes the streams; returns the lines that stand on the terminal then."""
        return shown(self.content(), self._columns)


def shown(content: str, columns: int) -> list[str]:
    """Returns the lines that a terminal shows after this content, without empty ones at its end."""
    rows = [""]
    row = column = 0
    for part in PARTS.findall(content):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
        elif part == "\x1b[A":
            row -= 1
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        else:
            if column == columns:  # a line that is too long goes on in the next row
                row += 1
                column = 0
                rows += [""] * (row + 1 - len(rows))
            before = rows[row].ljust(column)
            rows[row] = before[:column] + part + before[column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
    while rows and not rows[-1].strip():
        rows.pop()
    return [line.rstrip() for line in rows]
