"""The hosts that a command is for, and a job run on each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from patcher.errors import UsageProblem
from patcher.hosts import LOCAL_NAME, HostSettings
from patcher.hosts_file import load_config, searched
from patcher.installation.session import Session
from patcher.report.outcome import Outcome
from patcher.report.progress import Progress
from patcher.report.stderr import message_console
from patcher.rollout.lane import Lane
from patcher.rollout.run import Job, Rollout, run_on_hosts
from patcher.rollout.unit import Unit
from patcher.series.catalogue import catalogue

SoFar = Callable[[Outcome], None]


def nobody(outcome: Outcome) -> None:
    """Who is told of an outcome before its end, where nobody asked to be."""


@dataclass(frozen=True)
class Selection:
    """The options that every command has: which hosts, and which installation on them."""

    hosts: tuple[str, ...] = ()
    limit: tuple[str, ...] = ()
    local: bool = False
    venv: str | None = None
    site_packages: str | None = None
    config: Path | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.hosts or self.local or self.venv or self.site_packages)

    def chosen(self, whole: bool = False) -> tuple[HostSettings, ...]:
        """The hosts. A venv or tree without a host is one of this machine. Raises UsageProblem when there is none.

        `whole`: a multi-node server must be among them with all its nodes.
        """
        if self.venv and self.site_packages:
            raise UsageProblem("--venv and --site-packages exclude each other", next_step="give one of them")
        config = load_config(self.config)
        here = self.local or (not self.hosts and bool(self.venv or self.site_packages))
        hosts = config.select(self.hosts)
        if here and all(host.name != LOCAL_NAME for host in hosts):
            hosts += (config.local(),)
        if not hosts:
            known = ", ".join(config.hosts) or "none"
            nowhere = f"no hosts.toml; looked for {', '.join(str(path.absolute()) for path in searched())}"
            raise UsageProblem(
                "no host was given",
                where=str(config.source or nowhere),
                next_step=f"give --host NAME|ADDRESS or --local (hosts in the file: {known})",
            )
        hosts = config.limit(hosts, self.limit)
        if whole:
            config.whole(hosts)
        if self.venv:
            hosts = tuple(replace(host, venv=self.venv, site_packages="") for host in hosts)
        if self.site_packages:
            hosts = tuple(replace(host, site_packages=self.site_packages, venv="") for host in hosts)
        return tuple(replace(host, config=self.config) for host in hosts)

    def look(self, command: str, job: Callable[[Session], Job], so_far: SoFar = nobody) -> Outcome:
        """A job that only reads, on every host that can be reached."""

        def alone(unit: Unit[Session]) -> Job:
            (session,) = unit.nodes
            return job(session)

        return self._run(command, alone, self.chosen(), Rollout(keep_going=True, by_server=False), so_far)

    def change(
        self, command: str, job: Callable[[Unit[Session]], Job], rollout: Rollout, so_far: SoFar, whole: bool = True
    ) -> Outcome:
        """A job that changes hosts, wave by wave; `whole`: all nodes of a server, or none."""
        return self._run(command, job, self.chosen(whole), rollout, so_far)

    def _run(
        self,
        command: str,
        job: Callable[[Unit[Session]], Job],
        hosts: Sequence[HostSettings],
        rollout: Rollout,
        so_far: SoFar,
    ) -> Outcome:
        series = catalogue()  # loaded, and checked, before any connection is made

        def session(lane: Lane) -> Session:
            return Session(lane.host, lane.reached, lane.result, series)

        return run_on_hosts(
            command, hosts, lambda unit: job(unit.of(session)), Progress(message_console()), rollout, so_far
        )
