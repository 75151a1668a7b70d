"""The commands that only look: list, diff, status, history."""

from __future__ import annotations

from typing import Any

import msgspec

from patcher.commands.apply_plan import ApplyOptions, ApplyPlan
from patcher.commands.node import Node
from patcher.errors import BadAnswer, Conflict, Locked, NotReady, UnsupportedVersion, UsageProblem
from patcher.installation.command_line import port_of
from patcher.installation.find import describe_process, serving_processes
from patcher.installation.session import Session
from patcher.moment import local_time
from patcher.plan.plan import EARLIER
from patcher.plan.server_action import ServerAction
from patcher.plan.states import file_states, overall_state, shown
from patcher.series.model import Series
from patcher.series.support import Proof
from patcher.server.server import LEFT_DOWN
from patcher.server.services.process import ended_server
from patcher.unit import PhaseFailed, Unit


def describe_series(series: Series) -> dict[str, Any]:
    """A series for `list`: what it is for, its stages, patches and files, and where its text has been proven."""
    identity = series.identity(series.stages[-1].name)
    support = series.support
    return {
        "name": series.name,
        "package": series.package,
        "versions": list(series.versions),
        "stages": [{"name": stage.name, "purpose": stage.purpose} for stage in series.stages],
        "patches": [{"name": patch.name, "stage": patch.stage, "purpose": patch.purpose} for patch in series.patches],
        "files": sorted(series.files),
        "ops": list(series.ops),
        "identity": identity,
        "family": support.family,
        "backends": list(support.backends),
        "proven": {"cpu": _proof(support.cpu, identity), "gpu": _proof(support.gpu, identity)},
    }


def _proof(proof: Proof | None, identity: str) -> dict[str, Any] | None:
    """`current`: of the series as it is, not of an earlier text of it."""
    if proof is None:
        return None
    return {"date": proof.date.isoformat(), "current": proof.identity == identity, "shown_by": proof.shown_by}


class Look:
    """A job that reads everything in `prepare`; what a command makes of it is `show`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.facts: dict[str, Any] = {}

    def prepare(self) -> None:
        self.session.open()

    def execute(self) -> None:
        self.show()
        if self.facts:
            self.session.result.data["facts"] = self.facts

    def show(self) -> None:
        raise NotImplementedError

    def describe_installation(self) -> None:
        session = self.session
        self.facts["installed"] = f"{session.target.package} {session.version}"
        self.facts["in"] = session.inspection.root
        ours = serving_processes(session.target, session.inspection)
        for process in session.target.processes:
            label = "server" if process in ours else "server of another copy"
            self.facts[f"{label} {process.pid}"] = describe_process(process)
        # A container's own port may be published as another one.
        port = None if session.host.service.kind == "docker" else session.host.endpoint.port
        if not session.target.is_tree and not any(port in (None, *p.listening, port_of(p.argv)) for p in ours):
            self.facts["server"] = self._none_runs()

    def _none_runs(self) -> str:
        session, port = self.session, self.session.host.endpoint.port
        none = f"none runs on port {port}" if port else "none runs"
        by_tool = session.host.service.kind == "process"
        try:
            ended = ended_server(session.target.ask, session.host.name, port) if by_tool else None
        except BadAnswer as problem:  # what is kept of the server hides nothing of the files
            return f"{none}; {problem.what}"
        if ended is None:
            return none
        return f"{none}: {LEFT_DOWN}; apply, restart and revert start it again"


class List(Look):
    """What is installed and running on a host, and whether a series is made for it."""

    def show(self) -> None:
        self.describe_installation()
        try:
            series = self.session.series()
        except UnsupportedVersion as error:
            self.facts["series"] = f"none: {error.what}"
            self.session.result.summary = f"{self.facts['installed']}: series {self.facts['series']}"
            return
        self.facts["series"] = series.name
        state = overall_state(file_states(self.session, series), series)
        self.session.result.summary = f"{self.facts['installed']}: {_in_words(state, series)}"


class Diff(Look):
    """What apply would change."""

    def __init__(self, session: Session, up_to: str) -> None:
        super().__init__(session)
        self.node = Node(session)
        self.plan = ApplyPlan(Unit([self.node]), ApplyOptions(up_to=up_to))

    def show(self) -> None:
        """Where apply would be refused because of the server, the files are shown all the same, and why it would."""
        node = self.node
        self.plan.files()
        try:
            self.plan.server()
        except PhaseFailed as failure:
            error = failure.errors[node.result.host]
            if not isinstance(error, (Conflict, Locked, NotReady, UsageProblem)):
                raise
            node.plan_action(ServerAction("none", f"apply would end with: {error.what}"))
        server = f"# {node.action}\n" if node.action.acts else ""
        self.session.result.data["diff"] = server + node.plan.unified_diff().decode("utf-8", "surrogateescape")


class Status(Look):
    """The state of each file, and what the receipt says of it."""

    def show(self) -> None:
        session, result = self.session, self.session.result
        self.describe_installation()
        inspection, receipt = session.inspection, session.inspection.receipt
        result.data["receipt_state"] = inspection.receipt_state
        result.data["receipt"] = receipt.whole if receipt else None
        if receipt:
            self.facts["receipt"] = (
                f"series {receipt.series}, stage {receipt.stage}, "
                f"applied {local_time(receipt.host.commit_time)} by {receipt.by}"
            )
        if session.stale:
            self.facts["receipt"] += (
                " - stale: the package was replaced since, and the files count, not the receipt; "
                "apply patches them anew, revert drops the receipt"
            )
        if inspection.missing_backups:
            self.facts["backups"] = f"{len(inspection.missing_backups)} that a revert needs are gone or damaged"
        holder = inspection.lock
        if holder:
            result.data["lock"] = msgspec.to_builtins(holder)
            self.facts["lock"] = (
                f"held by {holder.who or 'someone'} since {local_time(holder.since)}, process "
                f"{holder.pid} on {holder.host}: its command is changing these files"
            )
        if inspection.left:
            self.facts["left behind"] = (
                "a commit was undone, but these could not be removed; the next command tries "
                f"again: {', '.join(inspection.left)}"
            )
        elif inspection.journal and not holder:
            self.facts["journal"] = "a commit was cut short and is not yet finished or undone"
        try:
            series = session.series()
        except UnsupportedVersion as error:
            result.data["state"] = "unsupported"
            result.summary = error.what
            return
        rows = file_states(session, series)
        state = overall_state(rows, series)
        result.data |= {"series": series.name, "state": state, "files": shown(rows)}
        result.summary = _in_words(state, series)
        if holder:
            result.summary = f"being changed by {holder.who or 'someone'}; at this moment {result.summary}"


def _in_words(state: str, series: Series) -> str:
    """What the state of all files together, as `overall_state` gives it, means for a reader."""
    return {
        "pristine": f"not patched; series {series.name} can be applied",
        "drift": "some files are in no state that the series knows; apply would refuse",
        EARLIER: "patched by an earlier series; apply brings the files to that of today, revert takes them back",
        "mixed": "the files are in different known states; apply brings them to one",
    }.get(state, f"patched: series {series.name}, stage {state}")


class History(Look):
    """What was done to the installation."""

    def show(self) -> None:
        lines = [
            {
                "when": local_time(line.time),
                "what": line.event,
                "by": line.who,
                **{key: told[key] for key in ("series", "from", "to", "files", "tool") if key in told},
            }
            for line in self.session.target.history()
            for told in [msgspec.to_builtins(line)]
        ]
        self.session.result.data["lines"] = lines
        nothing = "nothing is recorded here (a revert of a tree takes its record along)"
        self.session.result.summary = f"{len(lines)} entries" if lines else nothing
