"""support.toml beside a series: which family of worker and backends it is for, and where it has been proven.

It is kept by hand, from results: a proof names the text that was proven by its identity (see ``Series.identity``), so
that a series that was changed since does not boast of it.
"""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from patcher.errors import SeriesProblem
from patcher.typed import Misfit, Settings, Sha256, typed

SUPPORT = "support.toml"

Text = Annotated[str, Meta(min_length=1)]


class Proof(Settings, frozen=True):
    """A run that passed: when, of which text (the identity of the last stage), and what shows it."""

    date: datetime.date
    identity: Sha256
    shown_by: Text


class Support(Settings, frozen=True):
    """``family`` is that of the worker; ``backends`` are attention backends; None where nothing has been proven."""

    family: Text
    backends: Annotated[tuple[Text, ...], Meta(min_length=1)]
    cpu: Proof | None = None
    gpu: Proof | None = None


NOTHING = Support("", ())


def load_support(directory: Path) -> Support:
    """What support.toml says; nothing where there is none.  Raises SeriesProblem for what it cannot mean."""
    path = directory / SUPPORT
    try:
        return typed(tomllib.loads(path.read_bytes().decode("utf-8")), Support)
    except FileNotFoundError:
        return NOTHING
    except Misfit as misfit:
        raise _problem(str(misfit), path) from misfit
    except (OSError, ValueError, RecursionError) as error:
        raise _problem(f"cannot be read: {error}", path) from error


def _problem(what: str, path: Path) -> SeriesProblem:
    return SeriesProblem(what, where=str(path), next_step="restore support.toml, or write it from a result")
