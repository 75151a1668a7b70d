"""One command over its hosts: every host is prepared before any is changed, and they are changed wave by wave.

The hosts of one multi-node server are a unit: prepared, changed and put back together.
"""

from __future__ import annotations

import math
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Protocol

from patcher import __version__, interrupts
from patcher.errors import DdtreePatchError, Interrupted, NotTouched
from patcher.hosts import HostSettings
from patcher.report.outcome import HostResult, Outcome
from patcher.report.progress import Progress
from patcher.ssh.connection import Connection, connect
from patcher.team import Node, Team

_LOOK = 0.1  # seconds between two looks for an interrupt
_PATIENCE = 30.0  # seconds that an interrupted job gets to reach its next step before its connection is closed


class Job(Protocol):
    """The work on one host. `prepare` only reads; `execute` does what prepare decided."""

    def prepare(self) -> None: ...

    def execute(self) -> None: ...


MakeJob = Callable[[HostSettings, Connection, HostResult, Node], Job]


@dataclass(frozen=True)
class Rollout:
    """In which order hosts are changed.

    Attributes:
        canary: one unit (a host, or all hosts of a multi-node server) goes first, alone.
        batch: how many units are changed at a time after that; 0 for all that are left.
        keep_going: change the good hosts although others could not be prepared or failed.
    """

    canary: bool = False
    batch: int = 0
    keep_going: bool = False

    def waves(self, units: Sequence[Sequence[_Lane]]) -> Iterator[list[_Lane]]:
        """The lanes of each wave."""
        left = list(units)
        first = 1 if self.canary and len(left) > 1 else 0
        while left:
            size = first or self.batch or len(left)
            yield [lane for unit in left[:size] for lane in unit]
            left, first = left[size:], 0


def run_on_hosts(
    command: str,
    hosts: Sequence[HostSettings],
    make_job: MakeJob,
    progress: Progress,
    rollout: Rollout,
    so_far: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run a job on each host and give the outcome; failures are in the hosts' results, and are not raised.

    When one host cannot be prepared, none is executed, and after a wave with a failure no other begins, unless
    `rollout.keep_going`. `so_far` is called with what is known when all are prepared, and after each wave: hosts that
    have not ended are Interrupted there, as they are if nothing more is heard of this command.

    After a KeyboardInterrupt each job stops before its next step, and what has not ended by then is Interrupted; after
    a second one nothing is waited for.
    """
    units = _units(hosts, make_job, progress)
    lanes = [lane for unit in units for lane in unit]
    running: list[Future[None]] = []

    def each(chosen: Sequence[_Lane], work: Callable[[_Lane], None]) -> None:
        running[:] = [Future() for _ in chosen]
        with interrupts.deferred():
            for lane, future in zip(chosen, running, strict=True):
                _start(work, lane, future)
            _wait(running)
        for future in running:
            future.result()  # raises what no lane takes for its host's failure
        so_far(known(stopped=False))

    def known(stopped: bool) -> Outcome:
        return Outcome(command, tuple(lane.so_far() for lane in _in_order(lanes, hosts)), stopped=stopped)

    stopped = False
    try:
        each(lanes, _Lane.prepare)
        _roll_out(units, rollout, lambda wave: each(wave, _Lane.execute))
    except KeyboardInterrupt:
        stopped = True
    try:
        if stopped:
            progress.cancel()
            progress.announce(
                f"stopping: each host ends the step it is at, if that takes less than {_PATIENCE:g} s; "
                "Ctrl-C again stops at once"
            )
            # A job whose thread has not begun does not begin any more.
            with interrupts.deferred():
                _wait([future for future in running if not future.cancel()], _PATIENCE)
        outcome = known(stopped)  # before the connections are closed: that is no failure of their hosts
        for lane in lanes:
            lane.close()
    except KeyboardInterrupt:  # the connections end with this program
        outcome = known(stopped=True)
    return outcome


def _wait(futures: Sequence[Future[None]], timeout: float = math.inf) -> None:
    """Until all have ended or `timeout` seconds have passed. Raises KeyboardInterrupt."""
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0 and wait(futures, timeout=min(_LOOK, left)).not_done:
        interrupts.check()


def _start(work: Callable[[_Lane], None], lane: _Lane, future: Future[None]) -> None:
    """`work(lane)` on a thread of its own, which, unlike a pool's, does not keep an interrupted program from ending."""

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            work(lane)
            future.set_result(None)
        except BaseException as error:  # raised by whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name=lane.host.name, daemon=True).start()


def _units(hosts: Sequence[HostSettings], make_job: MakeJob, progress: Progress) -> list[list[_Lane]]:
    """The lanes of the hosts, those of one server together."""
    servers: dict[str, list[HostSettings]] = {}
    for host in hosts:
        servers.setdefault(f"server {host.server}" if host.server else f"host {host.name}", []).append(host)
    units = []
    for members in servers.values():
        nodes = Team([host.name for host in members]).nodes()
        units.append(
            [
                _Lane(host, make_job, HostResult(host.name, tell=progress.for_host(host.name)), nodes[host.name])
                for host in members
            ]
        )
    return units


def _roll_out(units: Sequence[Sequence[_Lane]], rollout: Rollout, execute: Callable[[Sequence[_Lane]], None]) -> None:
    """Execute the units that are prepared, wave by wave; the others, and those after a failure, are left."""
    unprepared = _failed(lane for unit in units for lane in unit)
    ready = [unit for unit in units if not _failed(unit)]
    for unit in units:
        for lane in unit:
            if unit not in ready or (unprepared and not rollout.keep_going):
                lane.leave(f"{', '.join(_failed(unit) or unprepared)} could not be prepared")
    if unprepared and not rollout.keep_going:
        return
    failed: list[str] = []
    for wave in rollout.waves(ready):
        if failed and not rollout.keep_going:
            for lane in wave:
                lane.leave(f"{', '.join(failed)} failed before")
        else:
            execute(wave)
            failed += _failed(wave)


def _failed(lanes: Iterator[_Lane] | Sequence[_Lane]) -> list[str]:
    return [lane.result.host for lane in lanes if lane.result.error]


def _in_order(lanes: Sequence[_Lane], hosts: Sequence[HostSettings]) -> list[_Lane]:
    by_name = {lane.host.name: lane for lane in lanes}
    return [by_name[host.name] for host in hosts]


class _Lane:
    """One host: its connection, job and result."""

    def __init__(self, host: HostSettings, make_job: MakeJob, result: HostResult, node: Node) -> None:
        self.host, self.make_job, self.result, self.node = host, make_job, result, node
        self.connection: Connection | None = None
        self.job: Job | None = None
        self.begun = self.ended = False

    def prepare(self) -> None:
        self._guard(self._prepare)

    def _prepare(self) -> None:
        if not self.host.local:
            self.result.tell("connect")
            self.result.doing = "connect"
        self.connection = connect(self.host)
        self.result.doing = ""
        job = self.make_job(self.host, self.connection, self.result, self.node)
        job.prepare()
        self.job = job

    def execute(self) -> None:
        self.begun = True
        try:
            if self.job is not None:
                self._guard(self.job.execute)
        finally:  # whatever ended it: the other nodes wait for this one
            self.node.leave(self.result.error)
        self.ended = True

    def leave(self, why: str) -> None:
        """Not to be touched; a host with an error of its own keeps that."""
        if self.result.error is None:
            self.result.summary = "not touched"
            self.result.error = NotTouched(
                f"not touched, because {why}",
                where=self.result.host,
                next_step="solve that first, leave that host out, or give --keep-going",
            )

    def so_far(self) -> HostResult:
        """What is known of this host, in a copy that its job, which may go on, does not reach."""
        found = self.result
        known = replace(found, steps=list(found.steps), not_done=list(found.not_done), data=dict(found.data))
        if known.error is None and not self.ended:
            waits = self.job is not None and not self.begun
            known.error = Interrupted(
                "not begun: nothing was changed here" if waits else f"not ended; last seen at: {found.doing or 'work'}",
                where=found.host,
                next_step="ddtree-patch status says where the host stands",
            )
        return known

    def _guard(self, work: Callable[[], None]) -> None:
        """One host's failure is part of its result, so that the others' results are not lost."""
        try:
            work()
        except DdtreePatchError as error:
            self.result.error = error
        except Exception as error:
            self.result.error = unexpected(error, self.host.name)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


def unexpected(error: Exception, where: str) -> DdtreePatchError:
    """A bug of this tool as an error that can be pasted into a report."""
    log = "".join(traceback.format_exception(error))
    system = f"ddtree-patch {__version__}, Python {platform.python_version()}, {platform.platform()}"
    return DdtreePatchError(
        f"unexpected {type(error).__name__}: {error}",
        where=where,
        next_step="this is a bug of ddtree-patch: report it with the lines below",
        detail=f"{system}\nargv: {sys.argv[1:]}\n{log}",
    )
