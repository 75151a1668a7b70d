"""One command over its hosts: every host is prepared before any is changed, and they are changed wave by wave.

The hosts of one multi-node server are a unit: prepared, changed and put back together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

from patcher import interrupts
from patcher.errors import DdtreePatchError, unexpected
from patcher.hosts import HostSettings
from patcher.report.outcome import HostResult, Outcome
from patcher.report.progress import Progress
from patcher.rollout.lane import Lane
from patcher.rollout.unit import NodeFailed, PhaseFailed, Unit, start

_LOOK = 0.1  # seconds between two looks for an interrupt
_PATIENCE = 30.0  # seconds that an interrupted job gets to reach its next step before its connection is closed


class Job(Protocol):
    """The work on one unit. `prepare` only reads; `execute` does what prepare decided."""

    def prepare(self) -> None: ...

    def execute(self) -> None: ...


@dataclass(frozen=True)
class Rollout:
    """In which order hosts are changed.

    Attributes:
        canary: one unit (a host, or all hosts of a multi-node server) goes first, alone.
        batch: how many units are changed at a time after that; 0 for all that are left.
        keep_going: change the good hosts although others could not be prepared or failed.
        by_server: the hosts of one server are a unit; else each host is one.
    """

    canary: bool = False
    batch: int = 0
    keep_going: bool = False
    by_server: bool = True

    def waves(self, units: Sequence[_Work]) -> Iterator[Sequence[_Work]]:
        """The units of each wave."""
        left = list(units)
        first = 1 if self.canary and len(left) > 1 else 0
        while left:
            size = first or self.batch or len(left)
            yield left[:size]
            left, first = left[size:], 0


MakeJob = Callable[[Unit[Lane]], Job]


class _Work:
    """One unit, and the job that is done on it."""

    def __init__(self, lanes: Sequence[Lane], make_job: MakeJob) -> None:
        self.lanes, self.make_job = lanes, make_job
        self.unit = Unit(lanes)
        self.job: Job | None = None

    @property
    def failed(self) -> list[str]:
        """The names of its hosts that failed."""
        return [lane.result.host for lane in self.lanes if lane.result.error]

    def prepare(self) -> None:
        self._guard(self._prepare)
        for lane in self.lanes:  # those that only another one held up are left, and say so
            if isinstance(lane.result.error, NodeFailed):
                lane.result.error = None
            lane.prepared = lane.result.error is None

    def _prepare(self) -> None:
        self.unit.each(Lane.connect)
        job = self.make_job(self.unit)
        job.prepare()
        self.job = job

    def execute(self) -> None:
        for lane in self.lanes:
            lane.begun = True
        if self.job is not None:
            self._guard(self.job.execute)
        for lane in self.lanes:
            lane.ended = True

    def leave(self, why: str) -> None:
        for lane in self.lanes:
            lane.leave(why)

    def _guard(self, work: Callable[[], None]) -> None:
        """A unit's failure is part of its hosts' results, so that the others' results are not lost."""
        errors: dict[str, DdtreePatchError] = {}
        try:
            work()
        except PhaseFailed as failure:
            errors = dict(failure.errors)
        except DdtreePatchError as error:
            errors = dict.fromkeys(self.unit.names, error)
        except Exception as error:
            errors = {name: unexpected(error, name) for name in self.unit.names}
        for lane in self.lanes:
            lane.result.error = errors.get(lane.result.host)


def run_on_hosts(
    command: str,
    hosts: Sequence[HostSettings],
    make_job: MakeJob,
    progress: Progress,
    rollout: Rollout,
    so_far: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run a job on each unit and give the outcome; failures are in the hosts' results, and are not raised.

    When one host cannot be prepared, none is executed, and after a wave with a failure no other begins, unless
    `rollout.keep_going`. `so_far` is called with what is known when all are prepared, and after each wave: hosts that
    have not ended are Interrupted there, as they are if nothing more is heard of this command.

    After a KeyboardInterrupt each job stops before its next step, and what has not ended by then is Interrupted; after
    a second one nothing is waited for.
    """
    lanes = [Lane(host, HostResult(host.name, tell=progress.for_host(host.name))) for host in hosts]
    units = [_Work(members, make_job) for members in _by_unit(lanes, rollout.by_server)]
    running: list[Future[None]] = []

    def each(chosen: Sequence[_Work], work: Callable[[_Work], None]) -> None:
        running.clear()
        with interrupts.deferred():
            for one in chosen:
                running.append(start(lambda one=one: work(one), ", ".join(one.unit.names)))  # type: ignore[misc]
            _wait(running)
        for future in running:
            future.result()  # raises what no unit takes for its hosts' failure
        so_far(known(stopped=False))

    def known(stopped: bool) -> Outcome:
        return Outcome(command, tuple(lane.so_far() for lane in lanes), stopped=stopped)

    stopped = False
    try:
        each(units, _Work.prepare)
        _roll_out(units, rollout, lambda wave: each(wave, _Work.execute))
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


def _by_unit(lanes: Sequence[Lane], by_server: bool) -> Iterable[list[Lane]]:
    """The lanes of the hosts, those of one server together."""
    units: dict[str, list[Lane]] = {}
    for lane in lanes:
        server = lane.host.server if by_server else ""
        units.setdefault(f"server {server}" if server else f"host {lane.host.name}", []).append(lane)
    return units.values()


def _roll_out(units: Sequence[_Work], rollout: Rollout, execute: Callable[[Sequence[_Work]], None]) -> None:
    """Execute the units that are prepared, wave by wave; the others, and those after a failure, are left."""
    unprepared = _failed(units)
    ready = [unit for unit in units if not unit.failed]
    for unit in units:
        if unit not in ready or (unprepared and not rollout.keep_going):
            unit.leave(f"{', '.join(unit.failed or unprepared)} could not be prepared")
    if unprepared and not rollout.keep_going:
        return
    failed: list[str] = []
    for wave in rollout.waves(ready):
        if failed and not rollout.keep_going:
            for unit in wave:
                unit.leave(f"{', '.join(failed)} failed before")
        else:
            execute(wave)
            failed += _failed(wave)


def _failed(units: Iterable[_Work]) -> list[str]:
    return [name for unit in units for name in unit.failed]
