"""series.toml as a table: what stands in the file, before it is checked against the patches."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from patcher.errors import SeriesProblem
from patcher.typed import Misfit, Settings, typed

SETTINGS = "series.toml"

Names = Annotated[tuple[str, ...], Meta(min_length=1)]


class StageTable(Settings, frozen=True):
    name: str
    purpose: str


class PatchTable(Settings, frozen=True):
    """`file` is relative to the series' directory."""

    file: str
    stage: str
    purpose: str
    sha256: str


class SeriesTable(Settings, frozen=True):
    """`files` maps each path to its sha256 pristine and after each stage, "absent" where it does not exist."""

    name: str
    package: str
    versions: Names
    ops: Names
    stages: tuple[StageTable, ...]
    patches: tuple[PatchTable, ...]
    files: dict[str, dict[str, str]]
    lines_sha256: str


def read_settings(directory: Path) -> SeriesTable:
    """Raises SeriesProblem, which names the file and the key."""
    path = directory / SETTINGS
    try:
        table = typed(tomllib.loads(path.read_bytes().decode("utf-8")), SeriesTable)
    except Misfit as misfit:
        raise problem(str(misfit), str(path)) from misfit
    except (OSError, ValueError, RecursionError) as error:  # tomllib lets numbers that are too long and depth through
        raise problem(f"cannot be read: {error}", str(path)) from error
    for key in ("versions", "ops"):
        names = getattr(table, key)
        if len(set(names)) != len(names):
            raise problem(f"{key}: must be distinct", str(path))
    return table


def problem(what: str, where: str) -> SeriesProblem:
    return SeriesProblem(what, where=where, next_step="Restore the series, or refresh it from its work tree.")
