"""A series is pinned anew: to the shared patches that lie in the core now, proven on its release's wheel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from patcher.errors import SeriesProblem
from patcher.series import udiff_parse
from patcher.series.catalogue import CORE
from patcher.series.model import Series, sha256
from patcher.series.releases import read
from patcher.series.settings import SETTINGS, PatchTable, read_settings
from patcher.series.write import PatchText, write_series

FindWheel = Callable[[str, str], Path]


def repin(directory: Path, find_wheel: FindWheel) -> Series:
    """Write series.toml anew from the patches that are there, own and shared, and the release's wheel.

    ``find_wheel`` gives the wheel of a package's version; every version of the series must have the same files.
    Raises SeriesProblem or Conflict where a patch does not fit or versions differ; nothing is written then.
    """
    settings = read_settings(directory)
    patches = [_patch(directory, entry) for entry in settings.patches]
    paths = sorted({file.path for patch in patches for file in udiff_parse.parse(patch.text, patch.name)})
    package, versions = settings.package, settings.versions
    pristine = _files(find_wheel(package, versions[0]), package, versions[0], paths)
    for version in versions[1:]:
        other = _files(find_wheel(package, version), package, version, paths)
        for path in paths:
            if sha256(other[path]) != sha256(pristine[path]):
                raise SeriesProblem(
                    f"{path} of {version} is not that of {versions[0]}",
                    where=str(directory / SETTINGS),
                    next_step=f"make a series of its own for {version}",
                )
    return write_series(
        directory,
        name=settings.name,
        package=package,
        versions=versions,
        ops=settings.ops,
        stages={stage.name: stage.purpose for stage in settings.stages},
        patches=patches,
        pristine=pristine,
    )


def unused(root: Path, series: Sequence[Series]) -> list[Path]:
    """The shared patches that no series uses."""
    used = {(one.directory / patch.file).resolve() for one in series for patch in one.patches if patch.shared}
    return sorted(path for path in (root / CORE).glob("*.patch") if path.resolve() not in used)


def _patch(directory: Path, entry: PatchTable) -> PatchText:
    """A patch as it lies there; what a shared one is for stands in its own head."""
    shared = entry.file.startswith("../")
    raw = (directory.resolve() / entry.file).read_bytes()
    head, start, diff = raw.partition(b"diff --git ")
    name = Path(entry.file).stem.split("-", 0 if shared else 1)[-1]
    words = head.decode().split("\n\n")
    if shared and len(words) < 3:
        raise SeriesProblem(
            "a shared patch says above its diff what it is for",
            where=entry.file,
            next_step="export it from a work tree: ddtree-patch fork export",
        )
    return PatchText(name, entry.stage, words[1] if shared else entry.purpose, start + diff, shared)


def _files(wheel: Path, package: str, version: str, paths: list[str]) -> dict[str, bytes | None]:
    return dict.fromkeys(paths) | dict(read(wheel, package, version, paths))
