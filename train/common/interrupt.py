"""The answer to Ctrl-C and SIGTERM, at once.

Python calls signal handlers between two operations of the main thread, which may be in a
compilation for minutes. So a thread of its own answers: the interpreter writes the number of each
signal into a socket, at any time.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

LINGER = 2.0  # seconds for the main thread to end by itself after the Ctrl-C that ends it
STOPS = "stops after this step"
AGAIN = "; Ctrl-C again ends now"
ENDED = "ended by Ctrl-C"
STDOUT = 1  # file descriptors, which a notebook does not replace
STDERR = 2
CODE = 128 + signal.SIGINT  # a shell's exit code for a process that SIGINT has ended


# What is called when the process ends, see `at_end`; one thread at a time calls it.
_at_end: list[Callable[[], None]] = []
_at_end_lock = threading.RLock()


def at_end(function: Callable[[], None]) -> None:
    """Calls `function` when this process ends: by itself, by an exception, by Ctrl-C or by SIGTERM,
    which still ends it as if nobody had caught it. SIGKILL calls nothing.

    Args:
        function: may be called twice.
    """
    if not _at_end:
        atexit.register(_call_at_end)
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)
    _at_end.append(function)


def _call_at_end() -> None:
    with _at_end_lock:
        for function in _at_end:
            function()


def _terminate(*_: Any) -> None:
    """Ends the process by SIGTERM, after what is to be done at its end."""
    _call_at_end()
    # signal.signal is for the main thread only, which may be in a compilation.
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # no handler: the system's own
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def caught(says: bool) -> Iterator[Callable[[], int]]:
    """Catches SIGTERM and Ctrl-C; yields a function that returns how many have come.

    The second Ctrl-C raises KeyboardInterrupt, or ends the process where the main thread does not
    get to it. Outside of the main thread nothing is answered.

    Args:
        says: whether this process answers on the terminal.
    """
    received: list[int] = []
    ending = threading.Event()

    def handle(number: int, _frame: Any) -> None:
        if received and number == signal.SIGINT:
            ending.set()
            raise KeyboardInterrupt
        received.append(number)

    answering = contextlib.nullcontext()
    if _in_main_thread():
        answering = _answering(partial(_answer, ending=ending, says=says))
    with answering, _handling(handle, signal.SIGTERM, signal.SIGINT):
        yield lambda: len(received)


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt, or end the process if the main thread is busy.

    This is for the time before the training, when there is nothing to save. Where SIGINT is
    ignored, or outside of the main thread, nothing changes.
    """
    handler = signal.getsignal(signal.SIGINT) if _in_main_thread() else None
    if handler is not signal.default_int_handler:
        yield
        return

    ending = threading.Event()

    def handle(_number: int, _frame: Any) -> None:
        ending.set()
        raise KeyboardInterrupt

    with _answering(partial(_end, ending=ending)), _handling(handle, signal.SIGINT):
        yield


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _handling(handle: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Makes `handle` the handler of these signals."""
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _answering(answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Runs `answer` in a thread, on a socket that gets a byte with the number of each signal."""
    numbers, interpreter = socket.socketpair()
    interpreter.setblocking(False)
    previous = signal.set_wakeup_fd(interpreter.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=answer, args=(numbers,), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        interpreter.close()  # which ends the thread
        thread.join()
        numbers.close()


def _received(numbers: socket.socket) -> Iterator[int]:
    """Yields the number of each signal, until the other end of the socket is closed."""
    content = numbers.recv(1)
    while content:
        yield content[0]
        content = numbers.recv(1)


def _answer(numbers: socket.socket, ending: threading.Event, says: bool) -> None:
    """Prints a line for the first signal; ends the process by a later Ctrl-C, see `caught`."""
    count = 0
    for number in _received(numbers):
        if number not in (signal.SIGINT, signal.SIGTERM):
            continue

        count += 1
        if count == 1:
            if says:
                line = STOPS + AGAIN if number == signal.SIGINT else STOPS
                _write(STDOUT, f"\n{line}\n")
        elif number == signal.SIGINT and not ending.wait(LINGER):
            _call_at_end()
            os._exit(CODE)


def _end(numbers: socket.socket, ending: threading.Event) -> None:
    """Ends the process by Ctrl-C, where the main thread does not do it in LINGER seconds; and by a
    SIGTERM that `at_end` has caught."""
    for number in _received(numbers):
        if number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == _terminate:
            _terminate()
        if number == signal.SIGINT and not ending.wait(LINGER):
            _call_at_end()
            _write(STDERR, f"{ENDED}\n")
            os._exit(CODE)


def _write(descriptor: int, text: str) -> None:
    """Writes to a terminal, if it is there. Not by print: the main thread may be within one."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())
