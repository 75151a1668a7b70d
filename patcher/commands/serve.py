"""The commands about the server alone: restart and smoke-test."""

from __future__ import annotations

from dataclasses import replace

from patcher.commands.findings import ServerPlanned, Smoked
from patcher.commands.node import Node, carry_out
from patcher.errors import NotReady, UsageProblem
from patcher.installation.session import Session
from patcher.plan.server_action import decide
from patcher.rollout.unit import Unit
from patcher.server.restart import Wanted, restart
from patcher.server.server import Serving
from patcher.smoke.suite import Suite


class Restart:
    """Restart the server, patched or stock as its files are, and wait until it is ready."""

    def __init__(self, unit: Unit[Session]) -> None:
        self.unit = unit.of(Node)

    def prepare(self) -> None:
        self.unit.each(lambda node: node.session.open())
        self.unit.each(self._find)
        found = self.unit.each(lambda node: node.look(lambda *server: ""))
        asked = [replace(one, why_not="", need="this command restarts it") for one in found]
        for node, action in zip(self.unit.nodes, decide(asked, [node.flags for node in self.unit.nodes]), strict=True):
            node.action = action
            node.result.keep(ServerPlanned(action))

    def execute(self) -> None:
        self.unit.each(Node.refuse_other_server)
        reports = carry_out(self.unit, self._wanted, "serves", restart)
        for node, report in zip(self.unit.nodes, reports, strict=True):
            node.result.summary = f"restarted: process {report.pid} is ready after {report.seconds:.0f} s"

    def _find(self, node: Node) -> None:
        node.patched = node.session.receipt is not None
        node.find_server()
        if node.why_not:
            raise UsageProblem(
                f"there is nothing to restart: {node.why_not}",
                where=node.result.host,
                next_step="give a venv, and a service in hosts.toml",
            )

    def _wanted(self, node: Node) -> Wanted:
        receipt = node.session.receipt
        return Wanted(node.patched, node.session.samples, {receipt.identity if receipt else None})


class SmokeTest:
    """Run the smoke suite against the server that is running, whatever it is."""

    def __init__(self, session: Session, suite: Suite | None) -> None:
        self.session = session
        self.suite = suite

    def prepare(self) -> None:
        self.session.open()
        self.serving = Serving(self.session, self.suite)
        if not self.session.host.answers:
            return
        if self.session.target.is_tree:
            raise UsageProblem(
                "a tree of files has no server to try",
                where=self.session.host.name,
                next_step="give a venv instead of --site-packages",
            )
        if not self.serving.answers():
            raise NotReady(
                f"no server answers at {self.serving.client.where}",
                where=self.session.host.name,
                next_step="start it, or correct [endpoint] in hosts.toml",
            )

    def execute(self) -> None:
        receipt, result = self.session.receipt, self.session.result
        if not self.session.host.answers:
            result.skip("smoke suite", f"{self.session.host.head} answers for this server")
            return
        with result.step("smoke suite"):
            smoke = self.serving.smoke(
                sampled=self.session.samples,
                identity=receipt.identity if receipt else None,
                started_after=receipt.host.commit_time if receipt else None,
            )
            result.keep(Smoked(smoke))
            self.serving.refuse(smoke)
        if not self.serving.why_not:
            self.serving.service.settled()
        result.summary = f"suite {self.serving.suite.name}: all checks passed"
