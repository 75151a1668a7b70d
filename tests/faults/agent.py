"""The agent of a cell: found where it stands still, and gone on from there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 120


def state_of(pid: int) -> tuple[str, int] | None:
    """(state letter, parent) of a process, None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def standing(lock: Path) -> int | None:
    """The process that holds the lock, once it stands still."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        pid = json.loads(lock.read_bytes())["pid"]
        if (state_of(pid) or " ")[0] == "T":
            return pid
    return None


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (state_of(pid) or "Z")[0] != "Z":
        if time.monotonic() > deadline:
            raise TimeoutError(f"agent {pid} does not end")
        time.sleep(0.01)


def cut_channel(pid: int, listener: int) -> None:
    """Kill the sshd processes between an agent and the sshd that was started with pid LISTENER."""
    doomed = []
    while pid != listener:
        _, pid = state_of(pid)
        doomed.append(pid)
    for sshd in doomed[:-1]:
        if Path(f"/proc/{sshd}/comm").read_text().startswith("sshd"):
            os.kill(sshd, signal.SIGKILL)


class Striker(threading.Thread):
    """Waits for the agent to stand still, calls `strike(pid)`, and kills the agent or lets it go on.

    pid: the agent, None while (or when) it was never seen to stand.
    """

    def __init__(self, lock: Path, strike: Callable[[int], None], *, fatal: bool):
        super().__init__(daemon=True)
        self.lock, self.strike, self.fatal = lock, strike, fatal
        self.pid: int | None = None
        self.error: BaseException | None = None
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            pid = standing(self.lock)
            if pid is None:
                time.sleep(0.005)
                continue
            self.pid = pid
            try:
                self.strike(pid)
            except BaseException as error:
                self.error = error
            os.kill(pid, signal.SIGKILL if self.fatal else signal.SIGCONT)
            return

    def end(self) -> None:
        """The command is over. Waits for the agent's end; raises what strike raised."""
        self._over.set()
        self.join()
        if self.error is not None:
            raise self.error
        if self.pid is not None:
            wait_gone(self.pid)
