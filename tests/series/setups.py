"""Which DDTREE servers are tested: each release that has a series, with and without overlap, with pages of 1 and 16."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from patcher.series.catalogue import catalogue
from scripts.rig.releases import ALWAYS, RELEASES, Release

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setup:
    """How a server of `release` schedules and pages."""

    release: Release
    overlap: bool
    page_size: int

    def __str__(self) -> str:
        return f"{self.release.version}-{'overlap' if self.overlap else 'serial'}-page{self.page_size}"

    @property
    def settings(self) -> dict[str, object]:
        """What CpuServer takes."""
        return {"release": self.release, "overlap": self.overlap, "page_size": self.page_size}


@cache
def served() -> list[Release]:
    """The first version of each series in patches/, oldest first: those of one series have the same patched files."""
    first = {series.versions[0] for series in catalogue(ROOT / "patches")}
    return [release for release in RELEASES.values() if release.version in first]


def release_params(releases: Iterable[Release], always: Sequence[Release] = ALWAYS) -> list:
    """For pytest: `releases`, of which those that are not in `always` are run by `make test-long`."""
    return [pytest.param(one, id=one.version, marks=[] if one in always else pytest.mark.long) for one in releases]


def setup_params(setups: Iterable[Setup], always: Sequence[Setup]) -> list:
    """The same for setups."""
    return [pytest.param(one, id=str(one), marks=[] if one in always else pytest.mark.long) for one in setups]


def _ways(release: Release) -> list[tuple[bool, int]]:
    """(overlap, page size), the release's own defaults first."""
    if release.family == "v1":
        return [(False, 1)]
    return [(True, 1), (False, 16), (True, 16), (False, 1)]


SETUPS = [Setup(release, *way) for release in served() for way in _ways(release)]
_OLDEST, _MIDDLE, _NEWEST = ALWAYS
# Between them every way is taken on each commit.
SETUPS_OF_EVERY_COMMIT = (
    Setup(_OLDEST, False, 1),
    Setup(_MIDDLE, True, 1),
    Setup(_MIDDLE, False, 16),
    Setup(_NEWEST, True, 16),
)
