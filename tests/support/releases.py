"""The releases of SGLang that have a series, as parameters of a test.

Those that `make test` does not serve are marked long: their wheels and packages are fetched by `make test-long` alone.
"""

import zipfile
from collections.abc import Iterable

import pytest

from patcher.series.catalogue import catalogue
from scripts.rig import target
from scripts.rig.releases import ALWAYS, Release, named

SERIES = [series for series in catalogue() if series.package == "sglang"]


def parameters(versions: Iterable[str]) -> list:
    releases = [named(version) for version in versions]
    return [pytest.param(one, id=one.version, marks=[] if one in ALWAYS else pytest.mark.long) for one in releases]


ALL = parameters(version for series in SERIES for version in series.versions)
# The releases of one series have equal files where it matters.
ONE_A_SERIES = parameters(series.versions[0] for series in SERIES)


def pristine_files(release: Release, paths: Iterable[str]) -> dict[str, bytes | None]:
    """The bytes of files in the release's wheel, None where there is none."""
    with zipfile.ZipFile(target.wheel(release)) as archive:
        there = set(archive.namelist())
        return {path: archive.read(path) if path in there else None for path in paths}
