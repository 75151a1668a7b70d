"""A restart: the phases in which every node of a server ends its process, starts it again and waits until it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from patcher.errors import DdtreePatchError, HostUnreachable, NotReady
from patcher.report.outcome import HostResult
from patcher.rollout.unit import Abandoned, PhaseFailed, Unit
from patcher.server.readiness import ReadyReport, wait_ready
from patcher.server.server import Serving
from patcher.server.services.base import CLOCK_SLACK_S

WATCH_S = 5.0  # between two looks at a node that answers no requests


@dataclass(frozen=True)
class Wanted:
    """What the new server must be.

    Attributes:
        patched: start it with the settings' flags, else as it was before them.
        sampled: wait for the requests above temperature 0, too; False for a server that refuses them.
        identities: of the patch, as its schedulers report it; None for whichever.
        younger_than: unix time on the host that the new process must not be older than; None for now.
    """

    patched: bool
    sampled: bool
    identities: set[str | None] | None
    younger_than: float | None = None


class Restart:
    """The restart of one node. Each method but `mark` is a phase; each raises NotReady."""

    def __init__(self, serving: Serving, wanted: Wanted) -> None:
        self.serving, self.wanted = serving, wanted
        self.service, self.host = serving.service, serving.host
        self.marker: Mapping[str, Any] = {}
        self.since = 0.0
        self.report: ReadyReport | None = None

    @property
    def result(self) -> HostResult:
        return self.serving.result

    def mark(self) -> None:
        """See where the log ends, and since when a process is a new one."""
        with self.serving.naming_log():
            self.marker = self.service.log_marker()
            wanted = self.wanted.younger_than
            self.since = self.service.observe()["now"] if wanted is None else wanted

    def remember(self) -> None:
        with self.serving.naming_log():
            self.service.remember()

    def stop(self) -> None:
        with self.serving.naming_log():
            self.service.stop()

    def start(self) -> None:
        self._act(self.service.start)

    def restart(self) -> None:
        self._act(self.service.restart)

    def _act(self, act: Callable[..., None]) -> None:
        """Start or restart. Some supervisors wait a while, and refuse when the server dies: its log says why."""
        with self.serving.naming_log():
            try:
                act(patched=self.wanted.patched)
            except NotReady as refusal:
                log = self.service.last_log(self.marker)
                raise refusal.but(detail=f"{refusal.detail}\n{log}".strip()) from refusal

    def ready(self, over: threading.Event) -> None:
        """Wait for the head, or see to it that this node's process lives until the head is ready (`over`)."""
        with self.serving.naming_log():
            if self.host.answers:
                self.report = self._wait_ready(over)
            else:
                self._watch(over)

    def _wait_ready(self, over: threading.Event) -> ReadyReport:
        def tell(text: str) -> None:
            self.result.tell(text)
            if over.is_set():
                raise Abandoned

        wanted, suite = self.wanted, self.serving.suite
        report = wait_ready(
            self.service,
            self.serving.client,
            suite.paths if wanted.sampled else (),
            suite.prompts[0],
            deadline_s=self.host.ready.deadline,
            started_after=self.since,
            progress=tell,
            log_marker=self.marker,
        )
        problem = "" if wanted.identities is None else self.serving.identity_problem(wanted.identities)
        if problem:
            raise self._failed(problem, "see which files the server's process has open; it may run another copy")
        return report

    def _watch(self, over: threading.Event) -> None:
        seen: tuple[int, int] | None = None
        while not over.wait(WATCH_S):
            self.result.tell(f"waiting for {self.host.head}, which answers for this server")
            server = self._new()
            process = (server["pid"], server["ticks"]) if server else None
            why = self.service.failure()
            if (seen and process != seen) or (process is None and why):
                what = "the new server process of this node died" + (f": {why}" if why else "")
                raise self._failed(what, "see the last lines of its log below")
            seen = process

    def settle(self) -> ReadyReport:
        """The server is ready. Of a node that answers no requests: its process runs, and is a new one."""
        with self.serving.naming_log():
            report = self.report or self._started()
            self.service.settled()
            return report

    def _new(self) -> dict[str, Any] | None:
        """The running server, if it was started by now."""
        server = self.service.live()
        return server if server and server["start_time"] >= self.since - CLOCK_SLACK_S else None

    def _started(self) -> ReadyReport:
        server = self._new()
        if server is None:
            raise self._failed("the node's server process did not start anew", "see its log")
        return ReadyReport(
            pid=server["pid"], start_time=server["start_time"], seconds=0.0, warmed={}, listener_verified=False
        )

    def answer_greedily(self) -> None:
        """One request at temperature 0. Raises ServerProblem."""
        with self.serving.naming_log():
            self.serving.check_greedy_answer()

    def let_go(self) -> None:
        """This command will not start what it stopped; that must not take the place of the error that there is."""
        with suppress(DdtreePatchError):
            self.service.let_go()

    def _failed(self, what: str, next_step: str) -> NotReady:
        detail = self.service.last_log(self.marker)
        return NotReady(what, where=self.host.name, next_step=next_step, detail=detail)


def restart(unit: Unit[Restart]) -> list[ReadyReport]:
    """Restart the server on all of its nodes; gives when each is ready. Raises PhaseFailed."""
    try:
        unit.each(Restart.mark)
        if unit.alone:
            unit.each(Restart.restart)
        else:
            unit.each(Restart.remember)  # all do, before one stops: the others' processes end with it
            unit.each(Restart.stop)
            unit.each(Restart.start)  # none starts while another's old process could be taken for its peer
        unit.until_one(Restart.ready)
        return unit.each(Restart.settle)
    except PhaseFailed as failure:
        lost = [name for name, error in failure.errors.items() if type(error) is HostUnreachable]
        Unit([node for node in unit.nodes if node.result.host not in lost]).each(Restart.let_go)
        raise


def bring_back(unit: Unit[Restart]) -> list[ReadyReport]:
    """Restart a server that is meant to answer as it did before: what counts is one greedy answer, not sampling.

    Raises PhaseFailed.
    """
    reports = restart(unit)
    unit.each(Restart.answer_greedily)
    return reports
