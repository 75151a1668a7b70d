"""Writes a series' directory: the patches, series.toml with every hash, lines.json."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from patcher.series import udiff, udiff_parse
from patcher.series.catalogue import ABSENT, LINES, PATCH_FILE, SETTINGS, check_against, load_series
from patcher.series.model import PRISTINE, Series, line_digest, sha256

NOTE = "Written by scripts/refresh_series.py from a git work tree: edit there, not here."


@dataclass(frozen=True)
class PatchText:
    """A patch to be written; ``diff`` is the unified diff alone."""

    name: str
    stage: str
    purpose: str
    diff: bytes

    @property
    def text(self) -> bytes:
        return f"{self.name}\n\n{self.purpose}\n\nStage: {self.stage}\n\n".encode() + self.diff


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
) -> Series:
    """Write the series and load it again, checked against the pristine files.

    ``stages`` maps names to purposes, in order; those without a patch are left out.  ``pristine`` has the bytes of
    every file that a patch touches, None for one that does not exist.  Raises Conflict if a patch does not fit.
    """
    files = {f"{number:04}-{patch.name}.patch": patch for number, patch in enumerate(patches, 1)}
    used = [stage for stage in stages if any(patch.stage == stage for patch in patches)]
    lines = _line_digests(pristine)
    document = tomlkit.document()
    document.add(tomlkit.comment(NOTE))
    document.update({"name": name, "package": package, "versions": list(versions), "ops": list(ops)})
    document["lines_sha256"] = sha256(lines)
    document["stages"] = _tables({"name": stage, "purpose": stages[stage]} for stage in used)
    document["patches"] = _tables(
        {"file": file, "stage": patch.stage, "purpose": patch.purpose, "sha256": sha256(patch.text)}
        for file, patch in files.items()
    )
    document["files"] = tomlkit.table(is_super_table=True)
    for path, row in _states(patches, pristine, used).items():
        document["files"][path] = _table(row)
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        if PATCH_FILE.fullmatch(old.name) and old.name not in files:
            old.unlink()
    for file, patch in files.items():
        (directory / file).write_bytes(patch.text)
    (directory / LINES).write_bytes(lines)
    (directory / SETTINGS).write_bytes(tomlkit.dumps(document).encode())
    series = load_series(directory)
    check_against(series, pristine)
    return series


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
