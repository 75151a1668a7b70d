"""What an apply will do: to the files of each host, and to the server; `diff` shows the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patcher.commands.node import Node, plan_server
from patcher.installation.command_line import apply_flags, different_flags
from patcher.installation.session import stage_named
from patcher.installation.transaction import describe
from patcher.plan.make import make_plan
from patcher.plan.server_action import IMPORTS, KERNEL, NO_SERVER, SMOKE, LeftOut, ServerAction
from patcher.report.outcome import WARNING
from patcher.rollout.unit import Unit
from patcher.server.client import ServerProblem


@dataclass(frozen=True)
class ApplyOptions:
    """`up_to`: the stage to stop at, empty for the last one."""

    dry_run: bool = False
    up_to: str = ""
    restart: bool = True
    smoke: bool = True


class ApplyPlan:
    """The plan of one unit, kept in its nodes. `is_noop`: every file is as it should be, on all of them."""

    def __init__(self, unit: Unit[Node], options: ApplyOptions) -> None:
        self.unit, self.options = unit, options
        self.is_noop = False

    def files(self) -> None:
        self.unit.each(self._plan)
        self.is_noop = all(node.plan.is_noop for node in self.unit.nodes)

    def server(self) -> None:
        """Decide on the server; raises Conflict where a restart would be of another one than is meant."""
        self.unit.each(lambda node: node.find_server(self.options.restart))
        plan_server(self.unit, self._need, "it runs the patched files")
        for node in self.unit.nodes:
            node.plan_action(self._followed(node))

    def _plan(self, node: Node) -> None:
        session = node.session
        with node.result.step("plan") as step:
            series = session.series()
            stage = stage_named(series, self.options.up_to)
            node.plan = make_plan(series, stage, session.for_plan)
            # The last stage is what the series is for; those before it are steps on the way, which refuse to sample.
            node.patched, node.sampled = True, stage == series.stages[-1].name
            step.detail = f"series {series.name}: {describe(node.plan)}"
            if session.stale:
                step.state = WARNING
                step.detail += "; the receipt on the host is stale (the package was replaced) and is dropped"

    def _need(self, node: Node, server: Mapping[str, Any]) -> str:
        """Why a running server has to be restarted; empty when it runs what is installed, and as it should."""
        if not self.is_noop:
            return "its files change" if node.plan.changes else "" if node.plan.is_noop else "its files get a receipt"
        session, receipt = node.session, node.session.receipt
        if receipt and server["start_time"] < receipt.host.commit_time:
            return "it was older than the patched files"
        argv, flags = server["argv"], session.host.service.args
        if list(argv) != apply_flags(argv, flags):
            wanted = shlex.join(apply_flags([], flags))
            return f"its command line had not {wanted}" if wanted else "it has a flag that service.args takes off"
        others = different_flags(argv, node.serving.service.line_for(server))
        if others:
            return f"service.args no longer make its {', '.join(others)}"
        if not session.host.answers:
            return ""
        try:
            return node.serving.identity_problem({node.plan.identity})
        except ServerProblem as problem:
            return f"it did not answer: {problem.what}"

    def _followed(self, node: Node) -> ServerAction:
        """The action with what is checked of this apply, and what is not."""
        action, left_out = node.action, []
        checks = [] if self.is_noop else [IMPORTS]
        if not self.is_noop and not node.why_not:
            checks.insert(0, KERNEL)
        elif not self.is_noop:
            left_out.append(LeftOut(KERNEL, node.why_not))
        if IMPORTS in checks and node.session.target.is_tree:
            checks.remove(IMPORTS)
            left_out.append(LeftOut(IMPORTS, "a tree of files has no interpreter"))
        if action.acts and self.options.smoke:
            checks.append(SMOKE)
        else:
            left_out.append(LeftOut(SMOKE, self._why_no_smoke(action)))
        if action.acts:
            left_out += [LeftOut("restart of another server", line) for line in node.serving.others()]
        return action.followed_by(checks, left_out)

    def _why_no_smoke(self, action: ServerAction) -> str:
        if action.acts:
            return "--no-smoke was given"
        if action.why == NO_SERVER:
            return f"{NO_SERVER}; start it, then run ddtree-patch verify"
        return action.why if action.is_blocked else "nothing was changed; ddtree-patch smoke-test runs it"
