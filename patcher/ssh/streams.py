"""The three streams of one program, moved at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import paramiko

QUIET = 5.0  # seconds of silence after a program's end that end its output
LIMIT = 128 << 20  # bytes of each output; the largest that is expected, a log of 8 MiB in JSON, has less than 50 MiB


class Streams:
    """Feeds one program's input and drains both of its outputs, each on a thread of its own:
    whoever reads one stream at a time stops for ever once the other is full."""

    def __init__(
        self,
        write: Callable[[bytes], Any],
        end_input: Callable[[], Any],
        read_out: Callable[[], bytes],
        read_err: Callable[[], bytes],
        on_stderr: Callable[[bytes], None],
        end_program: Callable[[], Any],
    ) -> None:
        """end_program: ends it from here, when an output has more than LIMIT bytes; `too_much` says that it has."""
        self._write, self._end_input, self._end_program = write, end_input, end_program
        self.too_much = False
        self._out: list[bytes] = []
        self._err: list[bytes] = []
        self._drains = [
            threading.Thread(target=self._drain, args=(read_out, self._out, None), daemon=True),
            threading.Thread(target=self._drain, args=(read_err, self._err, on_stderr), daemon=True),
        ]

    @property
    def stdout(self) -> bytes:
        return b"".join(self._out)

    @property
    def stderr(self) -> bytes:
        return b"".join(self._err)

    def start(self, input: bytes) -> None:
        for thread in self._drains:
            thread.start()
        threading.Thread(target=self._feed, args=(input,), daemon=True).start()

    def finish(self) -> bool:
        """Wait for the ends of both outputs once the program has ended; False if they do not come.

        What it wrote last may still be on its way, so this goes on while bytes come; but a child that
        outlives the program may keep the streams open for ever: silence for QUIET seconds is the end.
        """
        seen, since = -1, time.monotonic()
        while any(thread.is_alive() for thread in self._drains):
            count = len(self._out) + len(self._err)
            if count != seen:
                seen, since = count, time.monotonic()
            elif time.monotonic() - since > QUIET:
                return False
            for thread in self._drains:
                thread.join(0.05)
        return True

    def _feed(self, input: bytes) -> None:
        try:
            self._write(input)
            self._end_input()
        except (OSError, EOFError, paramiko.SSHException):
            pass  # the program ended without reading its input, or the link broke: its exit status tells

    def _drain(self, read: Callable[[], bytes], pieces: list[bytes], tell: Callable[[bytes], None] | None) -> None:
        left = LIMIT
        try:
            while piece := read():
                left -= len(piece)
                if left < 0:
                    self.too_much = True
                    self._end_program()
                    return
                pieces.append(piece)
                if tell:
                    tell(piece)
        except (OSError, ValueError, EOFError, paramiko.SSHException):
            pass  # the stream was closed under us: its exit status tells
