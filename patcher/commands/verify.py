"""verify: are the patched files intact, is the kernel right, and does the server run them?"""

from __future__ import annotations

from patcher.commands.checks import Checks
from patcher.commands.kernel_gate import check_kernel
from patcher.errors import Conflict, Drift, NotReady
from patcher.installation.session import Session
from patcher.plan.make import refuse_moving_files
from patcher.server.server import LEFT_DOWN, Serving
from patcher.wire.types import Receipt


class Verify:
    """Every check is made, also after one that failed; the first failure decides the exit code."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.result = session.result

    def prepare(self) -> None:
        self.session.open()

    def execute(self) -> None:
        refuse_moving_files(self.session.inspection)
        receipt = self.session.receipt
        if receipt is None:
            why = "its receipt is stale: the package was replaced" if self.session.stale else "there is no receipt"
            raise Conflict(f"not patched: {why}", where=self.session.host.name, next_step="ddtree-patch apply")
        checks = Checks(self.result)
        checks.step("patched files", lambda step: self._files(receipt))
        serving = Serving(self.session)
        if self.session.target.is_tree:
            self.result.skip("kernel probe", "a tree of files has no interpreter")
        else:
            checks.collect(lambda: check_kernel(self.session, stage=receipt.stage, sampled=self.session.samples))
        if serving.why_not:
            self.result.skip("running server", serving.why_not)
        else:
            checks.step("running server", lambda step: self._server(serving, receipt))
        checks.raise_first("1 check failed", "checks failed")
        self.result.summary = f"series {receipt.series}, stage {receipt.stage}: verified"

    def _files(self, receipt: Receipt) -> str:
        files = receipt.files
        wrong = [path for path, state in files.items() if self.session.sha256(path) != state.after]
        if wrong:
            raise Drift(
                f"{len(wrong)} of {len(files)} patched files were changed since the apply: {', '.join(sorted(wrong))}",
                where=self.session.host.name,
                next_step="ddtree-patch diff names the lines; reinstall the package or restore them",
            )
        missing = self.session.inspection.missing_backups
        if missing:
            raise Conflict(
                f"{len(missing)} of the backups that a revert needs are gone or damaged",
                where=f"{self.session.host.name}: {self.session.inspection.state_dir}/backups",
                next_step="restore them; a revert would have to be a reinstallation of the package",
            )
        return f"{len(files)} files are as the receipt says"

    def _server(self, serving: Serving, receipt: Receipt) -> str:
        host = self.session.host.name
        server = serving.service.live()
        if server is None:
            why = f": {LEFT_DOWN}" if serving.service.ended() is not None else ""
            raise NotReady(f"no server is running{why}", where=host, next_step="start it; or ddtree-patch restart")
        pid, started = server["pid"], server["start_time"]
        if started < receipt.host.commit_time:
            raise NotReady(
                f"process {pid} is older than the patched files: it runs the old ones",
                where=host,
                next_step="ddtree-patch restart",
            )
        if not self.session.host.answers:
            return f"process {pid} is younger than the files; {self.session.host.head} answers for it"
        problem = serving.identity_problem({receipt.identity})
        if problem:
            raise NotReady(problem, where=host, next_step=f"see which files process {pid} has open")
        serving.service.settled()
        return f"process {pid} is younger than the files and reports their identity"
