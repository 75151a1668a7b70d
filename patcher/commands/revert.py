"""revert: every file as it was before the first apply, and the server as it was then."""

from __future__ import annotations

from dataclasses import dataclass

from patcher.errors import UnsupportedVersion
from patcher.installation.session import Session
from patcher.installation.transaction import commit, describe
from patcher.plan.plan import make_revert_plan
from patcher.server.client import ServerProblem
from patcher.server.server import LEFT_DOWN, Serving


@dataclass(frozen=True)
class RevertOptions:
    dry_run: bool = False
    restart: bool = True


class Revert:
    """One revert on one host."""

    def __init__(self, session: Session, options: RevertOptions) -> None:
        self.session = session
        self.result = session.result
        self.options = options
        self.commit_time: float | None = None

    def prepare(self) -> None:
        self.session.open()
        with self.result.step("plan") as step:
            try:
                series = self.session.series()
            except UnsupportedVersion:
                series = None  # the receipt and the backups on the host are enough
            self.plan = make_revert_plan(self.session.for_plan, series)
            step.detail = describe(self.plan)
        self.result.data["plan"] = self.plan.as_dict()
        self.serving = Serving(self.session)
        self.why_not = self.serving.why_not or ("" if self.options.restart else "--no-restart was given")
        if not self.why_not:
            self.serving.refuse_wrong_server()

    def execute(self) -> None:
        """Do it. A server that does not come back is NotReady; the files stay as they were before the apply."""
        if self.options.dry_run:
            self.result.summary = f"dry run, nothing was changed: {describe(self.plan)}{self._would_restart()}"
            return
        with self.session.node.together():
            self._put_back()
        if any(self.session.node.share(bool(self.why_not)).values()):
            self.result.skip("restart", self.why_not or "another node of the server is not restarted")
            return
        self._restart()

    def _put_back(self) -> None:
        if self.session.stale:
            self.session.target.forget()
            self.result.not_done.append("the receipt was stale (the package was replaced since), and was dropped")
        if self.plan.is_noop:
            self.result.summary = "not patched: nothing to revert"
            return
        with self.result.step("commit") as step:
            reply = commit(self.session, self.plan, "revert", [])
            self.commit_time = reply.commit_time
            step.detail = f"{len(self.plan.changes)} files put back and read back; RECORD {reply.record}"
        self.result.changed = True
        self.result.summary = "reverted: every file is as it was before the first apply"

    def _restart(self) -> None:
        with self.session.node.together():
            server, before = self.serving.look()
            absent = before is None and not self.serving.service.starts_stopped
            stock = not self.result.changed and server is not None and self._is_stock()
        found = self.session.node.share((absent, stock)).values()
        if any(missing for missing, _ in found):
            self.result.skip("restart", "no server is running")
            return
        if all(already for _, already in found):
            self.serving.service.settled()
            return  # a stock server on stock files
        with self.result.step("restart and wait until ready") as step:
            report = self.serving.bring_back(patched=False, identities={None}, younger_than=self.commit_time)
            step.detail = f"process {report.pid} answers, without the patch"
        if server is None and before is not None:
            self.result.summary += f"; the server was started again, because {LEFT_DOWN}"

    def _would_restart(self) -> str:
        """What a revert would do to the server, for a dry run."""
        if self.why_not:
            return ""
        server, before = self.serving.look()
        if server is not None:
            is_left = self.plan.is_noop and self._is_stock()
            return "; no restart" if is_left else f"; process {server['pid']} would be restarted"
        if before is not None:
            return f"; the server would be started, because {LEFT_DOWN}"
        return "; the server would be started" if self.serving.service.starts_stopped else "; no server is running"

    def _is_stock(self) -> bool:
        """Whether the server that runs reports no patch, where it can be asked."""
        try:
            return not (self.session.host.answers and self.serving.identity_problem({None}))
        except ServerProblem:
            if self.serving.service.ended() is None:
                raise
            return False  # the one that a command started before it was cut off: nobody knows whether it comes up
