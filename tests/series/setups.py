"""Which DDTREE servers are tested: of each release that has a series, with and without overlap, with other pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from scripts.rig.releases import ALWAYS, Release
from tests.support import releases


@dataclass(frozen=True)
class Setup:
    """How a server of `release` schedules and pages, and the trees it verifies."""

    release: Release
    overlap: bool
    page_size: int
    budget: int | str = 16  # a number, or a table by running requests
    topk: int = 4

    def __str__(self) -> str:
        return f"{self.release.version}-{'overlap' if self.overlap else 'serial'}-page{self.page_size}"

    @property
    def settings(self) -> dict[str, object]:
        """What CpuServer takes, but for the tree."""
        return {"release": self.release, "overlap": self.overlap, "page_size": self.page_size}

    @property
    def environment(self) -> dict[str, str]:
        """Of family v2: SGLang takes requests back by itself, since its admission seldom lets the pool run short."""
        if self.release.family == "v1":
            return {}
        return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}

    @property
    def tree(self) -> list[str]:
        return ["--speculative-ddtree-budget", str(self.budget), "--speculative-ddtree-topk", str(self.topk)]


def params(setups: Sequence[Setup], always: Sequence[Setup]) -> list:
    """For pytest: `setups`, of which those that are not in `always` are run by `make test-long`."""
    return [pytest.param(one, id=str(one), marks=[] if one in always else pytest.mark.long) for one in setups]


def _setups(release: Release) -> list[Setup]:
    """The release's own defaults first. Between the first two, overlap and pages are taken both ways."""
    if release.family == "v1":
        return [Setup(release, overlap=False, page_size=1)]
    setups = [Setup(release, overlap=True, page_size=1), Setup(release, overlap=False, page_size=16, budget=12)]
    if release in ALWAYS:
        setups += [
            Setup(release, overlap=True, page_size=16, budget="1:32,3:6,6:0", topk=8),
            Setup(release, overlap=False, page_size=1),
        ]
    return setups


RELEASES: list[Release] = [param.values[0] for param in releases.ONE_A_SERIES]
DEFAULTS = [_setups(release)[0] for release in RELEASES]
SETUPS = [setup for release in RELEASES for setup in _setups(release)]
_OLDEST, _MIDDLE, _NEWEST = map(_setups, ALWAYS)
# Between them every way is taken on each commit. DISTRIBUTED: those whose samples of every kind are counted, too.
EVERY_COMMIT = [*_OLDEST, *_MIDDLE[:2], _NEWEST[2]]
DISTRIBUTED = [setup for setup in SETUPS if setup not in (_MIDDLE[1], _NEWEST[2])]
