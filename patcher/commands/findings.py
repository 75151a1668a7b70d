"""What the commands find on a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from patcher.moment import local_time
from patcher.plan.plan import Plan
from patcher.plan.server_action import ServerAction
from patcher.plan.states import UNKNOWN, FileState, shown
from patcher.report.findings import Case, Finding, Table
from patcher.report.outcome import FAILED, Step
from patcher.server.kernel import KernelReport
from patcher.server.readiness import ReadyReport
from patcher.smoke.result import SmokeResult
from patcher.wire.types import HistoryLine, Holder, Receipt


@dataclass(frozen=True)
class Planned(Finding):
    plan: Plan

    def as_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.as_dict()}

    def tables(self) -> Sequence[Table]:
        rows = [(action.path, action.kind, _short(action.before), _short(action.after)) for action in self.plan.actions]
        return [Table(("file", "action", "before", "after"), rows, detail=True)]


@dataclass(frozen=True)
class ServerPlanned(Finding):
    """Of a command that changes no file."""

    action: ServerAction

    def as_dict(self) -> dict[str, Any]:
        return {"server": self.action.as_dict()}


@dataclass(frozen=True)
class Differs(Finding):
    """The changes of a plan as one diff; lone surrogates stand for bytes that are no UTF-8."""

    diff: str

    def as_dict(self) -> dict[str, Any]:
        return {"diff": self.diff}

    def raw(self) -> str:
        return self.diff


@dataclass(frozen=True)
class Ready(Finding):
    report: ReadyReport

    def as_dict(self) -> dict[str, Any]:
        return {"ready": self.report.as_dict()}


@dataclass(frozen=True)
class RoundTrips(Finding):
    """Programs started on the host by a command; `before_restart` None where none was."""

    in_all: int
    before_restart: int | None

    def as_dict(self) -> dict[str, Any]:
        before = {} if self.before_restart is None else {"round_trips_before_restart": self.before_restart}
        return {**before, "round_trips": self.in_all}


@dataclass(frozen=True)
class Kernel(Finding):
    report: KernelReport

    def as_dict(self) -> dict[str, Any]:
        return {"kernel": self.report.as_dict()}

    def facts(self) -> Mapping[str, Any]:
        return self.report.facts()


@dataclass(frozen=True)
class Smoked(Finding):
    """`detail`: the checks are no more than a part of the command's work."""

    smoke: SmokeResult
    detail: bool = False

    def as_dict(self) -> dict[str, Any]:
        smoke = self.smoke
        return {
            "suite": smoke.suite,
            "checks": [check.as_dict() for check in smoke.checks],
            "temperatures": [row.as_dict() for row in smoke.rows],
        }

    def tables(self) -> Sequence[Table]:
        rows = [(check.name, _verdict(check.passed, check.skipped), check.detail) for check in self.smoke.checks]
        temperatures = Table.of([row.as_dict() for row in self.smoke.rows], self.detail)
        return [temperatures, Table(("check", "", "detail"), rows, self.detail)]

    def cases(self) -> Sequence[Case]:
        return [Case(check.name, check.passed, check.detail, check.skipped) for check in self.smoke.checks]


@dataclass(frozen=True)
class Service(Finding):
    """As Service.describe gives it."""

    described: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"service": self.described}


@dataclass(frozen=True)
class State(Finding):
    """The files together. `files` None, and `series` empty, where no series is made for the version."""

    state: str
    series: str = ""
    files: Sequence[FileState] | None = None

    def as_dict(self) -> dict[str, Any]:
        if self.files is None:
            return {"state": self.state}
        return {"series": self.series, "state": self.state, "files": [asdict(row) for row in shown(self.files)]}

    def tables(self) -> Sequence[Table]:
        """Files that are unknown, or in another state than most; with detail, all."""
        told = [(file, row.state) for file, row in zip(self.files or (), shown(self.files or ()), strict=True)]
        most = Counter(state for _, state in told).most_common(1)
        usual = {state for state, _ in most} - {UNKNOWN}
        rows = [(state, (file.path, state, _short(file.sha256))) for file, state in told]
        header = ("file", "state", "sha256")
        return [
            Table(header, [row for state, row in rows if state not in usual]),
            Table(header, [row for state, row in rows if state in usual], detail=True),
        ]


@dataclass(frozen=True)
class Received(Finding):
    """What the receipt says, as it stands on the host, and who holds the lock."""

    state: str
    receipt: Receipt | None
    lock: Holder | None

    def as_dict(self) -> dict[str, Any]:
        lock = {"lock": msgspec.to_builtins(self.lock)} if self.lock else {}
        return {"receipt_state": self.state, "receipt": self.receipt.whole if self.receipt else None, **lock}


@dataclass(frozen=True)
class Done(Finding):
    """What was done to an installation, oldest first."""

    lines: Sequence[HistoryLine]

    def as_dict(self) -> dict[str, Any]:
        return {"lines": [_told(line) for line in self.lines]}

    def tables(self) -> Sequence[Table]:
        return [Table.of([_told(line) for line in self.lines])]


@dataclass(frozen=True)
class Looks(Finding):
    """The checks of doctor and verify. What one that failed says is in the error."""

    steps: Sequence[Step]

    def tables(self) -> Sequence[Table]:
        rows = [(step.name, step.state, "" if step.state == FAILED else step.detail) for step in self.steps]
        return [Table(None, rows)]


def _told(line: HistoryLine) -> dict[str, Any]:
    rest = msgspec.to_builtins(line)
    kept = {key: rest[key] for key in ("series", "from", "to", "files", "tool") if key in rest}
    return {"when": local_time(line.time), "what": line.event, "by": line.who, **kept}


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "-"


def _verdict(passed: bool, skipped: bool) -> str:
    return "skipped" if skipped else "pass" if passed else "FAIL"
