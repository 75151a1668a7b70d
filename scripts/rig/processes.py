"""Ending what a rig started, and only that."""

import os
import signal
import time
from pathlib import Path


def end_group(pgid: int, patience_s: float = 20) -> None:
    """TERM to every process of the group, KILL after `patience_s` to what is left. Returns when the group is gone."""
    for sign, wait in ((signal.SIGTERM, patience_s), (signal.SIGKILL, patience_s)):
        try:
            os.killpg(pgid, sign)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            if not _alive(pgid):
                return
            time.sleep(0.1)
    raise RuntimeError(f"process group {pgid} is still there after KILL")


def _alive(pgid: int) -> bool:
    """Whether the group has a process that is more than a zombie (those are for their parent to reap)."""
    return any(group == pgid and state != "Z" for _, group, state in _processes())


def _processes() -> list[tuple[int, int, str]]:
    """(pid, process group, state letter) of every process of this machine."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):  # ended since the listing
            continue
        state, _parent, group = text.rpartition(")")[2].split()[:3]  # the name before ")" may hold anything
        found.append((int(stat.parent.name), int(group), state))
    return found


def groups_at_work_in(directory: Path) -> set[int]:
    """Process groups with a process whose working directory is `directory` or below, this process's own aside.

    A rig that owns a fresh directory and starts everything in it finds with this also what its servers started,
    or what was started again over SSH in a session of its own.
    """
    found = set()
    for pid, group, state in _processes():
        try:
            cwd = Path(os.readlink(f"/proc/{pid}/cwd"))
        except OSError:  # ended, a zombie, or another user's: not started by this rig
            continue
        if state != "Z" and cwd.is_relative_to(directory.resolve()):
            found.add(group)
    return found - {os.getpgrp()}
