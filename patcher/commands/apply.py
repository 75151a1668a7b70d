"""apply: patch, restart, wait until ready, check, and keep it; or put everything back."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patcher.commands.kernel_gate import check_kernel
from patcher.commands.rollback import ServerBefore, bring_back, roll_back, take_back
from patcher.errors import DdtreePatchError, HostUnreachable, Interrupted
from patcher.installation.command_line import apply_flags, different_flags
from patcher.installation.session import Session, stage_named
from patcher.installation.transaction import commit, describe, importable
from patcher.plan.plan import make_plan
from patcher.report.outcome import SKIPPED, WARNING
from patcher.server.client import ServerProblem
from patcher.server.server import LEFT_DOWN, Serving
from patcher.team import NodeFailed


@dataclass(frozen=True)
class ApplyOptions:
    """`up_to`: the stage to stop at, empty for the last one."""

    dry_run: bool = False
    up_to: str = ""
    restart: bool = True
    smoke: bool = True


class Apply:
    """One apply on one host."""

    def __init__(self, session: Session, options: ApplyOptions) -> None:
        self.session = session
        self.result = session.result
        self.options = options
        self.commit_time: float | None = None

    def prepare(self) -> None:
        """Find, read and plan; raises what stands in the way of a commit. Nothing is changed."""
        self.session.open()
        with self.result.step("plan") as step:
            self.series = self.session.series()
            self.stage = stage_named(self.series, self.options.up_to)
            self.plan = make_plan(self.series, self.stage, self.session.for_plan)
            step.detail = f"series {self.series.name}: {describe(self.plan)}"
            if self.session.stale:
                step.state = WARNING
                step.detail += "; the receipt on the host is stale (the package was replaced) and is dropped"
        self.result.data["plan"] = self.plan.as_dict()
        self.serving = Serving(self.session)
        if self.options.restart and not self.serving.why_not:
            self.serving.refuse_wrong_server()

    @property
    def sampled(self) -> bool:
        """Whether the server samples after this apply: the last stage is what the series is for, those before it are
        steps on the way, which refuse a temperature above 0."""
        return self.stage == self.series.stages[-1].name

    def execute(self) -> None:
        """Do it. Raises the typed error of what failed, after everything was put back; RollbackFailed if it was not."""
        if self.options.dry_run:
            self.result.summary = f"dry run, nothing was changed: {describe(self.plan)}{self._would_restart()}"
            return
        try:
            if all(self.session.node.share(self.plan.is_noop).values()):
                self._already()
            else:
                self._change()
        except DdtreePatchError as error:
            if not _leaves_host_alone(error):
                raise
            if isinstance(error, Interrupted):
                if self.plan.changes and self.session.committed is None:
                    error.what += ": nothing was changed"
                error.next_step = "ddtree-patch status says where it stands; apply again, or revert"
            else:
                error.next_step += "; ddtree-patch status says where it stands: apply again, or revert"
            raise
        finally:
            self.result.data["round_trips"] = self.session.connection.round_trips

    # ---- files in place already -------------------------------------------------------------------------------

    def _already(self) -> None:
        self.result.summary = f"already at stage {self.stage}: nothing to change"
        if self.session.stale:
            self.session.target.forget()
        if not self._restarts("restart"):
            return
        with self.result.step("look at the running server") as step:
            server, before = self.serving.look()
            why = self._why_restart(server) if server else LEFT_DOWN if before else "no server is running"
            step.detail = why or (f"process {server['pid']} runs the patched files" if server else "")
        found = self.session.node.share((before is None and not self.serving.service.starts_stopped, why)).values()
        if any(absent for absent, _ in found):
            self.result.skip("restart", "no server is running; ddtree-patch restart starts the one that was there last")
        elif any(reason for _, reason in found):
            self._restart_only(before)
            self.result.summary += f"; the server was restarted, because {why or 'another node needs it'}"
        else:  # an apply that was cut short may have left it unchecked
            self.serving.service.settled()
            self.result.not_done.append("smoke suite: nothing was changed; ddtree-patch smoke-test runs it")

    def _would_restart(self) -> str:
        """What an apply would do to the server, for a dry run."""
        if self.serving.why_not or not self.options.restart:
            return ""
        server, before = self.serving.look()
        flags = shlex.join(apply_flags([], self.session.host.service.args))
        if server is None:
            with_flags = f" with {flags}" if flags else ""
            would = f"; the server would be started{with_flags}, because {LEFT_DOWN}"
            return would if before else "; no server is running"
        why = "its files change" if self.plan.changes else self._why_restart(server)
        with_flags = f" with {flags}" if flags and why else ""
        return f"; process {server['pid']} would be restarted{with_flags}, because {why}" if why else "; no restart"

    def _restart_only(self, before: Mapping[str, Any] | None) -> None:
        """Restart a server whose files are right already; if that fails, start it with the command line it had."""
        try:
            self._start_and_check()
        except Exception as failure:
            ran = not _leaves_host_alone(failure) and all(self.session.node.share(before is not None).values())
            if before is None or not ran:
                raise
            bring_back(self.session, self.serving, before, self.series.identity(self.stage), failure)
            self.result.summary += "; the server could not be restarted as wanted, and runs as it did before"
            if isinstance(failure, DdtreePatchError):
                failure.next_step = f"the server runs again as before; {failure.next_step}"
            raise

    def _why_restart(self, server: Mapping[str, Any]) -> str:
        """Why a running server does not run what is installed; empty when it does."""
        receipt = self.session.receipt
        if receipt and server["start_time"] < receipt.host.commit_time:
            return "it was older than the patched files"
        argv, flags = server["argv"], self.session.host.service.args
        if list(argv) != apply_flags(argv, flags):
            wanted = shlex.join(apply_flags([], flags))
            return f"its command line had not {wanted}" if wanted else "it has a flag that service.args takes off"
        others = different_flags(argv, self.serving.service.line_for(server))
        if others:
            return f"service.args no longer make its {', '.join(others)}"
        if not self.session.host.answers:
            return ""
        try:
            return self.serving.identity_problem({self.series.identity(self.stage)})
        except ServerProblem as problem:
            return f"it did not answer: {problem.what}"

    # ---- the change -------------------------------------------------------------------------------------------

    def _change(self) -> None:
        restarts = self._restarts("restart", "kernel probe", "smoke suite")
        if restarts:
            # Before anything is written: the patch does not touch the kernel, so what is found now holds afterwards.
            check_kernel(self.session, stage=self.stage, sampled=self.sampled)
        before = self._before(restarts)
        with self.result.step("import check") as step:  # what imports now has to import after the commit, too
            imports, why_not = importable(self.session, self.plan)
            step.detail = why_not or f"the commit is held to {len(imports)} modules"
        if why_not:
            self.result.not_done.append(f"import check: {why_not}")
        absent = restarts and not before.running and not self.serving.service.starts_stopped
        # Every node of a server is checked before a file of any is written.
        nodes = self.session.node.share((restarts, absent)).values()
        self._commit(imports)
        if not all(restarted for restarted, _ in nodes):
            return
        self.result.not_done += [f"restart of another server: {line}" for line in self.serving.others()]
        if any(missing for _, missing in nodes):
            self.result.skip("restart, smoke suite", "no server is running; start it, then run ddtree-patch verify")
            return
        try:
            self._start_and_check()
        except Exception as failure:
            if _leaves_host_alone(failure):
                raise
            roll_back(self.session, self.serving, self.plan, before, failure)
            self.result.summary = "rolled back: the files and the server are as before"
            if isinstance(failure, DdtreePatchError):
                failure.next_step = f"everything was rolled back; {failure.next_step}"
            raise

    def _commit(self, imports: Sequence[str]) -> None:
        """Write the plan; on all nodes of a server, or on none."""
        try:
            with self.session.node.together():
                if not self.plan.is_noop:
                    self._write(imports)
        except NodeFailed as failure:
            if self.result.changed:
                take_back(self.session, self.plan, failure)
            self.result.summary = "rolled back: the files are as before, because those of another node are"
            raise
        self.result.summary = f"series {self.series.name} applied up to stage {self.stage}: {describe(self.plan)}"

    def _write(self, imports: Sequence[str]) -> None:
        with self.result.step("commit") as step:
            reply = commit(self.session, self.plan, "apply", imports)
            self.commit_time = reply.commit_time
            step.detail = f"{len(self.plan.changes)} files written and read back; RECORD {reply.record}"
        self.result.changed = True

    def _before(self, restarts: bool) -> ServerBefore:
        """The server as it is now; its greedy outputs are kept, unless they were before an earlier apply."""
        patched = self.session.receipt is not None
        server, meant = self.serving.look() if restarts else (None, None)
        if server is None:
            return ServerBefore(None, meant is not None, patched, None)
        process = (server["pid"], server["ticks"])
        if not self.session.host.answers:
            return ServerBefore(process, True, patched, None)
        with self.result.step("record the outputs at temperature 0") as step:
            try:
                identities = self.serving.identities()
                if not patched:
                    self.serving.record_baseline()
                    step.detail = f"{len(self.serving.suite.prompts)} prompts of suite {self.serving.suite.name}"
                else:
                    step.detail = "kept from before the first apply"
            except ServerProblem as problem:
                step.state, step.detail = WARNING, f"the server does not answer: {problem.what}"
                return ServerBefore(process, True, patched, None)
        return ServerBefore(process, True, patched, identities)

    def _start_and_check(self) -> None:
        identity = self.series.identity(self.stage)
        with self.result.step("restart and wait until ready") as step:
            report = self.serving.restart(
                patched=True, sampled=self.sampled, identities={identity}, younger_than=self.commit_time
            )
            self.result.data["ready"] = report.as_dict()
            step.detail = f"process {report.pid} serves the patched files"
        if not self.options.smoke:
            self.result.skip("smoke suite", "--no-smoke was given")
            return
        with self.session.node.together(), self.result.step("smoke suite") as step:
            if not self.session.host.answers:
                step.state, step.detail = SKIPPED, f"{self.session.host.head} answers for this server"
                return
            unused = self.serving.without_tree()
            if unused:
                self.result.not_done.append(unused)
            self.serving.smoke(sampled=self.sampled, identity=identity, started_after=report.start_time)
            step.detail = f"{self.serving.suite.name}: all checks passed"

    def _restarts(self, *left_out: str) -> bool:
        """Whether this run restarts the server; records what is left out when it does not."""
        why = self.serving.why_not or ("" if self.options.restart else "--no-restart was given")
        for name in left_out if why else ():
            self.result.skip(name, why)
        return not why


def _leaves_host_alone(error: Exception) -> bool:
    """Whether this failure ends the command as it stands: the operator stopped it, or there is no way to the host.

    Kinds of HostUnreachable mean that the host answered and refused, so that a roll-back can be tried.
    """
    cause = error
    while isinstance(cause, NodeFailed):
        cause = cause.cause
    return isinstance(cause, Interrupted) or type(cause) is HostUnreachable
