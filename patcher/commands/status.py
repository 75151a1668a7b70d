"""The commands that only look: list, diff, status, history."""

from __future__ import annotations

from patcher.commands.apply_plan import ApplyOptions, ApplyPlan
from patcher.commands.findings import Differs, Done, Received, State
from patcher.commands.node import Node
from patcher.errors import BadAnswer, Conflict, Locked, NotReady, UnsupportedVersion, UsageProblem
from patcher.installation.command_line import port_of
from patcher.installation.find import describe_process, serving_processes
from patcher.installation.session import Session
from patcher.moment import local_time
from patcher.plan.plan import EARLIER
from patcher.plan.server_action import ServerAction
from patcher.plan.states import file_states, overall_state
from patcher.report.findings import Facts
from patcher.rollout.unit import PhaseFailed, Unit
from patcher.series.model import Series
from patcher.server.server import LEFT_DOWN
from patcher.server.services.process import ended_server


class Look:
    """A job that reads everything in `prepare`; what a command makes of it is `show`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.facts = Facts()

    def prepare(self) -> None:
        self.session.open()

    def execute(self) -> None:
        self.session.result.keep(self.facts)  # already now: no failure hides what was found until then
        self.show()

    def show(self) -> None:
        raise NotImplementedError

    @property
    def installed(self) -> str:
        return f"{self.session.target.package} {self.session.version}"

    def describe_installation(self) -> None:
        session = self.session
        self.facts.add("installed", self.installed)
        self.facts.add("in", session.inspection.root)
        ours = serving_processes(session.target, session.inspection)
        for process in session.target.processes:
            label = "server" if process in ours else "server of another copy"
            self.facts.add(f"{label} {process.pid}", describe_process(process))
        # A container's own port may be published as another one.
        port = None if session.host.service.kind == "docker" else session.host.endpoint.port
        if not session.target.is_tree and not any(port in (None, *p.listening, port_of(p.argv)) for p in ours):
            self.facts.add("server", self._none_runs())

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
            self.facts.add("series", f"none: {error.what}")
            self.session.result.summary = f"{self.installed}: series none: {error.what}"
            return
        self.facts.add("series", series.name)
        state = overall_state(file_states(self.session, series), series)
        self.session.result.summary = f"{self.installed}: {_in_words(state, series)}"


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
        diff = node.plan.unified_diff().decode("utf-8", "surrogateescape")
        self.session.result.keep(Differs(server + diff))


class Status(Look):
    """The state of each file, and what the receipt says of it."""

    def show(self) -> None:
        session, result = self.session, self.session.result
        self.describe_installation()
        inspection, holder = session.inspection, session.inspection.lock
        result.keep(Received(inspection.receipt_state, inspection.receipt, holder))
        self._receipt()
        if inspection.missing_backups:
            self.facts.add("backups", f"{len(inspection.missing_backups)} that a revert needs are gone or damaged")
        if holder:
            self.facts.add(
                "lock",
                f"held by {holder.who or 'someone'} since {local_time(holder.since)}, process "
                f"{holder.pid} on {holder.host}: its command is changing these files",
            )
        if inspection.left:
            self.facts.add(
                "left behind",
                "a commit was undone, but these could not be removed; the next command tries "
                f"again: {', '.join(inspection.left)}",
            )
        elif inspection.journal and not holder:
            self.facts.add("journal", "a commit was cut short and is not yet finished or undone")
        try:
            series = session.series()
        except UnsupportedVersion as error:
            result.keep(State("unsupported"))
            result.summary = error.what
            return
        rows = file_states(session, series)
        state = overall_state(rows, series)
        result.keep(State(state, series.name, rows))
        result.summary = _in_words(state, series)
        if holder:
            result.summary = f"being changed by {holder.who or 'someone'}; at this moment {result.summary}"

    def _receipt(self) -> None:
        receipt = self.session.inspection.receipt
        if receipt is None:
            return
        stale = (
            " - stale: the package was replaced since, and the files count, not the receipt; "
            "apply patches them anew, revert drops the receipt"
        )
        self.facts.add(
            "receipt",
            f"series {receipt.series}, stage {receipt.stage}, applied {local_time(receipt.host.commit_time)} "
            f"by {receipt.by}{stale if self.session.stale else ''}",
        )


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
        lines = self.session.target.history()
        self.session.result.keep(Done(lines))
        count = "1 entry" if len(lines) == 1 else f"{len(lines)} entries"
        nothing = "nothing is recorded here (a revert of a tree takes its record along)"
        self.session.result.summary = count if lines else nothing
