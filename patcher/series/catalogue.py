"""The catalogue of patch series: loaded, and checked as a whole before any host is asked.

A series is a directory: series.toml, the patches, and lines.json, which holds for each pristine file the first bytes of
each line's sha256.  The latter names the very line in which an installed file differs, without any text of that file.

What several series share lies once, in the folder ``core`` beside them: patches that only add files.  A series names
such a patch as ``../core/NAME.patch`` and pins its sha256.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from patcher.errors import Conflict, SeriesProblem
from patcher.series import udiff, udiff_parse
from patcher.series.model import PRISTINE, UNKNOWN, FileState, Patch, Series, Stage, line_digest, sha256
from patcher.series.settings import SETTINGS, PatchTable, StageTable, problem, read_settings
from patcher.series.support import load_support
from patcher.series.udiff_names import nested
from patcher.series.versions import order
from patcher.shipped import shipped

ROOT_VARIABLE = "DDTREE_PATCH_SERIES_ROOT"
ABSENT = "absent"
LINES = "lines.json"
CORE = "core"
DIGEST_SIZE = len(line_digest(b""))
PATCH_FILE = re.compile(r"\d{4}-([a-z0-9][a-z0-9-]*)\.patch")
CORE_FILE = re.compile(rf"\.\./{CORE}/([a-z0-9][a-z0-9-]*)\.patch")
STAGE_NAME = re.compile(r"[a-z][a-z0-9-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")


def load_series(directory: Path) -> Series:
    """Read and check one series.  Raises SeriesProblem, which names the file and what is wrong with it."""
    where = str(directory / SETTINGS)
    table = read_settings(directory)
    if not table.package.isidentifier():
        raise problem(f"{table.package!r} is no name of a package", where)
    stages = tuple(_stage(entry, where) for entry in table.stages)
    series = Series(
        name=table.name,
        package=table.package,
        versions=table.versions,
        stages=stages,
        patches=tuple(_patch(directory, entry, where) for entry in table.patches),
        files={path: _file_state(path, entry, stages, where) for path, entry in table.files.items()},
        ops=table.ops,
        line_digests=_lines(directory, table.lines_sha256),
        directory=directory,
        support=load_support(directory),
    )
    _check_stages(series, where)
    _check_paths(series, where)
    for path in series.files:
        _check_chain(series, path, where)
    return series


def check_against(series: Series, pristine: Mapping[str, bytes | None]) -> None:
    """Prove with the pristine files that each stage has the hashes that series.toml says; raises SeriesProblem."""
    for path, file in series.files.items():
        if sha256(pristine[path]) != file.pristine:
            raise problem(f"{path} is not the pristine file that series.toml names", series.name)
        for stage in series.stages:
            try:
                series.render(path, pristine[path], stage.name)
            except Conflict as error:
                raise problem(f"stage {stage.name} does not come out right: {error}", series.name) from error


def catalogue(root: Path | None = None) -> tuple[Series, ...]:
    """Every series below ``root`` (else $DDTREE_PATCH_SERIES_ROOT, else patches/ beside this package), by version.

    Raises SeriesProblem if there is none, one is wrong, or two claim the same version of the same package.
    """
    if root is None:
        root = Path(os.environ.get(ROOT_VARIABLE) or shipped("patches"))
    if (root / CORE / SETTINGS).exists():
        raise problem(f"{CORE}/ holds what series share and cannot be a series itself", str(root / CORE / SETTINGS))
    found = tuple(load_series(path.parent) for path in sorted(root.glob(f"*/{SETTINGS}")))
    if not found:
        raise SeriesProblem(
            "no series found", where=str(root), next_step=f"Name the directory of the series in ${ROOT_VARIABLE}."
        )
    claims: dict[tuple[str, str], Path] = {}
    for series in found:
        for version in series.versions:
            other = claims.setdefault((series.package, version), series.directory)
            if other != series.directory:
                both = f"{other.name} and {series.directory.name}"
                raise problem(f"{both} are both for {series.package} {version}", str(root))
    return tuple(sorted(found, key=lambda series: (series.package, order(series.versions[0]))))


def _stage(entry: StageTable, where: str) -> Stage:
    if not STAGE_NAME.fullmatch(entry.name) or entry.name in (PRISTINE, UNKNOWN):
        raise problem(f"{entry.name!r} is no name for a stage", where)
    return Stage(entry.name, entry.purpose)


def _patch(directory: Path, entry: PatchTable, where: str) -> Patch:
    shared = CORE_FILE.fullmatch(entry.file)
    name = shared or PATCH_FILE.fullmatch(entry.file)
    if not name:
        raise problem(f"{entry.file!r} is not named like 0001-some-name.patch or ../{CORE}/some-name.patch", where)
    path = directory.parent / CORE / f"{name[1]}.patch" if shared else directory / entry.file
    raw = _read(path)
    if sha256(raw) != entry.sha256:
        if shared:
            raise SeriesProblem(
                f"the shared patch is not the one that {directory.name} pins: its sha256 differs",
                where=str(path),
                next_step="restore the file, or pin and re-check every series with scripts/refresh_series.py",
            )
        raise problem("the patch is not the one that series.toml names: its sha256 differs", str(path))
    files = _parse(raw, str(path))
    if shared:
        for file in files:
            if file.kind != "create":
                raise problem(f"a shared patch may only add files; this one changes {file.path}", str(path))
    return Patch(name[1], entry.file, entry.stage, entry.purpose, files, entry.sha256)


# A shared patch is read by every series of a catalogue.
_parse = lru_cache(maxsize=32)(udiff_parse.parse)


def _file_state(path: str, entry: Mapping[str, str], stages: tuple[Stage, ...], where: str) -> FileState:
    states = [PRISTINE, *(stage.name for stage in stages)]
    for key in sorted(set(entry) ^ set(states)):
        raise problem(f"files: {path}: {key}: {'unknown key' if key in entry else 'is missing'}", where)
    for value in entry.values():
        if value != ABSENT and not SHA256.fullmatch(value):
            raise problem(f"{value!r} is neither a sha256 nor {ABSENT!r}", f"{where}, {path}")
    hashes = {name: None if value == ABSENT else value for name, value in entry.items()}
    return FileState(hashes.pop(PRISTINE), {name: hashes[name] for name in states[1:]})


def _lines(directory: Path, expected: str) -> dict[str, tuple[bytes, ...]]:
    path = directory / LINES
    raw = _read(path)
    if sha256(raw) != expected:
        raise problem("not the file that series.toml names: its sha256 differs", str(path))
    try:
        packed = {name: b64decode(text, validate=True) for name, text in json.loads(raw).items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise problem(f"cannot be read: {error}", str(path)) from error
    return {
        name: tuple(data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE))
        for name, data in packed.items()
    }


def _check_stages(series: Series, where: str) -> None:
    names = [stage.name for stage in series.stages]
    if len(set(names)) != len(names) or not names:
        raise problem("the stages' names are not distinct, or there is none", where)
    used = [patch.stage for patch in series.patches]
    for stage in used:
        if stage not in names:
            raise problem(f"a patch is of stage {stage!r}, which is not listed", where)
    if used != sorted(used, key=names.index):
        raise problem("the patches are not in the order of their stages", where)
    for name in names:
        if name not in used:
            raise problem(f"no patch is of stage {name}", where)


def _check_paths(series: Series, where: str) -> None:
    names = {patch.name for patch in series.patches}
    own = [patch.name for patch in series.patches if not patch.shared]
    there = {path.name for path in series.directory.glob("*.patch")}
    if len(names) != len(series.patches) or len(there) != len(own):
        raise problem(f"{len(there)} patch files are there, {len(set(own))} distinct names are listed", where)
    touched = {file.path for patch in series.patches for file in patch.files}
    for path in sorted(touched):
        if not path.startswith(f"{series.package}/"):
            raise problem(f"a patch touches {path}, which is not in the installed {series.package}/", where)
    if nested(touched):
        raise problem(f"{nested(touched)} cannot be a file and a directory", where)
    if touched != set(series.files):
        odd = ", ".join(sorted(touched ^ set(series.files)))
        raise problem(f"the files that patches touch and those that are listed differ: {odd}", where)
    pristine = {path for path, file in series.files.items() if file.pristine is not None}
    if pristine != set(series.line_digests):
        odd = ", ".join(sorted(pristine ^ set(series.line_digests)))
        raise problem(f"{LINES} is not about the files that exist pristine: {odd}", where)


def _check_chain(series: Series, path: str, where: str) -> None:
    """The patches fit each other and the pristine lines, and a hash changes exactly where a patch touches the file."""
    before = PRISTINE
    lines = list(series.line_digests[path]) if path in series.line_digests else None
    data = None
    known = lines is None
    for stage in series.stages:
        touched = False
        for patch in series.patches:
            for file in patch.files:
                if patch.stage != stage.name or file.path != path:
                    continue
                touched = True
                try:
                    lines = udiff.splice(file.mapped(line_digest), lines)
                    data = udiff.apply(file, data) if known else None
                except Conflict as error:
                    raise problem(f"{patch.name} does not fit what comes before it: {error}", where) from error
                if lines is None:
                    data, known = None, True
        after = series.sha256(path, stage.name)
        if (after is None) != (lines is None) or (known and sha256(data) != after):
            raise problem(f"{path}: the patches do not produce the hash listed for stage {stage.name}", where)
        if touched == (after == series.sha256(path, before)):
            raise problem(f"{path}: the hash listed for stage {stage.name} contradicts the patches", where)
        before = stage.name


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise problem(f"cannot be read: {error.strerror}", str(path)) from error
