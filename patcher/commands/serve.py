"""The commands about the server alone: restart and smoke-test."""

from __future__ import annotations

from patcher.errors import NotReady, UsageProblem
from patcher.installation.session import Session
from patcher.server.server import Serving
from patcher.smoke.suite import Suite


class Restart:
    """Restart the server, patched or stock as its files are, and wait until it is ready."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def prepare(self) -> None:
        self.session.open()
        self.serving = Serving(self.session)
        if self.serving.why_not:
            raise UsageProblem(
                f"there is nothing to restart: {self.serving.why_not}",
                where=self.session.host.name,
                next_step="give a venv, and a service in hosts.toml",
            )
        self.serving.refuse_wrong_server()

    def execute(self) -> None:
        receipt, result = self.session.receipt, self.session.result
        with result.step("restart and wait until ready") as step:
            report = self.serving.restart(
                patched=receipt is not None,
                sampled=self.session.samples,
                identities={receipt.identity if receipt else None},
            )
            step.detail = f"process {report.pid}"
        result.data["ready"] = report.as_dict()
        result.summary = f"restarted: process {report.pid} is ready after {report.seconds:.0f} s"


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
            self.serving.smoke(
                sampled=self.session.samples,
                identity=receipt.identity if receipt else None,
                started_after=receipt.host.commit_time if receipt else None,
            )
        if not self.serving.why_not:
            self.serving.service.settled()
        result.summary = f"suite {self.serving.suite.name}: all checks passed"
