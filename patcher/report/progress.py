"""Progress lines on stderr, shared by the threads of several hosts; also how an interrupt reaches those threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from rich.console import Console

from patcher.errors import Interrupted
from patcher.report.render import plain_text

REPEAT_S = 20.0


class Progress:
    """Prints one line for each thing begun. After `cancel` the next line raises Interrupted in its own thread.

    Every job announces each of its steps, and each round of waiting, so a cancelled job stops between two steps: never
    inside a commit, whose outcome would then be unknown to the operator.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, float]] = {}

    def for_host(self, name: str) -> Callable[[str], None]:
        """The function that announces what is being done on host `name`.

        A line that repeats the last one but for its numbers (a wait that goes on) is printed every REPEAT_S seconds.
        """

        def tell(text: str) -> None:
            if self._cancelled.is_set():
                raise Interrupted(
                    f"stopped before its next step ({text})",
                    where=name,
                    next_step="ddtree-patch status says where the host stands",
                )
            with self._lock:
                kind, now = re.sub(r"\d+", "", text), self._clock()
                last, printed = self._last.get(name, ("", 0.0))
                if kind == last and now - printed < REPEAT_S:
                    return
                self._last[name] = kind, now
                self._console.print(plain_text(f"{name}: {text}", "dim", self._console))

        return tell

    def announce(self, text: str) -> None:
        """A line that is about no single host."""
        with self._lock:
            self._console.print(plain_text(text, "", self._console))

    def cancel(self) -> None:
        self._cancelled.set()
