"""The cells of the matrix: which job is struck, before which step, by what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from patcher.agent.steps import STEPS, UNDO, UNDONE

LOCK, UNLOCK = STEPS[0], STEPS[-1]
DECIDED = STEPS[STEPS.index("decide") + 1 :]  # from here on, what was begun is finished
END = "end"  # after the reply; for power loss only: what was reported as done must be on disk
FAULTS = ("SIGKILL", "channel cut", "client killed", "ENOSPC", "EROFS", "EBUSY", "EACCES", "changed file", "power loss")


@dataclass(frozen=True)
class Job:
    """start: the prepared installation. argv: the command. stages: of the files before and after.

    steps: which it passes, in order; times: how often those that happen once a file. commits: whether it asks for a
    commit, or finds one to recover.
    """

    start: str
    argv: tuple[str, ...]
    stages: tuple[str, str]
    steps: tuple[str, ...]
    times: dict[str, int]
    commits: bool = True

    def points(self) -> list[str]:
        return [f"{step}:{n}" for step in self.steps for n in range(1, self.times.get(step, 1) + 1)]


# The small series: apply changes four files (one is new), the upgrade two; RECORD is written and put back too.
JOBS = {
    "apply": Job("pristine", ("apply", "--no-restart"), ("pristine", "temperature"), STEPS, {"write": 5, "rename": 4}),
    "upgrade": Job("ddtree", ("apply", "--no-restart"), ("ddtree", "temperature"), STEPS, {"write": 3, "rename": 2}),
    "revert": Job(
        "temperature", ("revert", "--no-restart"), ("temperature", "pristine"), STEPS, {"write": 5, "rename": 4}
    ),
    # Any command recovers first. These begin where an apply was killed before and after its decision.
    "recover, undoing": Job(
        "half", ("status",), ("pristine", "temperature"), (LOCK, UNDO, UNDONE, UNLOCK), {UNDO: 5}, commits=False
    ),
    "recover, finishing": Job("decided", ("status",), ("pristine", "temperature"), (LOCK, *DECIDED), {}, commits=False),
}
KILLED_AT = {"half": "import", "decided": "receipt"}  # how the two starts of recover are made


@dataclass(frozen=True)
class Cell:
    job: str
    point: str
    fault: str

    def __str__(self) -> str:
        return f"{self.job} / {self.point} / {self.fault}"


def whole() -> list[Cell]:
    cells = [Cell(job, point, fault) for job in JOBS for point in JOBS[job].points() for fault in FAULTS]
    return cells + [Cell(job, f"{END}:1", "power loss") for job in JOBS]


def thin() -> list[Cell]:
    """Every step once with SIGKILL, every fault where files take their places."""
    once = {f"{step}:1" for step in (*STEPS, UNDO, UNDONE)}
    places = {("apply", "rename:3"), ("upgrade", "rename:2"), ("revert", "record:1"), ("recover, undoing", f"{UNDO}:3")}
    killed_in = ("apply", "recover, undoing")
    return [
        cell
        for cell in whole()
        if (cell.fault == "SIGKILL" and cell.job in killed_in and cell.point in once)
        or (cell.job, cell.point) in places
    ]


def uncovered(cells: Iterable[Cell]) -> set[tuple[str, str]]:
    """(step, fault) that no cell has."""
    covered = {(cell.point.partition(":")[0], cell.fault) for cell in cells}
    return {(step, fault) for step in (*STEPS, UNDO, UNDONE) for fault in FAULTS} - covered
