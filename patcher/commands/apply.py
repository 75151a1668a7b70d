"""apply: patch, restart, wait until ready, check, and keep it; or put everything back."""

from __future__ import annotations

from patcher.commands.apply_plan import ApplyOptions, ApplyPlan
from patcher.commands.findings import Smoked
from patcher.commands.kernel_gate import check_kernel
from patcher.commands.node import Node, carry_out
from patcher.commands.rollback import ServerBefore, bring_back_line, leaves_host_alone, roll_back, take_back
from patcher.errors import DdtreePatchError, Interrupted, RolledBack
from patcher.installation.session import Session
from patcher.installation.transaction import commit, describe, importable
from patcher.plan.server_action import IMPORTS, KERNEL, SMOKE
from patcher.report.outcome import SKIPPED, WARNING
from patcher.rollout.unit import PhaseFailed, Unit
from patcher.server.client import ServerProblem
from patcher.server.restart import Wanted, restart


class Apply:
    """One apply on one unit. Methods that take a node are phases: the unit runs them on all of its hosts at once."""

    def __init__(self, unit: Unit[Session], options: ApplyOptions) -> None:
        self.unit = unit.of(Node)
        self.options = options
        self.plan = ApplyPlan(self.unit, options)

    def prepare(self) -> None:
        """Find, read and plan; raises what stands in the way of a commit. Nothing is changed."""
        self.unit.each(lambda node: node.session.open())
        self.plan.files()
        self.plan.server()

    def execute(self) -> None:
        """Do it. Raises PhaseFailed with what failed, after everything was put back; RollbackFailed if it was not."""
        try:
            if self.options.dry_run:
                self.unit.each(self._say)
            elif self.plan.is_noop:
                self._restart_alone()
            else:
                self._change()
        except PhaseFailed as failure:
            raise failure.each(self._as_it_stands) from failure
        finally:
            for node in self.unit.nodes:
                node.count_trips()
        self.unit.each(Node.leave_out)

    def _say(self, node: Node) -> None:
        node.result.summary = f"dry run, nothing was changed: {describe(node.plan)}; {node.action}"

    # ---- files in place already ---------------------------------------------------------------------------------

    def _restart_alone(self) -> None:
        """Restart a server whose files are right already; if that fails, start it with the command line it had."""
        self.unit.each(self._files_are_there)
        if not self._acts:
            return
        try:
            self._start_and_check()
        except PhaseFailed as failure:
            never_ran = any(node.action.line is None for node in self.unit.nodes)
            if never_ran or any(map(leaves_host_alone, failure.errors.values())):
                raise
            bring_back_line(self.unit, failure)
            for node in self.unit.nodes:
                node.result.summary += "; the server could not be restarted as wanted, and runs as it did before"
            raise failure.each(lambda _, error: RolledBack(error, "the server runs again as before")) from failure
        for node in self.unit.nodes:
            node.result.summary += f"; the server was restarted, because {node.action.why}"

    def _files_are_there(self, node: Node) -> None:
        node.result.summary = f"already at stage {node.plan.stage_to}: nothing to change"
        if node.session.stale:
            node.session.target.forget()
        if node.action.acts:
            node.refuse_other_server()
        elif not node.action.is_blocked:
            node.serving.service.settled()  # an apply that was cut short may have left it unchecked

    # ---- the change ---------------------------------------------------------------------------------------------

    def _change(self) -> None:
        self.unit.each(self._gate)
        before = self.unit.each(self._server_before)
        self.unit.each(self._what_imports)
        self.unit.each(self._commit, undo=take_back)  # on all nodes of a server, or on none
        if not self._acts:
            return
        try:
            self._start_and_check()
        except PhaseFailed as failure:
            if any(map(leaves_host_alone, failure.errors.values())):
                raise
            roll_back(self.unit, before, failure)
            for node in self.unit.nodes:
                node.result.summary = "rolled back: the files and the server are as before"
            raise failure.each(lambda _, error: RolledBack(error, "everything was rolled back")) from failure

    def _gate(self, node: Node) -> None:
        """Before anything is written: the patch does not touch the kernel, so what is found now holds afterwards."""
        if KERNEL in node.action.checks:
            check_kernel(node.session, stage=node.plan.stage_to, sampled=node.sampled)

    def _server_before(self, node: Node) -> ServerBefore:
        """The server as it is now; its greedy outputs are kept, unless they were before an earlier apply."""
        process, patched = node.action.before, node.session.receipt is not None
        running = node.action.line is not None
        if process is None or not node.action.acts or not node.session.host.answers:
            return ServerBefore(process, running, patched, None)
        with node.result.step("record the outputs at temperature 0") as step:
            serving = node.serving
            try:
                identities = serving.identities()
                if not patched:
                    serving.record_baseline()
                    step.detail = f"{len(serving.suite.prompts)} prompts of suite {serving.suite.name}"
                else:
                    step.detail = "kept from before the first apply"
            except ServerProblem as problem:
                step.state, step.detail = WARNING, f"the server does not answer: {problem.what}"
                return ServerBefore(process, running, patched, None)
        return ServerBefore(process, running, patched, identities)

    def _what_imports(self, node: Node) -> None:
        """What imports now has to import after the commit, too."""
        node.imports = []
        if IMPORTS not in node.action.checks:
            return
        with node.result.step(IMPORTS) as step:
            node.imports, why_not = importable(node.session, node.plan)
            step.detail = why_not or f"the commit is held to {len(node.imports)} modules"
        if why_not:
            node.result.not_done.append(f"{IMPORTS}: {why_not}")

    def _commit(self, node: Node) -> None:
        node.refuse_other_server()
        if not node.plan.is_noop:
            with node.result.step("commit") as step:
                reply = commit(node.session, node.plan, "apply", node.imports)
                step.detail = f"{len(node.plan.changes)} files written and read back; RECORD {reply.record}"
            node.result.changed = True
        series = node.plan.series.name if node.plan.series else ""
        node.result.summary = f"series {series} applied up to stage {node.plan.stage_to}: {describe(node.plan)}"

    # ---- both ---------------------------------------------------------------------------------------------------

    @property
    def _acts(self) -> bool:
        """Whether the server is restarted: on all nodes, or on none."""
        return all(node.action.acts for node in self.unit.nodes)

    def _start_and_check(self) -> None:
        reports = carry_out(self.unit, self._wanted, "serves the patched files", restart)
        for node, report in zip(self.unit.nodes, reports, strict=True):
            node.started = report.start_time
        self.unit.each(self._smoke)

    def _wanted(self, node: Node) -> Wanted:
        return Wanted(True, node.sampled, {node.plan.identity}, node.session.committed)

    def _smoke(self, node: Node) -> None:
        if SMOKE not in node.action.checks:
            return
        with node.result.step(SMOKE) as step:
            if not node.session.host.answers:
                step.state, step.detail = SKIPPED, f"{node.session.host.head} answers for this server"
                return
            unused = node.serving.without_tree()
            if unused:
                node.result.not_done.append(unused)
            smoke = node.serving.smoke(sampled=node.sampled, identity=node.plan.identity, started_after=node.started)
            node.result.keep(Smoked(smoke, detail=True))
            node.serving.refuse(smoke)
            step.detail = f"{node.serving.suite.name}: all checks passed"

    def _as_it_stands(self, name: str, error: DdtreePatchError) -> DdtreePatchError:
        """The error of a failure that ends the command where it is, with what that means for the host."""
        if not leaves_host_alone(error):
            return error
        if not isinstance(error, Interrupted):
            then = "ddtree-patch status says where it stands: apply again, or revert"
            return error.but(next_step=f"{error.next_step}; {then}")
        node = next(node for node in self.unit.nodes if node.result.host == name)
        untouched = node.plan.changes and node.session.committed is None
        return error.but(
            what=f"{error.what}: nothing was changed" if untouched else error.what,
            next_step="ddtree-patch status says where it stands; apply again, or revert",
        )
