"""Writes a series' directory: the patches, series.toml with every hash, lines.json."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from patcher.errors import SeriesProblem
from patcher.series import udiff, udiff_parse
from patcher.series.catalogue import ABSENT, CORE, LINES, PATCH_FILE, check_against, load_series
from patcher.series.model import PRISTINE, Series, line_digest, sha256
from patcher.series.settings import SETTINGS

NOTE = "Written by ddtree-patch fork export from a git work tree: edit there, not here."


@dataclass(frozen=True)
class PatchText:
    """A patch to be written; ``diff`` is the unified diff alone.  A ``shared`` one goes into the core."""

    name: str
    stage: str
    purpose: str
    diff: bytes
    shared: bool = False

    @property
    def message(self) -> str:
        """What stands above the diff, and the message of the patch's commit."""
        core = f"Shared: {CORE}\n" if self.shared else ""
        return f"{self.name}\n\n{self.purpose}\n\nStage: {self.stage}\n{core}"

    @property
    def text(self) -> bytes:
        return f"{self.message}\n".encode() + self.diff


def write_series(
    directory: Path,
    *,
    name: str,
    package: str,
    versions: Sequence[str],
    ops: Sequence[str],
    stages: Mapping[str, str],
    patches: Sequence[PatchText],
    pristine: Mapping[str, bytes | None],
    replace_core: bool = False,
) -> Series:
    """Write the series and load it again, checked against the pristine files.

    ``stages`` maps names to purposes, in order; those without a patch are left out.  ``pristine`` has the bytes of
    every file that a patch touches, None for one that does not exist.  Shared patches go into the core beside
    ``directory``.  Raises Conflict if a patch does not fit, SeriesProblem if the core has another text of a shared one
    and ``replace_core`` is not set (the other series that pin the old text must then be pinned anew).
    """
    own = [patch for patch in patches if not patch.shared]
    files = {f"{number:04}-{patch.name}.patch": patch for number, patch in enumerate(own, 1)}
    core = {directory.parent / CORE / f"{patch.name}.patch": patch for patch in patches if patch.shared}
    listed = {patch.name: file for file, patch in files.items()}
    listed |= {patch.name: f"../{CORE}/{path.name}" for path, patch in core.items()}
    if not replace_core:
        for path, patch in core.items():
            _must_be_the_same(path, patch)
    used = [stage for stage in stages if any(patch.stage == stage for patch in patches)]
    lines = _line_digests(pristine)
    document = tomlkit.document()
    document.add(tomlkit.comment(NOTE))
    document.update({"name": name, "package": package, "versions": list(versions), "ops": list(ops)})
    document["lines_sha256"] = sha256(lines)
    document["stages"] = _tables({"name": stage, "purpose": stages[stage]} for stage in used)
    document["patches"] = _tables(
        {"file": listed[patch.name], "stage": patch.stage, "purpose": patch.purpose, "sha256": sha256(patch.text)}
        for patch in patches
    )
    states = tomlkit.table(is_super_table=True)
    for touched, row in _states(patches, pristine, used).items():
        states[touched] = _table(row)
    document["files"] = states
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        if PATCH_FILE.fullmatch(old.name) and old.name not in files:
            old.unlink()
    for name, patch in files.items():
        (directory / name).write_bytes(patch.text)
    for path, patch in core.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(patch.text)
    (directory / LINES).write_bytes(lines)
    (directory / SETTINGS).write_bytes(tomlkit.dumps(document).encode())
    series = load_series(directory)
    check_against(series, pristine)
    return series


def _must_be_the_same(path: Path, patch: PatchText) -> None:
    if path.exists() and path.read_bytes() != patch.text:
        raise SeriesProblem(
            f"the commit {patch.name} is not the shared patch of that name",
            where=str(path),
            next_step="take the change back, or bring it to every series with scripts/refresh_series.py",
        )


def _line_digests(pristine: Mapping[str, bytes | None]) -> bytes:
    packed = {
        path: b64encode(b"".join(map(line_digest, udiff.split_lines(data)))).decode()
        for path, data in pristine.items()
        if data is not None
    }
    return json.dumps(packed, indent=0, sort_keys=True).encode() + b"\n"


def _states(
    patches: Sequence[PatchText], pristine: Mapping[str, bytes | None], stages: Sequence[str]
) -> dict[str, dict[str, str]]:
    """For each path its sha256, or "absent", pristine and after each stage."""
    now = dict(pristine)
    rows = {path: {PRISTINE: sha256(data) or ABSENT} for path, data in sorted(pristine.items())}
    for stage in stages:
        for patch in patches:
            if patch.stage == stage:
                for file in udiff_parse.parse(patch.text, patch.name):
                    now[file.path] = udiff.apply(file, now[file.path])
        for path, row in rows.items():
            row[stage] = sha256(now[path]) or ABSENT
    return rows


def _tables(rows: Iterable[Mapping[str, Any]]) -> tomlkit.items.AoT:
    array = tomlkit.aot()
    for row in rows:
        array.append(_table(row))
    return array


def _table(row: Mapping[str, Any]) -> tomlkit.items.Table:
    table = tomlkit.table()
    table.update(row)
    return table
