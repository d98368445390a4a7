"""The answer to Ctrl-C and SIGTERM, at once: Python calls their handlers between two operations of the main thread,
which may be in a compilation for minutes."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

LINGER = 2.0  # seconds that the main thread has to end by itself after the Ctrl-C that ends it
STOPS = "stops after this step"
AGAIN = "; Ctrl-C again ends now"
ENDED = "ended by Ctrl-C"
STDOUT, STDERR = 1, 2  # which a notebook puts nothing in place of
CODE = 128 + signal.SIGINT  # as a shell gives it for a process that SIGINT has ended


@contextlib.contextmanager
def caught(says: bool) -> Iterator[Callable[[], int]]:
    """Catches SIGTERM and Ctrl-C; yields a function that returns how many have come. The second Ctrl-C raises
    KeyboardInterrupt, or ends the process where the main thread does not come to it. `says`: whether this process
    answers them on the terminal. In another thread than the main one nothing is answered."""
    received: list[int] = []
    ending = threading.Event()

    def handle(number: int, _frame: Any) -> None:
        if received and number == signal.SIGINT:
            ending.set()
            raise KeyboardInterrupt
        received.append(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    answering = _answering(partial(_answer, ending=ending, says=says)) if in_main_thread else contextlib.nullcontext()
    with answering, _handling(handle, signal.SIGTERM, signal.SIGINT):
        yield lambda: len(received)


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt, and ends the process where the main thread does not come to it: before the
    training there is nothing to save. Where SIGINT is ignored, or in another thread, nothing changes."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    ending = threading.Event()

    def handle(_number: int, _frame: Any) -> None:
        ending.set()
        raise KeyboardInterrupt

    with _answering(partial(_end, ending=ending)), _handling(handle, signal.SIGINT):
        yield


@contextlib.contextmanager
def _handling(handle: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _answering(answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Answers in a thread that gets the signals' numbers from the interpreter, whatever the main thread does."""
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


def _answer(numbers: socket.socket, ending: threading.Event, says: bool) -> None:
    came = 0
    while content := numbers.recv(1):
        number = content[0]
        if number not in (signal.SIGINT, signal.SIGTERM):
            continue
        came += 1
        if came > 1 and number == signal.SIGINT:
            if not ending.wait(LINGER):
                os._exit(CODE)
        elif came == 1 and says:
            # Not by print: the main thread may be within one.
            line = STOPS + AGAIN * (number == signal.SIGINT)
            with contextlib.suppress(OSError):
                os.write(STDOUT, f"\n{line}\n".encode())


def _end(numbers: socket.socket, ending: threading.Event) -> None:
    while content := numbers.recv(1):
        if content[0] == signal.SIGINT and not ending.wait(LINGER):
            with contextlib.suppress(OSError):
                os.write(STDERR, f"{ENDED}\n".encode())
            os._exit(CODE)
