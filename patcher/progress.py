"""Progress lines on stderr, shared by the threads of several hosts; also how an interrupt reaches those threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.console import Console

from patcher.errors import Interrupted
from patcher.report import plain_text


class Progress:
    """Prints one line for each thing begun. After `cancel` the next line raises Interrupted in its own thread.

    Every job announces each of its steps, and each round of waiting, so a cancelled job stops between two steps: never
    inside a commit, whose outcome would then be unknown to the operator.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}

    def for_host(self, name: str) -> Callable[[str], None]:
        """The function that announces what is being done on host `name`; the same line twice in a row is said once."""

        def tell(text: str) -> None:
            if self._cancelled.is_set():
                raise Interrupted("stopped before the next step", where=name, next_step=f"it would have been: {text}")
            with self._lock:
                if self._last.get(name) == text:
                    return
                self._last[name] = text
                self._console.print(plain_text(f"{name}: {text}", "dim", self._console))

        return tell

    def cancel(self) -> None:
        self._cancelled.set()
