"""The server of one installation while a command works on it: found, asked, and its identity checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import UNSET

from patcher.errors import BadAnswer, NotReady, SmokeFailed, UsageProblem
from patcher.installation.command_line import port_of, rank_of
from patcher.installation.find import describe_process, refuse_kept, refuse_other_copy, serving_processes
from patcher.installation.session import Session
from patcher.server.client import ServerProblem, SglangClient
from patcher.server.services.base import Service
from patcher.server.services.process import ended_server
from patcher.server.services.registry import ServiceHost, make_service
from patcher.smoke.baseline import Baseline, record_baseline
from patcher.smoke.result import SmokeResult
from patcher.smoke.run import run_suite
from patcher.smoke.suite import Suite, load_suite
from patcher.typed import Misfit, typed

DEFAULT_PORT = 30000  # SGLang's own, when neither hosts.toml nor a process names one
BASELINE = "baseline"
TREE = "DDTREE"  # the algorithm that the series adds
LEFT_DOWN = "an earlier command had stopped it, and no other was ready in its place"


class Serving:
    """`why_not` is empty, or says why no service here is looked after by this tool: there is no `service` then."""

    def __init__(self, session: Session, suite: Suite | None = None) -> None:
        self.session = session
        self.result = session.result
        self.host = session.host
        self.suite = suite or load_suite(self.host.smoke.suite)
        self.why_not = "a tree of files has no interpreter and no server" if session.target.is_tree else ""
        if not self.why_not and self.host.service.kind == "none":
            self.why_not = "service.kind is none"
        port = self.host.endpoint.port or self._port_of_process()
        key = None if session.target.is_tree else self.host.endpoint.api_key()
        self.client = SglangClient(session.connection, self.host.endpoint.host, port, key)
        on_host = ServiceHost(
            self.host.name, session.connection, self._ask, session.inspection.state_dir, port, bool(self.host.venv)
        )
        service = None if self.why_not else make_service(self.host.service, on_host)
        if service:
            self.service: Service = service
        self._listing = session.target.processes
        self._refuse_wrong_head()

    def _refuse_wrong_head(self) -> None:
        """The first node of a server in hosts.toml must be its rank 0: no other answers requests."""
        if not self.host.server:
            return
        for process in serving_processes(self.session.target, self.session.inspection):
            rank = rank_of(process.argv)
            if port_of(process.argv) == self.client.port and (rank == 0) != self.host.answers:
                raise UsageProblem(
                    f"the process of {self.host.name} has --node-rank {rank}, but hosts.toml has {self.host.head} "
                    f"first of server {self.host.server}",
                    where=str(self.host.config or self.host.name),
                    next_step="let the host of node rank 0 be the first of them in hosts.toml",
                )

    def _ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Target.ask, but the first look at the processes is the one that found the installation a moment ago."""
        if op == "processes" and self._listing:
            listing, self._listing = self._listing, ()
            return {"processes": msgspec.to_builtins(listing), "missing": []}
        return self.session.target.ask(op, **request)

    def _port_of_process(self) -> int:
        serving = serving_processes(self.session.target, self.session.inspection)
        ports = sorted({port_of(process.argv) for process in serving})
        if len(ports) > 1:
            raise UsageProblem(
                f"{len(ports)} servers run from this installation, on the ports " + ", ".join(map(str, ports)),
                where=self.host.name,
                next_step="say which one is meant: endpoint.port in hosts.toml",
                detail="\n".join(describe_process(process) for process in serving),
            )
        if not ports and self.host.service.kind == "process" and not self.session.target.is_tree:
            ended = ended_server(self.session.target.ask, self.host.name, None)
            ports = [ended["port"]] if ended else []
        return ports[0] if ports else DEFAULT_PORT

    def refuse_wrong_server(self) -> None:
        """Raise Conflict, before anything is changed, where a restart would not be of the server that is meant."""
        # One that is missing ran from here, whatever else runs on other ports of the host.
        port = None if self.service.ended() is None else self.client.port
        refuse_other_copy(self.session.target, self.session.inspection, port)
        self.refuse_supervised()
        self.service.refuse_in_hand()

    def refuse_supervised(self) -> None:
        """Raise Conflict when something else starts the server again whenever it ends, and kind is `process`."""
        if self.why_not or self.host.service.kind != "process":
            return
        port = self.client.port
        for process in serving_processes(self.session.target, self.session.inspection):
            if process.keeper and (port in process.listening or port_of(process.argv) == port):
                refuse_kept(process, process.keeper, self.host.name)

    def others(self) -> list[str]:
        """Servers that run the same files and are not the one that is restarted, as lines for a reader."""
        serving = serving_processes(self.session.target, self.session.inspection)
        return [describe_process(process) for process in serving if port_of(process.argv) != self.client.port]

    def answers(self) -> bool:
        """Whether the server answers at all, now."""
        try:
            self.client.health()
        except ServerProblem:
            return False
        return True

    def look(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """(the running server, as Service.live gives it; the one to be put back if a restart fails), each may be None.

        The other is the running one, else, {"argv"} alone, the one that an earlier command stopped and left down.
        """
        server = self.service.live()
        ended = self.service.ended() if server is None else None
        return server, server or (None if ended is None else {"argv": list(ended)})

    def log_hint(self) -> str:
        """Where an operator finds the server's log, as the end of a sentence; empty when that cannot be said."""
        try:
            place = "" if self.why_not else self.service.log_at()
        except (NotReady, UsageProblem):  # it must not take the place of the error that it is for
            place = ""
        return f"; the server's log, on the host: {place}" if place else ""

    @contextmanager
    def naming_log(self) -> Iterator[None]:
        """What fails in here because of the server says where its log is."""
        try:
            yield
        except (NotReady, SmokeFailed) as failure:
            raise failure.but(next_step=failure.next_step + self.log_hint()) from failure

    def identities(self) -> set[str | None]:
        """The patch that each scheduler of the server reports; None for one without. Raises ServerProblem."""
        return self.client.server_info().identities

    def identity_problem(self, expected: set[str | None]) -> str:
        """Why the served patch is not the expected one; empty when it is."""
        served = self.identities()
        return "" if served == expected else f"the server reports {_names(served)}, not {_names(expected)}"

    def without_tree(self) -> str:
        """What to do when the server that answers does not draft trees; empty when it does, or does not say."""
        algorithm = self.client.server_info().speculative_algorithm
        if algorithm in (TREE, UNSET):
            return ""
        running = algorithm or "without speculation"
        return (
            f"drafting trees: the server runs {running}; set --speculative-algorithm {TREE}, in service.args of "
            "hosts.toml or where its command line stands"
        )

    def record_baseline(self) -> None:
        """Keep the outputs at temperature 0 in the installation's state, to compare with after the patch."""
        baseline = record_baseline(self.client, self.suite, self.result.tell)
        self.session.target.keep(BASELINE, msgspec.to_builtins(baseline))

    def check_greedy_answer(self) -> None:
        """One short request at temperature 0, where requests are answered; raises ServerProblem when it is not."""
        if not self.host.answers:
            return
        payload = {**self.suite.prompts[0].payload(), "sampling_params": {"temperature": 0.0, "max_new_tokens": 8}}
        self.client.generate(payload, timeout=self.suite.timeout)

    def smoke(self, *, sampled: bool, identity: str | None = None, started_after: float | None = None) -> SmokeResult:
        """Run the suite. `started_after`: as for run_suite."""
        suite = self.suite if sampled else msgspec.structs.replace(self.suite, temperatures=(0.0,), paths=())
        kept = self.session.target.kept(BASELINE)
        try:
            baseline = None if kept is None else typed(kept, Baseline)
        except Misfit as misfit:
            raise BadAnswer(
                f"what the host kept of the outputs before the patch makes no sense: {misfit}",
                where=self.host.name,
                next_step="look at that host before it is trusted with anything",
            ) from misfit
        smoke = run_suite(
            self.client,
            suite,
            baseline=baseline,
            service=None if self.why_not else self.service,
            identity=identity,
            started_after=started_after,
            progress=self.result.tell,
        )
        self.result.not_done += [f"smoke check {c.name}: {c.detail}" for c in smoke.checks if c.skipped]
        return smoke

    def refuse(self, smoke: SmokeResult) -> None:
        """Raise SmokeFailed, which names the failed checks, if there is one."""
        with self.naming_log():
            smoke.raise_if_failed(self.host.name)


def _names(identities: set[str | None]) -> str:
    return ", ".join(sorted(identity[:12] if identity else "no patch" for identity in identities))
