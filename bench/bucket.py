"""Seconds to copy a bucket's files to the local disk, where each request takes 50 ms.

Many requests at once are compared with one after the other.

    bucket    a web server on this machine that waits `--latency` before each answer, as a bucket's
              does
    ours      data.remote.local_copy, into an empty cache
    one       the same with a single request at a time
    disk      shutil.copytree of the same files

    run       python -m bench.bucket

The tests take the same server, which can also fail as networks do.
"""

import contextlib
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import quote, unquote

import numpy as np
import tyro

from data import remote


class Bucket(ThreadingHTTPServer):
    """A web server of `files`, {path: bytes}, with listings, etags and ranges.

    Attributes:
        url: of the folder that has all files.
        latency: seconds before each answer.
        trouble: {path: [what goes wrong at its next GETs, one after the other]}: a status, "drop"
            (the connection ends in mid-body), "whole" (the range is not heeded), or a function to
            call first.
        requests: (method, path, range) of those so far.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, files: dict[str, bytes], latency: float = 0.0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.latency = latency
        self.trouble = {}
        self.requests = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    @contextlib.contextmanager
    def open(self) -> Iterator["Bucket"]:
        """Serves in a thread, until the end of the block."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def handle_error(self, request, address) -> None:
        """Says nothing: clients go away when they have seen enough."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_GET(self) -> None:
        path = unquote(self.path).strip("/")
        asked_range = self.headers.get("Range", "")
        self.server.requests.append((self.command, path, asked_range))
        time.sleep(self.server.latency)

        troubles = self.server.trouble.get(path)
        trouble = None
        if troubles and self.command == "GET":
            trouble = troubles.pop(0)
        if callable(trouble):
            trouble = trouble()
        if isinstance(trouble, int):
            return self._answer(trouble, b"<html>trouble</html>", {})

        content = self.server.files.get(path)
        if content is None:
            return self._list(path)
        headers = {"ETag": f"{hash(content):x}", "Content-Type": "application/octet-stream"}
        drop = trouble == "drop"
        if asked_range and trouble != "whole":
            first, last = asked_range.removeprefix("bytes=").split("-")
            first = int(first)
            last = min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self._answer(206, content[first : last + 1], headers, drop)
        return self._answer(200, content, headers, drop)

    do_HEAD = do_GET

    def _list(self, path: str) -> None:
        """Answers with a page of links to the files and folders that are directly in a folder."""
        folder = f"{path}/" if path else ""
        links = set()
        for name in self.server.files:
            if name.startswith(folder):
                first, _, rest = name.removeprefix(folder).partition("/")
                is_folder = rest != ""
                links.add(f"{first}/" if is_folder else first)

        # Web servers also link to the folder above, and to the page in another order.
        hrefs = ["../", "?C=N;O=D"]
        hrefs += [quote(link) for link in sorted(links)]
        items = [f'<a href="{href}">{href}</a>' for href in hrefs]
        page = f"<html>{''.join(items)}</html>"
        status = 200 if links else 404
        self._answer(status, page.encode(), {"Content-Type": "text/html"})

    def _answer(
        self, status: int, content: bytes, headers: dict[str, str], drop: bool = False
    ) -> None:
        """Sends an answer; `drop`: ends the connection in mid-body."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if drop else content)
        if drop:
            self.close_connection = True

    def log_message(self, *_) -> None:
        pass


@dataclass(frozen=True)
class Args:
    """Copies files from a local web server that delays every answer."""

    files: int = 100  # how many there are
    kilobytes: int = 256  # in each
    latency: float = 0.05  # seconds before each answer
    rounds: int = 3  # the median counts


def copied(bucket: Bucket, cache: str, requests_at_once: int) -> str:
    """Copies the bucket's files to an empty cache; returns the folder of the copy."""
    environment = mock.patch.dict(os.environ, DATA_CACHE_DIR=cache)
    limit = mock.patch.object(remote, "AHEAD", requests_at_once)
    with environment, limit:
        remote.local_copy.cache_clear()
        return remote.local_copy(f"{bucket.url}/rows")


def main(args: Args) -> None:
    """Prints the seconds of each kind of copy, medians of the rounds."""
    rng = np.random.default_rng(0)
    files = {}
    for number in range(args.files):
        files[f"rows/{number:04d}.bin"] = rng.bytes(args.kilobytes << 10)

    seconds = {"ours": [], "one": [], "disk": []}
    with Bucket(files, args.latency).open() as bucket, tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name, requests_at_once in (("ours", remote.AHEAD), ("one", 1)):
                began = time.perf_counter()
                copy = copied(bucket, f"{folder}/{name}{number}", requests_at_once)
                seconds[name].append(time.perf_counter() - began)
            for name, content in files.items():
                assert Path(copy, Path(name).name).read_bytes() == content
            began = time.perf_counter()
            shutil.copytree(copy, f"{folder}/disk{number}")
            seconds["disk"].append(time.perf_counter() - began)

    sizes = f"{args.files} files of {args.kilobytes} kB"
    latency = f"{1000 * args.latency:.0f} ms a request"
    medians = [f"{name} {statistics.median(times):.2f} s" for name, times in seconds.items()]
    print(sizes, latency, *medians, sep=", ")


if __name__ == "__main__":
    main(tyro.cli(Args))
