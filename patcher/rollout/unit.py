"""The hosts of one server, which are changed together: phases run on all of them at once, and all fail when one does.

A server on one host is a unit of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Generic, NoReturn, Protocol, TypeVar

from patcher.errors import DdtreePatchError, unexpected
from patcher.report.outcome import HostResult, Step


class OnHost(Protocol):
    """Whatever a command knows of one host."""

    @property
    def result(self) -> HostResult: ...


N = TypeVar("N", bound=OnHost)
M = TypeVar("M", bound=OnHost)
T = TypeVar("T")


class NodeFailed(DdtreePatchError):
    """Another node of the same server failed. `cause` is its error, whose exit code this one has."""

    def __init__(self, name: str, cause: DdtreePatchError, where: str) -> None:
        super().__init__(f"node {name} of the same server failed", where=where, next_step=f"see what is said of {name}")
        self.cause = cause
        self.exit_code = cause.exit_code


class PhaseFailed(Exception):
    """A phase failed on some node of a unit. `errors` has one for each host: its own, or NodeFailed."""

    def __init__(self, errors: Mapping[str, DdtreePatchError]) -> None:
        super().__init__("; ".join(map(str, errors.values())))
        self.errors = errors

    def each(self, make: Callable[[str, DdtreePatchError], DdtreePatchError]) -> PhaseFailed:
        """The same failure with the error of each host made anew: `make(host, error)`."""
        made = PhaseFailed({name: make(name, error) for name, error in self.errors.items()})
        made.__cause__ = self
        return made


class Abandoned(Exception):
    """Raised in a phase that has nothing more to wait for since another node failed."""


def start(work: Callable[[], T], name: str) -> Future[T]:
    """`work` on a thread of its own, which, unlike a pool's, does not keep an interrupted program from ending."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # raised by whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Unit(Generic[N]):
    """`nodes`: what a command knows of each host, the head of a multi-node server first."""

    def __init__(self, nodes: Sequence[N]) -> None:
        self.nodes = tuple(nodes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.result.host for node in self.nodes)

    @property
    def alone(self) -> bool:
        return len(self.nodes) == 1

    def of(self, make: Callable[[N], M]) -> Unit[M]:
        """The same hosts, with something else known of each."""
        return Unit([make(node) for node in self.nodes])

    def each(self, phase: Callable[[N], T], undo: Callable[[N, NodeFailed], None] | None = None) -> list[T]:
        """Run a phase on every node at the same time; gives what each returned.

        When one raises, `undo(node, why)` takes back what the others did. Raises PhaseFailed then, once all have ended.
        """
        done, errors = self._run(phase, self.nodes)
        if not errors:
            return [done[name] for name in self.names]
        failure = self._failure(errors)
        if undo:
            why = {name: error for name, error in failure.errors.items() if isinstance(error, NodeFailed)}
            undone = [node for node in self.nodes if node.result.host in done]
            _, worse = self._run(lambda node: undo(node, why[node.result.host]), undone)
            failure = PhaseFailed({**failure.errors, **worse})
        raise failure

    def until_one(self, phase: Callable[[N, threading.Event], T]) -> list[T]:
        """As `each`; the flag that every node is given is set as soon as one of them has ended, well or not.

        A node that only waits for another ends then, and one that is at work may raise Abandoned.
        """
        over = threading.Event()

        def run(node: N) -> T:
            try:
                return phase(node, over)
            finally:
                over.set()

        return self.each(run)

    @contextmanager
    def step(self, name: str) -> Iterator[list[Step]]:
        """A step on every host; on failure each one's tells its own error."""
        steps: list[Step] = []
        try:
            with ExitStack() as open_steps:
                for node in self.nodes:
                    steps.append(open_steps.enter_context(node.result.step(name)))
                yield steps
        except PhaseFailed as failure:
            for node, step in zip(self.nodes, steps, strict=False):
                step.detail = failure.errors[node.result.host].what
            raise
        except DdtreePatchError as error:  # the operator stopped it as it was announced
            self.fail(error)

    def fail(self, error: DdtreePatchError) -> NoReturn:
        """Raise PhaseFailed with this error for all."""
        raise PhaseFailed(dict.fromkeys(self.names, error)) from error

    def _run(self, phase: Callable[[N], T], nodes: Sequence[N]) -> tuple[dict[str, T], dict[str, DdtreePatchError]]:
        """(what the phase gave, its errors), by host; a host that abandoned it is in neither."""
        done: dict[str, T] = {}
        errors: dict[str, DdtreePatchError] = {}

        def guarded(node: N) -> None:
            name = node.result.host
            try:
                done[name] = phase(node)
            except Abandoned:
                pass
            except DdtreePatchError as error:
                errors[name] = error
            except Exception as error:
                errors[name] = unexpected(error, name)

        if len(nodes) == 1:
            guarded(nodes[0])
        else:
            running = [start(lambda node=node: guarded(node), node.result.host) for node in nodes]  # type: ignore[misc]
            for future in running:
                future.result()
        return done, errors

    def _failure(self, errors: Mapping[str, DdtreePatchError]) -> PhaseFailed:
        first = next(name for name in self.names if name in errors)
        return PhaseFailed({name: errors.get(name) or NodeFailed(first, errors[first], name) for name in self.names})
