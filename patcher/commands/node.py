"""One host of a unit while a command changes it: what was found there, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from patcher.commands.findings import Planned, Ready, RoundTrips
from patcher.errors import Conflict
from patcher.installation.command_line import apply_flags
from patcher.installation.find import redacted
from patcher.installation.session import Session
from patcher.plan.plan import Plan
from patcher.plan.server_action import NO_SERVER, ServerAction, ServerFound, decide
from patcher.report.outcome import HostResult
from patcher.rollout.unit import Unit
from patcher.server.readiness import ReadyReport
from patcher.server.restart import Restart, Wanted
from patcher.server.server import LEFT_DOWN, Serving

Need = Callable[["Node", Mapping[str, Any]], str]


class Node:
    """Filled by the command's phases, in this order: `plan`, `serving` and `why_not`, `action`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.plan: Plan
        self.patched = self.sampled = False  # whether the server runs the patch after this command, and samples
        self.serving: Serving
        self.why_not = ""  # why the server is not restarted, whatever is found of it
        self.action: ServerAction
        self.imports: list[str] = []
        self._trips: int | None = None  # before the first restart
        self.started = 0.0  # when the server's new process was, by the host's clock

    @property
    def result(self) -> HostResult:
        return self.session.result

    @property
    def flags(self) -> list[str]:
        """What a new server gets of service.args."""
        return redacted(apply_flags([], self.session.host.service.args)) if self.patched else []

    def find_server(self, restart: bool = True) -> None:
        """Raises Conflict where a restart would be of another server than is meant."""
        self.serving = Serving(self.session)
        self.why_not = self.serving.why_not or ("" if restart else "--no-restart was given")
        if not self.why_not:
            self.serving.refuse_wrong_server()

    def look(self, need: Need) -> ServerFound:
        """The server as it is."""
        if self.why_not:
            return ServerFound(why_not=self.why_not)
        with self.result.step("look at the server"):
            server, known = self.serving.look()
            line = tuple(known["argv"]) if known else None
            if server:
                return ServerFound(process_of(server), line, need=need(self, server))
        if known:
            return ServerFound(line=line, need=LEFT_DOWN)
        starts = self.serving.service.starts_stopped
        return ServerFound(need=NO_SERVER) if starts else ServerFound(why_not=NO_SERVER)

    def plan_action(self, action: ServerAction) -> None:
        """This is what happens to the server; a part of the plan."""
        self.action = action
        self.plan = replace(self.plan, server=action)
        self.result.keep(Planned(self.plan))

    def refuse_other_server(self) -> None:
        """Raise Conflict when the server is another than the one that the plan was made for."""
        if not self.action.acts:
            return
        server = self.serving.service.live()
        found = process_of(server) if server else None
        if found != self.action.before:
            before = self.action.before
            raise Conflict(
                f"the server is not the one of the plan: {_named(before)} then, {_named(found)} now",
                where=self.session.host.name,
                next_step="run the command again: it goes by the server that runs then",
            )

    def leave_out(self) -> None:
        """Say what this command does not do."""
        reasons = dict.fromkeys(left.why for left in self.action.left_out)
        for why in reasons:
            self.result.skip(", ".join(left.name for left in self.action.left_out if left.why == why), why)

    def restarting(self, wanted: Wanted) -> Restart:
        if self._trips is None:
            self._trips = self.session.connection.round_trips
        return Restart(self.serving, wanted)

    def count_trips(self) -> None:
        """Keep how many programs were started on the host."""
        self.result.keep(RoundTrips(self.session.connection.round_trips, self._trips))


def plan_server(unit: Unit[Node], need: Need, settled: str) -> None:
    """Decide what happens to the server of a unit: `action` of each node, which has `patched`.

    `need`: why one that runs has to be restarted, empty when it does not; `settled`: what is said of it then.
    """
    found = unit.each(lambda node: node.look(need))
    for node, action in zip(unit.nodes, decide(found, [node.flags for node in unit.nodes], settled), strict=True):
        node.action = action


def carry_out(
    unit: Unit[Node], wanted: Callable[[Node], Wanted], says: str, how: Callable[[Unit[Restart]], list[ReadyReport]]
) -> list[ReadyReport]:
    """Do what was decided: start or restart the server on all nodes; gives when each is ready. Raises PhaseFailed.

    `how`: restart, or bring_back where the server is meant to answer as before; `says`: what the process does then.
    """
    with unit.step("restart and wait until ready") as steps:
        reports = how(unit.of(lambda node: node.restarting(wanted(node))))
        for node, step, report in zip(unit.nodes, steps, reports, strict=True):
            node.result.keep(Ready(report))
            step.detail = f"process {report.pid} {says}"
    return reports


def process_of(server: Mapping[str, Any]) -> tuple[int, int]:
    """Its id and start tick."""
    return server["pid"], server["ticks"]


def _named(process: tuple[int, int] | None) -> str:
    return f"process {process[0]}" if process else "none"
