"""revert: every file as it was before the first apply, and the server as it was then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patcher.commands.node import Node, carry_out, plan_server
from patcher.errors import UnsupportedVersion
from patcher.installation.session import Session
from patcher.installation.transaction import commit, describe
from patcher.plan.make import make_revert_plan
from patcher.rollout.unit import Unit
from patcher.server.client import ServerProblem
from patcher.server.restart import Wanted, bring_back
from patcher.server.server import LEFT_DOWN


@dataclass(frozen=True)
class RevertOptions:
    dry_run: bool = False
    restart: bool = True


class Revert:
    """One revert on one unit. Methods that take a node are phases."""

    def __init__(self, unit: Unit[Session], options: RevertOptions) -> None:
        self.unit = unit.of(Node)
        self.options = options

    def prepare(self) -> None:
        self.unit.each(lambda node: node.session.open())
        self.unit.each(self._plan)
        self.unit.each(lambda node: node.find_server(self.options.restart))
        plan_server(self.unit, self._need, "it runs without the patch")
        for node in self.unit.nodes:
            node.plan_action(node.action)

    def execute(self) -> None:
        """Do it. A server that does not come back is NotReady; the files stay as they were before the apply."""
        if self.options.dry_run:
            self.unit.each(self._say)
        else:
            self.unit.each(self._put_back)
            if all(node.action.acts for node in self.unit.nodes):
                self._restart()
        self.unit.each(Node.leave_out)

    def _plan(self, node: Node) -> None:
        with node.result.step("plan") as step:
            try:
                series = node.session.series()
            except UnsupportedVersion:
                series = None  # the receipt and the backups on the host are enough
            node.plan = make_revert_plan(node.session.for_plan, series)
            step.detail = describe(node.plan)

    def _need(self, node: Node, server: Mapping[str, Any]) -> str:
        """Why a running server has to be restarted; empty when it is a stock server on stock files."""
        if not node.plan.is_noop:
            return "its files change"
        return "" if self._is_stock(node) else "it runs the patch"

    def _is_stock(self, node: Node) -> bool:
        """Whether the server that runs reports no patch, where it can be asked."""
        try:
            return not (node.session.host.answers and node.serving.identity_problem({None}))
        except ServerProblem:
            if node.serving.service.ended() is None:
                raise
            return False  # the one that a command started before it was cut off: nobody knows whether it comes up

    def _say(self, node: Node) -> None:
        node.result.summary = f"dry run, nothing was changed: {describe(node.plan)}; {node.action}"

    def _put_back(self, node: Node) -> None:
        node.refuse_other_server()
        if node.session.stale:
            node.session.target.forget()
            node.result.not_done.append("the receipt was stale (the package was replaced since), and was dropped")
        if node.plan.is_noop:
            node.result.summary = "not patched: nothing to revert"
        else:
            with node.result.step("commit") as step:
                reply = commit(node.session, node.plan, "revert", [])
                step.detail = f"{len(node.plan.changes)} files put back and read back; RECORD {reply.record}"
            node.result.changed = True
            node.result.summary = "reverted: every file is as it was before the first apply"
        if not node.action.acts and not node.action.is_blocked:
            node.serving.service.settled()

    def _restart(self) -> None:
        carry_out(self.unit, self._wanted, "answers, without the patch", bring_back)
        for node in self.unit.nodes:
            if node.action.why == LEFT_DOWN:
                node.result.summary += f"; the server was started again, because {LEFT_DOWN}"

    def _wanted(self, node: Node) -> Wanted:
        return Wanted(patched=False, sampled=False, identities={None}, younger_than=node.session.committed)
