"""Each command as a function, options -> Outcome: where options meet settings, catalogue and jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from patcher.commands.apply import Apply, ApplyOptions
from patcher.commands.doctor import Doctor
from patcher.commands.revert import Revert, RevertOptions
from patcher.commands.serve import Restart, SmokeTest
from patcher.commands.status import Diff, History, List, Status, describe_series
from patcher.commands.verify import Verify
from patcher.errors import UsageProblem
from patcher.hosts import LOCAL_NAME, HostSettings
from patcher.hosts_file import load_config, searched
from patcher.installation.session import Session
from patcher.report.outcome import HostResult, Outcome
from patcher.report.progress import Progress
from patcher.report.stderr import message_console
from patcher.rollout import Job, Rollout, run_on_hosts
from patcher.series.catalogue import catalogue
from patcher.smoke.suite import load_suite
from patcher.ssh.connection import Connection
from patcher.team import Node

SoFar = Callable[[Outcome], None]


def nobody(outcome: Outcome) -> None:
    """Who is told of an outcome before its end, where nobody asked to be."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The options that every command has: which hosts, and which installation on them."""

    hosts: tuple[str, ...] = ()
    limit: tuple[str, ...] = ()
    local: bool = False
    venv: str | None = None
    site_packages: str | None = None
    config: Path | None = None
    as_json: bool = False

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
        return self._run(command, job, self.chosen(), Rollout(keep_going=True), so_far)

    def change(
        self, command: str, job: Callable[[Session], Job], rollout: Rollout, so_far: SoFar, whole: bool = True
    ) -> Outcome:
        """A job that changes hosts, wave by wave; `whole`: all nodes of a server, or none."""
        return self._run(command, job, self.chosen(whole), rollout, so_far)

    def _run(
        self,
        command: str,
        job: Callable[[Session], Job],
        hosts: Sequence[HostSettings],
        rollout: Rollout,
        so_far: SoFar,
    ) -> Outcome:
        series = catalogue()  # loaded, and checked, before any connection is made

        def make(host: HostSettings, connection: Connection, result: HostResult, node: Node) -> Job:
            return job(Session(host, connection, result, series, node))

        return run_on_hosts(command, hosts, make, Progress(message_console()), rollout, so_far)


def list_series(**selection: object) -> Outcome:
    chosen = Selection(**selection)
    data = {"series": [describe_series(series) for series in catalogue()]}
    if not (chosen.hosts or chosen.local or chosen.venv or chosen.site_packages):
        return Outcome("list", data=data)
    return dataclasses.replace(chosen.look("list", List), data=data)


def doctor(**selection: object) -> Outcome:
    return Selection(**selection).look("doctor", Doctor)


def diff(*, up_to: str | None, **selection: object) -> Outcome:
    return Selection(**selection).look("diff", lambda session: Diff(session, up_to or ""))


def apply(
    *,
    dry_run: bool,
    up_to: str | None,
    no_restart: bool,
    no_smoke: bool,
    batch: int | None,
    all_at_once: bool,
    keep_going: bool,
    so_far: SoFar = nobody,
    **selection: object,
) -> Outcome:
    options = ApplyOptions(dry_run=dry_run, up_to=up_to or "", restart=not no_restart, smoke=not no_smoke)
    return Selection(**selection).change(
        "apply", lambda session: Apply(session, options), _rollout(batch, all_at_once, keep_going), so_far
    )


def verify(**selection: object) -> Outcome:
    return Selection(**selection).look("verify", Verify)


def status(**selection: object) -> Outcome:
    return Selection(**selection).look("status", Status)


def revert(
    *,
    dry_run: bool,
    no_restart: bool,
    batch: int | None,
    all_at_once: bool,
    keep_going: bool,
    so_far: SoFar = nobody,
    **selection: object,
) -> Outcome:
    options = RevertOptions(dry_run=dry_run, restart=not no_restart)
    return Selection(**selection).change(
        "revert",
        lambda session: Revert(session, options),
        # The files of one node alone: what a failed rollback may leave to do.
        _rollout(batch, all_at_once, keep_going),
        so_far,
        whole=not no_restart,
    )


def restart(
    *, batch: int | None, all_at_once: bool, keep_going: bool, so_far: SoFar = nobody, **selection: object
) -> Outcome:
    return Selection(**selection).change("restart", Restart, _rollout(batch, all_at_once, keep_going), so_far)


def smoke_test(*, suite: str | None, so_far: SoFar = nobody, **selection: object) -> Outcome:
    named = load_suite(suite) if suite else None
    return Selection(**selection).look("smoke-test", lambda session: SmokeTest(session, named), so_far)


def history(**selection: object) -> Outcome:
    return Selection(**selection).look("history", History)


def _rollout(batch: int | None, all_at_once: bool, keep_going: bool) -> Rollout:
    if batch and all_at_once:
        raise UsageProblem("--batch and --all-at-once exclude each other", next_step="give one of them")
    return Rollout(canary=not all_at_once, batch=batch or 0, keep_going=keep_going)
