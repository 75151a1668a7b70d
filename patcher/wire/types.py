"""What the agent says, as types: of an installation and its files, of what was committed, and of running servers.

Only what this tool relies on is named. What is read from a receipt is what every version of this tool has written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType, field

from patcher.typed import Count, Frozen, Sha256, Time


class FileEntry(Frozen):
    """One installed file. `data`: its bytes; `before_data`: those that the receipt would put back, where the host has
    them; `record_sha256`: what RECORD says; `link`: where a link leads; `links`: how many names the file has."""

    sha256: Sha256 | None
    record_sha256: str | None
    size: Count | None
    link: str | None
    links: Count | None
    data: bytes | None
    before_data: bytes | None


class Change(Frozen):
    """The sha256 of a file before the first apply and after the last one; None where it does not exist."""

    before: Sha256 | None
    after: Sha256 | None


class CommitNote(Frozen):
    """What the host adds to a receipt."""

    commit_time: Time
    id: str | None = None


class Receipt(Frozen):
    """What an apply left behind. `whole` is all of it, as it stands on the host."""

    series: str
    package: str
    version: str
    stage: str
    identity: str
    by: str
    files: dict[str, Change]
    host: CommitNote
    whole: dict[str, Any] = field(default_factory=dict)

    def at_stage(self, name: str) -> Receipt:
        """The same, with the stage called by this name."""
        return msgspec.structs.replace(self, stage=name, whole={**self.whole, "stage": name})


class Holder(Frozen):
    """Who is changing the installation right now. `since`: unix time on the host."""

    pid: Count
    who: str
    host: str
    since: Time
    start_ticks: Count | None = None
    boot_id: str | None = None


class Interpreter(Frozen):
    """`prefix` is the venv's folder, `real_prefix` the same with links resolved."""

    executable: str
    version: str
    prefix: str
    real_prefix: str


class WriteProblem(Frozen):
    """Why a file could not be replaced."""

    path: str
    mount: str
    reason: str


class Inspection(Frozen):
    """One installation as it is now. `interpreter` is None for a tree; `exposed`: folders in which anyone may write."""

    root: str
    version: str
    editable: bool
    state_dir: str
    package_dir: str
    files: dict[str, FileEntry]
    interpreter: Interpreter | None
    receipt: Receipt | None
    receipt_state: Literal["none", "valid", "stale"]
    journal: bool
    lock: Holder | None
    missing_backups: tuple[str, ...]
    free_bytes: Count
    recovered: str
    left: tuple[str, ...]
    exposed: tuple[str, ...]
    writable: WriteProblem | None


class Keeper(Frozen):
    """The program that starts a server again when it ends; `kind` as in service.kind, or `container`."""

    kind: str
    name: str


class Process(Frozen):
    """A launcher of SGLang. `sglang_root`: the source tree that it runs instead of the installed package."""

    pid: Count
    argv: tuple[str, ...]
    exe: str | None
    python: str | None
    prefix: str | None
    real_prefix: str | None
    listening: tuple[Count, ...]
    sglang_root: str | None
    pycache_prefix: str | None
    start_time: Time
    keeper: Keeper | None


class MissingServer(Frozen):
    """A server that this tool stopped and that is not back yet; `python`: the interpreter that it ran with."""

    port: Count
    python: str


class Processes(Frozen):
    processes: tuple[Process, ...]
    missing: tuple[MissingServer, ...]


class Committed(Frozen):
    """`record`: what became of RECORD, in words; `read_back`: the sha256 of each file after the commit."""

    commit_time: Time
    record: str
    read_back: dict[str, Sha256 | None]


class HistoryLine(Frozen, rename={"start": "from", "end": "to"}):
    """`start` and `end` are the stages; a line has only what its command wrote."""

    event: str
    time: Time
    who: str
    series: str | UnsetType | None = UNSET
    start: str | UnsetType | None = UNSET
    end: str | UnsetType | None = UNSET
    files: Count | UnsetType = UNSET
    tool: str | UnsetType = UNSET


class History(Frozen):
    lines: tuple[HistoryLine, ...]


class State(Frozen):
    """What was kept on the host, by name; None for what is not there."""

    values: dict[str, Any]


class Ran(Frozen):
    """A script that ended."""

    rc: int
    stdout: str
    stderr: str


class Done(Frozen):
    """It was done; there is nothing more to say."""


REPLIES: Mapping[str, type[Frozen]] = {
    "processes": Processes,
    "inspect": Inspection,
    "commit": Committed,
    "history": History,
    "state": State,
    "run_python": Ran,
    "forget": Done,
    "recover": Done,
}
