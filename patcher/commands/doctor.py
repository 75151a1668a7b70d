"""doctor: look at everything that apply depends on, and change nothing."""

from __future__ import annotations

from functools import cached_property

from patcher.commands.checks import Checks
from patcher.commands.findings import Service
from patcher.commands.kernel_gate import check_kernel
from patcher.commands.status import Look
from patcher.errors import Conflict, Locked
from patcher.installation.find import refuse_other_copy
from patcher.installation.session import stage_named
from patcher.installation.transaction import describe
from patcher.moment import local_time
from patcher.plan.make import make_plan
from patcher.report.outcome import WARNING, Step
from patcher.server.kernel import ops_of
from patcher.server.server import LEFT_DOWN, Serving

_COMPANIONS = ("torch", "sglang-kernel", "sgl-kernel", "flashinfer-python", "triton", "transformers")
_VERSIONS = """
import sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""


class Doctor(Look):
    """Each look is a step; all are made, and the first that fails decides the exit code."""

    def show(self) -> None:
        checks = Checks(self.session.result)
        self.describe_installation()
        session = self.session
        interpreter = session.inspection.interpreter
        self.facts.add("reached", "this machine" if session.host.local else f"over ssh, as {session.host.address}")
        if interpreter:
            self.facts.add("interpreter", f"{interpreter.executable}, Python {interpreter.version}")
            for name, version in self._versions().items():
                self.facts.add(name, version)
        self.facts.add("editable", "yes" if session.inspection.editable else "no")
        for name, look in (
            ("supported version", self._supported),
            ("files", self._files),
            ("writable", self._writable),
            ("links", self._links),
            ("disk space", self._space),
            ("lock", self._lock),
            ("receipt", self._receipt),
            ("service", self._service),
            ("the copy that is served", self._copy),
        ):
            checks.step(name, look)
        checks.collect(self._kernel)
        checks.raise_first("1 thing stands in the way of an apply", "things stand in the way of an apply")
        session.result.summary = "ready for apply"

    def _versions(self) -> dict[str, str]:
        """What is installed beside the package, by its metadata alone: nothing is imported."""
        reply = self.session.target.run_python(_VERSIONS, _COMPANIONS, 60)
        return dict(line.split(" ", 1) for line in reply.stdout.splitlines() if " " in line)

    @cached_property
    def _serving(self) -> Serving:
        """Asked for when the service's turn comes: it may refuse what hosts.toml says, which is a failed look then."""
        return Serving(self.session)

    def _supported(self, step: Step) -> str:
        return f"series {self.session.series().name}"

    def _files(self, step: Step) -> str:
        series = self.session.series()
        return describe(make_plan(series, stage_named(series, ""), self.session.for_plan))

    def _writable(self, step: Step) -> str:
        problem = self.session.inspection.writable
        if problem:
            raise Conflict(
                f"{problem.path} cannot be replaced: {problem.reason} (mount {problem.mount})",
                where=self.session.host.name,
                next_step="connect as the owner or set sudo = true; a mount must be made writable",
            )
        return "every file can be replaced"

    def _links(self, step: Step) -> str:
        files = self.session.inspection.files
        linked = [path for path, entry in files.items() if entry.link or (entry.links or 1) > 1]
        if not linked:
            return "no file is shared with a cache or another venv"
        return f"{len(linked)} files are links or have several names; apply leaves the other names as they are"

    def _space(self, step: Step) -> str:
        free = self.session.inspection.free_bytes
        needed = 4 * sum(entry.size or 0 for entry in self.session.inspection.files.values()) + (1 << 20)
        if free < needed:
            raise Conflict(
                f"{free >> 20} MiB are free, about {needed >> 20} MiB are needed",
                where=f"{self.session.host.name}: {self.session.inspection.root}",
                next_step="free some space there",
            )
        return f"{free >> 20} MiB free"

    def _lock(self, step: Step) -> str:
        holder = self.session.inspection.lock
        if holder:
            raise Locked(
                f"{holder.who} holds the lock since {local_time(holder.since)}",
                where=self.session.host.name,
                next_step="wait until that command ends",
            )
        if self.session.inspection.recovered != "nothing":
            step.state = WARNING
            return f"free; a commit that was cut short was {self.session.inspection.recovered} just now"
        return "free, and no commit is half done"

    def _receipt(self, step: Step) -> str:
        if self.session.stale:
            step.state = WARNING
            return "stale: the package was replaced since; apply goes by the files alone"
        receipt = self.session.receipt
        return f"series {receipt.series}, stage {receipt.stage}" if receipt else "none"

    def _service(self, step: Step) -> str:
        serving = self._serving
        if serving.why_not:
            return serving.why_not
        serving.refuse_supervised()
        described = serving.service.describe()
        self.session.result.keep(Service(described))
        kind, pid = serving.service.kind, described.get("pid")
        if pid is None:
            step.state = WARNING
            if serving.service.ended() is not None:
                return f"{kind}: no server is running: {LEFT_DOWN}; apply starts it again"
            return f"{kind}: no server of this venv is running, so an apply could not be checked"
        return f"{kind}: process {pid}, since {local_time(described['start_time'])}"

    def _copy(self, step: Step) -> str:
        if self._serving.why_not:
            return "no service"
        refuse_other_copy(self.session.target, self.session.inspection)
        return "no server of another copy is in the way"

    def _kernel(self) -> None:
        """Where apply would try the kernel, try it: its failure is one that apply would end with."""
        why_not = self._serving.why_not
        if not why_not:
            check_kernel(self.session, stage=stage_named(self.session.series(), ""), sampled=True)
            return
        with self.session.result.step("kernel probe") as step:
            path, name = ops_of(self.session.version)["verify"]
            step.detail = f"{name} is expected in {path}; not tried, nor would apply try it: {why_not}"
