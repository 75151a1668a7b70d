"""support.toml beside a series: which family of worker and backends it is for, and where it has been proven.

It is kept by hand, from results: a proof names the text that was proven by its identity (see ``Series.identity``), so
that a series that was changed since does not boast of it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from patcher.errors import SeriesProblem

SUPPORT = "support.toml"
IDENTITY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Proof:
    """A run that passed: when, of which text (the identity of the last stage), and what shows it."""

    date: date
    identity: str
    shown_by: str


@dataclass(frozen=True)
class Support:
    """``family`` is that of the worker; ``backends`` are attention backends; None where nothing has been proven."""

    family: str = ""
    backends: tuple[str, ...] = ()
    cpu: Proof | None = None
    gpu: Proof | None = None


def load_support(directory: Path) -> Support:
    """What support.toml says; nothing where there is none.  Raises SeriesProblem for what it cannot mean."""
    path = directory / SUPPORT
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return Support()
    except (OSError, ValueError, RecursionError) as error:
        raise _problem(f"cannot be read: {error}", path) from error
    _known_keys(table, {"family", "backends", "cpu", "gpu"}, path)
    family, backends = table.get("family"), table.get("backends")
    if not isinstance(family, str) or not family:
        raise _problem("family is not a name", path)
    if not isinstance(backends, list) or not backends or not all(isinstance(one, str) and one for one in backends):
        raise _problem("backends is not a list of names", path)
    return Support(family, tuple(backends), _proof(table.get("cpu"), path), _proof(table.get("gpu"), path))


def _proof(table: Any, path: Path) -> Proof | None:
    if table is None:
        return None
    if not isinstance(table, dict):
        raise _problem("a proof is a table", path)
    _known_keys(table, {"date", "identity", "shown_by"}, path)
    when, identity, shown_by = (table.get(key) for key in ("date", "identity", "shown_by"))
    if not isinstance(when, date) or isinstance(when, datetime):
        raise _problem("date is not a date, such as 2026-11-30", path)
    if not isinstance(identity, str) or not IDENTITY.fullmatch(identity):
        raise _problem("identity is not a sha256 of a series' files", path)
    if not isinstance(shown_by, str) or not shown_by:
        raise _problem("shown_by does not say what shows it", path)
    return Proof(when, identity, shown_by)


def _known_keys(table: Mapping[str, Any], known: set[str], path: Path) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise _problem(f"unknown key {unknown[0]!r}", path)


def _problem(what: str, path: Path) -> SeriesProblem:
    return SeriesProblem(what, where=str(path), next_step="restore support.toml, or write it from a result")
