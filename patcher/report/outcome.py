"""What a command did: one HostResult a host, one Outcome a command. Plain data, no printing (see report.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from patcher import __version__
from patcher.errors import DdtreePatchError, Interrupted, MixedOutcome, NotTouched
from patcher.report.findings import Finding

DONE, FAILED, WARNING, SKIPPED = "done", "failed", "warning", "skipped"


@dataclass
class Step:
    """One thing that was done or looked at. `seconds` is its wall time."""

    name: str
    state: str = DONE
    detail: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "detail": self.detail, "seconds": round(self.seconds, 3)}


@dataclass
class HostResult:
    """The result on one host.

    `found` is what the command found, one of each type; `not_done` says in words which assurances this run does not
    give; `changed` is whether a file of the installation is different from before; `doing` names the step that it is
    at.
    """

    host: str
    summary: str = ""
    changed: bool = False
    steps: list[Step] = field(default_factory=list)
    not_done: list[str] = field(default_factory=list)
    found: dict[type[Finding], Finding] = field(default_factory=dict)
    error: DdtreePatchError | None = None
    tell: Callable[[str], None] = field(default=lambda text: None, repr=False)
    doing: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    def keep(self, finding: Finding) -> None:
        """Keep what was found, in place of an earlier one of its type."""
        self.found[type(finding)] = finding

    @property
    def findings(self) -> list[Finding]:
        return list(self.found.values())

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of all findings."""
        return {name: value for finding in self.findings for name, value in finding.facts().items()}

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Announce, time and record a step; an exception marks it failed and goes on its way."""
        step = Step(name)
        self.tell(name)
        outer, self.doing = self.doing, name
        started = time.monotonic()
        try:
            yield step
        except BaseException as error:
            step.state = FAILED
            step.detail = error.what if isinstance(error, DdtreePatchError) else str(error)
            raise
        finally:
            step.seconds = time.monotonic() - started
            self.steps.append(step)
            self.doing = outer

    def skip(self, name: str, why: str) -> None:
        """Record a step that was left out, and tell the reader that its assurance is missing."""
        self.steps.append(Step(name, SKIPPED, why))
        self.not_done.append(f"{name}: {why}")

    def as_dict(self) -> dict[str, Any]:
        facts = self.facts
        found = {key: value for finding in self.findings for key, value in finding.as_dict().items()}
        return {
            "host": self.host,
            "ok": self.ok,
            "summary": self.summary,
            "changed": self.changed,
            "steps": [step.as_dict() for step in self.steps],
            "not_done": list(self.not_done),
            "error": self.error.as_dict() if self.error else None,
            **({"facts": facts} if facts else {}),
            **found,
        }


@dataclass(frozen=True)
class Outcome:
    """The result of a command over its hosts. `findings` are what belongs to no host (the catalogue, for `list`).

    `stopped`: the operator interrupted it, whatever became of the hosts.
    """

    command: str
    hosts: tuple[HostResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    stopped: bool = False

    @property
    def error(self) -> DdtreePatchError | None:
        """The failure that the exit code stands for: an interrupt, the hosts' common one, or MixedOutcome."""
        errors = [host.error for host in self.hosts if host.error]
        for error in errors:
            if isinstance(error, Interrupted) and not (self.stopped and len(self.hosts) > 1):
                return error
        if self.stopped:
            ended = sum(host.error is None or host.error.exit_code != Interrupted.exit_code for host in self.hosts)
            return Interrupted(
                f"stopped by the operator; {ended} of {len(self.hosts)} hosts had come to their end",
                where=self.command,
                next_step="see each host's own result; ddtree-patch status says where a host stands",
            )
        if not errors:
            return None
        if len(errors) == len(self.hosts) and len({error.exit_code for error in errors}) == 1:
            return errors[0]
        left = [host.host for host in self.hosts if isinstance(host.error, NotTouched)]
        failed = [
            f"{host.host} (exit code {host.error.exit_code})"
            for host in self.hosts
            if host.error and not isinstance(host.error, NotTouched)
        ]
        return MixedOutcome(
            f"{len(failed)} of {len(self.hosts)} hosts failed: {', '.join(failed)}"
            + (f"; not touched: {', '.join(left)}" if left else ""),
            where=self.command,
            next_step="see each host's own result",
        )

    def as_dict(self) -> dict[str, Any]:
        error = self.error
        return {
            "ok": error is None,
            "command": self.command,
            "tool": __version__,
            "exit_code": error.exit_code if error else 0,
            **{key: value for finding in self.findings for key, value in finding.as_dict().items()},
            "hosts": [host.as_dict() for host in self.hosts],
            "error": error.as_dict() if error else None,
        }
