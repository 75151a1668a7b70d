"""Each command as a function, options -> Outcome: where options meet settings, catalogue and jobs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from patcher.config import HostSettings, load_config
from patcher.connection import Connection
from patcher.deploy import Job, run_on_hosts
from patcher.errors import UsageProblem
from patcher.jobs.apply import Apply, ApplyOptions
from patcher.jobs.doctor import Doctor
from patcher.jobs.look import Diff, History, List, Status, describe_series
from patcher.jobs.revert import Revert, RevertOptions
from patcher.jobs.serve import Restart, SmokeTest
from patcher.jobs.session import Session
from patcher.jobs.verify import Verify
from patcher.progress import Progress
from patcher.report import console_for
from patcher.result import HostResult, Outcome
from patcher.series import catalogue
from patcher.suite import load_suite


@dataclasses.dataclass(frozen=True)
class Selection:
    """The options that every command has: which hosts, and which installation on them."""

    hosts: tuple[str, ...] = ()
    local: bool = False
    venv: str | None = None
    site_packages: str | None = None
    config: Path | None = None
    as_json: bool = False

    def chosen(self) -> tuple[HostSettings, ...]:
        """The hosts. A venv or tree without a host is one of this machine. Raises UsageProblem when there is none."""
        if self.venv and self.site_packages:
            raise UsageProblem("--venv and --site-packages exclude each other", next_step="give one of them")
        config = load_config(self.config)
        here = self.local or (not self.hosts and bool(self.venv or self.site_packages))
        hosts = config.select(self.hosts) + ((config.local(),) if here else ())
        if not hosts:
            known = ", ".join(config.hosts) or "none"
            raise UsageProblem("no host was given", where=str(config.source or "no hosts.toml"),
                               next_step=f"give --host NAME|ADDRESS or --local (hosts in the file: {known})")
        if self.venv:
            hosts = tuple(dataclasses.replace(host, venv=self.venv, site_packages="") for host in hosts)
        if self.site_packages:
            hosts = tuple(dataclasses.replace(host, site_packages=self.site_packages, venv="") for host in hosts)
        return hosts

    def run(self, command: str, job: Callable[[Session], Job], keep_going: bool = False) -> Outcome:
        """The command's job on each host. The catalogue is loaded, and checked, before any connection is made."""
        hosts = self.chosen()
        series = catalogue()

        def make(host: HostSettings, connection: Connection, result: HostResult) -> Job:
            return job(Session(host, connection, result, series))

        return run_on_hosts(command, hosts, make, Progress(console_for(sys.stderr)), keep_going)


def list_series(**selection: object) -> Outcome:
    chosen = Selection(**selection)
    data = {"series": [describe_series(series) for series in catalogue()]}
    if not (chosen.hosts or chosen.local or chosen.venv or chosen.site_packages):
        return Outcome("list", data=data)
    return dataclasses.replace(chosen.run("list", List), data=data)


def doctor(**selection: object) -> Outcome:
    return Selection(**selection).run("doctor", Doctor, keep_going=True)


def diff(*, up_to: str | None, **selection: object) -> Outcome:
    return Selection(**selection).run("diff", lambda session: Diff(session, up_to or ""), keep_going=True)


def apply(*, dry_run: bool, up_to: str | None, no_restart: bool, no_smoke: bool, keep_going: bool,
          **selection: object) -> Outcome:
    options = ApplyOptions(dry_run=dry_run, up_to=up_to or "", restart=not no_restart, smoke=not no_smoke)
    return Selection(**selection).run("apply", lambda session: Apply(session, options), keep_going)


def verify(**selection: object) -> Outcome:
    return Selection(**selection).run("verify", Verify, keep_going=True)


def status(**selection: object) -> Outcome:
    return Selection(**selection).run("status", Status, keep_going=True)


def revert(*, dry_run: bool, no_restart: bool, **selection: object) -> Outcome:
    options = RevertOptions(dry_run=dry_run, restart=not no_restart)
    return Selection(**selection).run("revert", lambda session: Revert(session, options))


def restart(**selection: object) -> Outcome:
    return Selection(**selection).run("restart", Restart)


def smoke_test(*, suite: str | None, **selection: object) -> Outcome:
    named = load_suite(suite) if suite else None
    return Selection(**selection).run("smoke-test", lambda session: SmokeTest(session, named), keep_going=True)


def history(**selection: object) -> Outcome:
    return Selection(**selection).run("history", History, keep_going=True)
