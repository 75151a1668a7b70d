"""What Ctrl-C, SIGTERM and a closed terminal do: KeyboardInterrupt, at once or where it is asked for.

An exception that is raised between any two instructions breaks the locks of the threading module, so a command that
works on threads takes interrupts only where it looks for them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

# timeout(1) signals its child and then the group of it; a closed terminal is told by the kernel and by the shell.
SAME_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupts:
    def __init__(self) -> None:
        self.last = -SAME_S
        self.deferred = self.pending = False

    def on_signal(self, number: int, frame: object) -> None:
        """Once for signals that come together."""
        before, self.last = self.last, time.monotonic()
        if self.last - before < SAME_S:
            return
        if not self.deferred:
            raise KeyboardInterrupt
        self.pending = True


_interrupts = _Interrupts()


def install() -> None:
    """Take the signals that end this program, unless that was ruled out (nohup)."""
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupts.on_signal)


def ignore() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def deferred() -> Iterator[None]:
    """Interrupts wait for `check`. What came last is raised at the end, if nothing else is."""
    _interrupts.deferred = True
    try:
        yield
    finally:
        _interrupts.deferred = False
    check()


def check() -> None:
    """Raises KeyboardInterrupt if one waits."""
    if _interrupts.pending:
        _interrupts.pending = False
        raise KeyboardInterrupt
