"""stderr, for progress and failures: what nobody takes is dropped, because work on a host must not depend on a reader.

The reader of a pipe may leave (`2>&1 | head`), its disk may be full. An exception in the middle of a job for that, or
rich's answer to it, which ends the thread, would leave a host half done.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any, cast

from rich.console import Console

from patcher.report.render import console_for


def message_console() -> Console:
    """A console on stderr whose prints never fail."""
    return console_for(cast(IO[str], _Droppable(sys.stderr)))


class _Droppable:
    """A text stream that leads nowhere from the first failure on."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """What is left in the buffer goes nowhere too, so that it does not fail again when Python ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
