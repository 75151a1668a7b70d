"""One command over its hosts, in parallel: every host is prepared before any is changed."""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from patcher import __version__
from patcher.config import HostSettings
from patcher.connection import Connection, connect
from patcher.errors import DdtreePatchError, Interrupted, MixedOutcome
from patcher.progress import Progress
from patcher.result import HostResult, Outcome

_PATIENCE = 30.0  # seconds that an interrupted job gets to reach its next step before its connection is closed


class Job(Protocol):
    """The work on one host. `prepare` only reads; `execute` does what prepare decided."""

    def prepare(self) -> None: ...

    def execute(self) -> None: ...


MakeJob = Callable[[HostSettings, Connection, HostResult], Job]


def run_on_hosts(command: str, hosts: Sequence[HostSettings], make_job: MakeJob, progress: Progress,
                 keep_going: bool = False) -> Outcome:
    """Run a job on each host and give the outcome; failures are in the hosts' results, and are not raised.

    When one host cannot be prepared, none is executed, unless `keep_going`. After a KeyboardInterrupt each job stops
    before its next step, and what has not ended by then is Interrupted.
    """
    lanes = [_Lane(host, make_job, HostResult(host.name, tell=progress.for_host(host.name))) for host in hosts]
    with ThreadPoolExecutor(max_workers=len(lanes)) as pool:
        running: list[Future[None]] = []

        def each(chosen: Sequence[_Lane], work: Callable[[_Lane], None]) -> None:
            running[:] = [pool.submit(work, lane) for lane in chosen]
            wait(running)

        try:
            each(lanes, _Lane.prepare)
            unprepared = [lane.result.host for lane in lanes if lane.result.error]
            ready = [lane for lane in lanes if not lane.result.error]
            if unprepared and not keep_going:
                for lane in ready:
                    lane.leave(f"{', '.join(unprepared)} could not be prepared")
            else:
                each(ready, _Lane.execute)
        except KeyboardInterrupt:
            progress.cancel()
            wait(running, timeout=_PATIENCE)
            for lane in lanes:
                lane.interrupt()
        finally:
            for lane in lanes:
                lane.close()
    return Outcome(command, tuple(lane.result for lane in lanes))


class _Lane:
    """One host: its connection, job and result."""

    def __init__(self, host: HostSettings, make_job: MakeJob, result: HostResult) -> None:
        self.host, self.make_job, self.result = host, make_job, result
        self.connection: Connection | None = None
        self.job: Job | None = None
        self.ended = False

    def prepare(self) -> None:
        self._guard(self._prepare)

    def _prepare(self) -> None:
        self.connection = connect(self.host)
        job = self.make_job(self.host, self.connection, self.result)
        job.prepare()
        self.job = job

    def execute(self) -> None:
        self._guard(self.job.execute)
        self.ended = True

    def leave(self, why: str) -> None:
        self.result.summary = "not touched"
        self.result.error = MixedOutcome(f"not touched, because {why}", where=self.result.host,
                                         next_step="solve that first, leave that host out, or give --keep-going")

    def interrupt(self) -> None:
        if not self.ended and self.result.error is None:
            self.result.error = Interrupted("stopped", where=self.result.host,
                                            next_step="ddtree-patch status says where the host stands")

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
    return DdtreePatchError(f"unexpected {type(error).__name__}: {error}", where=where,
                            next_step="this is a bug of ddtree-patch: report it with the lines below",
                            detail=f"{system}\nargv: {sys.argv[1:]}\n{log}")
