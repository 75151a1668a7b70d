"""The nodes of one server (multi-node tensor parallel), which are changed together: each runs its own job, in step.

A server alone on its host is a team of one, for which every meeting is over at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

from patcher.errors import DdtreePatchError

T = TypeVar("T")


class NodeFailed(DdtreePatchError):
    """Another node of the same server failed. `cause` is its error, whose exit code this one has."""

    def __init__(self, name: str, cause: DdtreePatchError, where: str) -> None:
        super().__init__(
            f"node {name} of the same server failed: {cause.what}", where=where, next_step=f"see what is said of {name}"
        )
        self.cause = cause
        self.exit_code = cause.exit_code


class Team:
    """Where the nodes of one server meet."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._changed = threading.Condition()
        self._brought: list[dict[str, object]] = []  # per meeting, what each node brought to it
        self._gone: dict[str, DdtreePatchError | None] = {}

    def nodes(self) -> dict[str, Node]:
        return {name: Node(self, name) for name in self.names}

    def gather(self, name: str, meeting: int, value: T) -> dict[str, T]:
        """What every node brings to this meeting, once all are there; raises NodeFailed when one left with an error."""
        with self._changed:
            while len(self._brought) <= meeting:
                self._brought.append({})
            brought = self._brought[meeting]
            brought[name] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(other in brought or other in self._gone for other in self.names))
            for other in self.names:
                if other not in brought:
                    raise NodeFailed(other, self._gone[other] or DdtreePatchError("it left"), name)
            return cast(dict[str, T], dict(brought))

    def come(self, name: str, meeting: int, timeout: float) -> bool:
        """Whether the others come to this meeting, or have left, within `timeout` seconds. Raises NodeFailed for one
        that comes with an error, or left with one."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: all(
                    other in self._there(meeting) or other in self._gone for other in self.names if other != name
                ),
                timeout,
            )
            for other in self.names:
                error = self._there(meeting).get(other) or self._gone.get(other)
                if other != name and isinstance(error, Exception):
                    raise NodeFailed(other, _typed(error), name)
            return there

    def _there(self, meeting: int) -> dict[str, object]:
        return self._brought[meeting] if meeting < len(self._brought) else {}

    def leave(self, name: str, error: DdtreePatchError | None) -> None:
        with self._changed:
            self._gone.setdefault(name, error)
            self._changed.notify_all()


class Node:
    """One host's part in its team. Every node of a team comes to the same meetings in the same order."""

    def __init__(self, team: Team, name: str) -> None:
        self._team = team
        self._meetings = 0
        self.name = name

    @property
    def alone(self) -> bool:
        return len(self._team.names) == 1

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all nodes of the server."""
        return self._team.names

    def share(self, value: T) -> dict[str, T]:
        """Wait for the others: {node: what it brought}. Raises NodeFailed when one has left with an error."""
        self._meetings += 1
        return self._team.gather(self.name, self._meetings - 1, value)

    def wait(self, timeout: float) -> bool:
        """Whether the others come to the next meeting within `timeout` seconds; raises NodeFailed when one failed."""
        return self._team.come(self.name, self._meetings, timeout)

    def look(self) -> None:
        """Raise NodeFailed when another node has failed on its way to the next meeting."""
        self.wait(0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside counts only if every node has done it: raises the own error, else NodeFailed.

        After their first meeting the nodes do everything that can fail inside such blocks, so that a failure finds all
        of them at the same place, and they can go back in step too.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # raised below, when the others know
            failure = error
        outcomes = self.share(failure)
        if failure is not None:
            raise failure
        for name, other in outcomes.items():
            if other is not None:
                raise NodeFailed(name, _typed(other), self.name)

    def leave(self, error: DdtreePatchError | None) -> None:
        """The job of this node is over; whoever still waits for it learns so."""
        self._team.leave(self.name, error)


def _typed(error: Exception) -> DdtreePatchError:
    return error if isinstance(error, DdtreePatchError) else DdtreePatchError(repr(error))


def alone(name: str) -> Node:
    """The only node of a server."""
    return Team([name]).nodes()[name]
