"""Checks that are all made, also after one that failed."""

from __future__ import annotations

from collections.abc import Callable

from patcher.commands.findings import Looks
from patcher.errors import DdtreePatchError, HostUnreachable, Interrupted
from patcher.report.outcome import HostResult, Step


class Checks:
    """`failures`: of the checks so far, in order; the first decides the exit code."""

    def __init__(self, result: HostResult) -> None:
        self.result = result
        self.failures: list[DdtreePatchError] = []
        self.steps: list[Step] = []

    def step(self, name: str, check: Callable[[Step], str]) -> None:
        """Make a check as a step of its own, whose detail is what the check gives."""

        def as_step() -> None:
            with self.result.step(name) as step:
                step.detail = check(step)

        self.collect(as_step)

    def collect(self, check: Callable[[], None]) -> None:
        """Make a check. Interrupted and HostUnreachable end the others too, and are raised."""
        begun = len(self.result.steps)
        try:
            check()
        except (Interrupted, HostUnreachable):
            raise
        except DdtreePatchError as error:
            self.failures.append(error)
        finally:
            self.steps += self.result.steps[begun:]
            self.result.keep(Looks(tuple(self.steps)))

    def raise_first(self, one: str, several: str) -> None:
        """Raise the first failure, if there is one, with the others in its detail. The summary is `one`, or their
        number and `several`."""
        if self.failures:
            first, *others = self.failures
            self.result.summary = f"{len(self.failures)} {several}" if others else one
            also = [f"also: {other.what}\n  where: {other.where}\n  next: {other.next_step}" for other in others]
            raise first.but(detail="\n".join([*([first.detail] if first.detail else []), *also])) from first
