"""The matrix as a table: step x fault -> outcome."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Sequence

from tests.faults.cell import Result
from tests.faults.cells import FAULTS, JOBS


def outcome(result: Result) -> str:
    """In one line: exit code, what the files were at once, what the next command said, and what they are."""
    if result.problems:
        return "PROBLEM"
    code = "killed" if result.exit is None else str(result.exit)
    files = result.at_once if result.at_once == result.final else f"{result.at_once}, then {result.final}"
    said = "" if result.said == "nothing" else f" ({result.said})"
    return f"{code} {files}{said}"


def rows(results: Iterable[Result], job: str) -> list[list[str]]:
    found: dict[str, dict[str, str]] = {}
    for result in results:
        if result.cell.job == job:
            found.setdefault(result.cell.point, {})[result.cell.fault] = outcome(result)
    return [[point, *(cells.get(fault, "") for fault in FAULTS)] for point, cells in found.items()]


def as_text(results: Sequence[Result]) -> str:
    lines = []
    for job in JOBS:
        table = [["step", *FAULTS], *rows(results, job)]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines += ["", job] + [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
    return "\n".join([*lines, "", summary(results)])


def summary(results: Sequence[Result]) -> str:
    mixed = sum(result.final not in ("old", "new") for result in results)
    wrong = sum(bool(result.problems) for result in results)
    return f"{len(results)} cells, {mixed} mixed states after the next command, {wrong} with a problem"


def as_markdown(results: Sequence[Result]) -> str:
    """The page docs/fault-matrix.md, of a run of the whole matrix just now."""
    at_once = sum(result.at_once == "mixed" for result in results)
    lines = [
        PAGE.strip(),
        "",
        f"Run of {datetime.date.today().isoformat()} on {_machine()}: **{summary(results)}**.",
        f"Right after the fault, before the next command, the files were mixed in {at_once} cells, each with a journal",
        "that said so.",
        "",
    ]
    for job in JOBS:
        lines += [f"## {job[0].upper()}{job[1:]}", ""]
        lines += [_row(["before step", *FAULTS]), _row(["---"] * (len(FAULTS) + 1))]
        lines += [_row(row) for row in rows(results, job)] + [""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _machine() -> str:
    release = ".".join(platform.release().split(".")[:2])
    return f"Linux {release}, {platform.machine()}, {os.cpu_count()} cores, CPython {platform.python_version()}"


PAGE = """
# Fault matrix

What an operator finds when a fault strikes a command in the middle: every job, before every step of its transaction
(`patcher/agent/steps.py`), by every cause. Written by `python -m tests.faults.run --whole --markdown
docs/fault-matrix.md`; not to be edited. `make test-long` runs the same, `make test` a thinned one.

How to read a cell: the exit code of the struck command, the files of the package and RECORD right after it (by the
sha256 and mode of every file), what the next command of any kind did with what it found, as it reported, and the
files then. `3 mixed, then old (undone)`: exit 3, files of both kinds, and the next command undid it. Exit code 8 means
that hands are needed: not every file can be put back until the cause is gone. Steps with a number happen once a file.

- `killed` instead of an exit code: the command line itself was killed, and has none.
- `end:1` is not a step: the reply has been given, and only a power loss can still strike. A blank cell is a combination
  that does not exist.
- New files say nothing about the server. With exit code 3 or `killed`, the agent alone or the next command finished the
  commit, and nobody was left to restart the server: **the old server still runs, with the old files in memory**.
  `verify` says so, and the next `apply` changes no file and restarts it; after a revert, the next `revert` does.

Every cell also checks that the journal told which of the two it would be; that no temporary file, lock, superfluous or
damaged backup, or stale bytecode remains after the next command; and that the exit code is one that the README
promises: 0 only if the request was carried out (the reply names what could not be removed), 4 only with all files old,
8 only with a journal that the next command follows, 3 where nobody was there to answer. ENOSPC, EROFS,
EBUSY and EACCES last until after a first further command, which must not make it worse.

The causes are real, and set up while the agent stands still before the step (`DDTREE_AGENT_STOP_AT`, a SIGSTOP
that it gives itself):

- **SIGKILL**: the agent is killed.
- **channel cut**: the sshd processes between a real sshd and the agent are killed; then the agent goes on.
- **client killed**: the command line is killed; then the agent goes on.
- **ENOSPC**: the installation lies on a tmpfs, which is filled to the last byte.
- **EROFS**: a read-only bind mount over the whole environment.
- **EBUSY**: the next file to be replaced or put back is a mount point.
- **EACCES**: the package's directories have no write bits; the agent runs without the capability to ignore that.
- **changed file**: someone appends a line to `worker.py`, which must never be lost. After exit 8 the printed commands
  are run.
- **power loss**: the installation lies on ext4 in an image file, mounted `data=writeback,noauto_da_alloc,commit=300`;
  the image is copied as it stands, without what the page cache holds, and the copy is mounted in its place. `end` is a
  power loss right after the reply.

ext4 is one real file system with one real order of its writes. It replays its journal in order, so a missing fsync of a
directory may go unseen where a later one makes up for it. It proves nothing about other file systems.
"""
