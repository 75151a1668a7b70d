"""What /proc says of a process. One that has ended is None, or has nothing; ids are used again, start ticks are not."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from .files import read

LISTEN = b"0A"  # the state of a listening socket in /proc/net/tcp
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """name: of the program, cut at 15 characters. ticks: when it started, in clock ticks since boot."""

    name: str
    state: str
    parent: int
    group: int
    session: int
    ticks: int

    @property
    def is_over(self) -> bool:
        """A zombie holds nothing any more: its parent has not asked for its end."""
        return self.state in ("Z", "X")


def stat(pid: int) -> Stat | None:
    """None when it has ended, or is another account's and hidden; process 0 is none."""
    data = _read(pid, "stat")
    if not data:
        return None
    head, tail = os.fsdecode(data).rsplit(")", 1)  # the name is in brackets, and may itself hold spaces and brackets
    fields = tail.split()
    return Stat(head.split("(", 1)[1], fields[0], *map(int, (*fields[1:4], fields[19])))


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it does not run."""
    found = stat(pid)
    return None if found is None or found.is_over else found.ticks


def start_time(ticks: int) -> float:
    """Unix time of a start tick. By the boot clock, since `btime` in /proc/stat is rounded to a second."""
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_SECOND)


def pids() -> list[int]:
    """All processes, zombies included."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: int) -> list[str]:
    return [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:-1]]


def environment(pid: int) -> bytes:
    """NAME=value, each ended by NUL. Raises PermissionError for another account's process."""
    return _read(pid, "environ")


def control_groups(pid: int) -> str:
    return _read(pid, "cgroup").decode("utf-8", "replace")


def link(pid: int, name: str) -> str | None:
    """Where exe, cwd or fd/1 leads; None for another account's process, or where there is none."""
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return None


def listening(pid: int | str = "self") -> dict[str, int]:
    """Inode -> port of the TCP sockets that listen in the network namespace of a process, whoever holds them."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in _read(pid, f"net/{table}").split(b"\n")[1:]]
    return {row[9].decode(): int(row[1].rsplit(b":", 1)[1], 16) for row in rows if len(row) > 9 and row[3] == LISTEN}


def sockets(pid: int) -> set[str] | None:
    """Inodes of the sockets that a process holds; None when it may not be looked into."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except (FileNotFoundError, ProcessLookupError):
                continue  # closed meanwhile
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except PermissionError:  # some sandboxes list the names of another's files and still hide where they lead
        return None
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return found


def _read(pid: int | str, name: str) -> bytes:
    try:
        return read(f"/proc/{pid}/{name}") or b""
    except ProcessLookupError:  # it ended between the opening and the reading
        return b""
