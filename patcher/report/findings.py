"""What a command found on a host, as types: each says what it is in the JSON document, and how a reader sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows for a reader. `header` None: without one; `detail`: for those who ask for more (`-v`)."""

    header: tuple[str, ...] | None
    rows: Sequence[Sequence[Any]]
    detail: bool = False

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], detail: bool = False) -> Table:
        """Rows that share keys; the columns are the keys in the order of their first appearance."""
        columns = tuple(dict.fromkeys(key for row in rows for key in row))
        return cls(columns, [[row.get(column, "") for column in columns] for row in rows], detail)


@dataclass(frozen=True)
class Case:
    """One check, as a report of tests lists it."""

    name: str
    passed: bool
    detail: str = ""
    skipped: bool = False
    seconds: float = 0.0


class Finding:
    """Base of all; a host has at most one of each type."""

    def as_dict(self) -> dict[str, Any]:
        """Keys of the host in the JSON document, which no other finding has."""
        return {}

    def facts(self) -> Mapping[str, Any]:
        """Lines of the host's one list of facts."""
        return {}

    def tables(self) -> Sequence[Table]:
        return ()

    def cases(self) -> Sequence[Case]:
        return ()

    def raw(self) -> str | None:
        """Text that is the whole result, to be printed byte for byte."""
        return None


class Facts(Finding):
    """Names and values, in the order in which they were found."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}

    def add(self, name: str, value: str) -> None:
        self._facts[name] = value

    def facts(self) -> Mapping[str, Any]:
        return self._facts
