"""Versions in their order: which series is nearest to a release that has none, and what kind of release that is."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

from patcher.errors import UnsupportedVersion
from patcher.series.model import Series


def choose(catalogue: Sequence[Series], package: str, version: str, editable: bool = False) -> Series:
    """The series made for exactly this version.

    Raises UnsupportedVersion, which says what kind of release it is (``editable``: the installation is one), names the
    nearest series, and the commands that port it.
    """
    candidates = [series for series in catalogue if series.package == package]
    for series in candidates:
        if version in series.versions:
            return series
    if not candidates:
        raise UnsupportedVersion(
            f"no series is made for {package} {version}",
            where=package,
            next_step=f"there is no series for {package} at all",
        )
    near = nearest(candidates, version)
    supported = sorted((one for series in candidates for one in series.versions), key=order)
    raise UnsupportedVersion(
        f"no series is made for {package} {version}, {_kind(version, supported, editable)}; the nearest is {near.name}",
        where=package,
        next_step=f"port it: {_commands(near, version, editable)}; or install one of: {', '.join(supported)}",
    )


def nearest(series: Sequence[Series], version: str) -> Series:
    """The series of the next older release or of the next newer one, whichever is fewer steps away."""
    made = sorted(((one, entry) for entry in series for one in entry.versions), key=lambda row: order(row[0]))
    older = [row for row in made if order(row[0]) <= order(version)]
    neighbours = older[-1:] + made[len(older) :][:1]
    return min(neighbours, key=lambda row: _distance(row[0], version))[1]


def order(version: str) -> tuple[bool, Version, str]:
    """Sorts versions as packaging does; what is no version comes last."""
    parsed = _parsed(version)
    return parsed is None, parsed or Version("0"), version


def _distance(one: str, version: str) -> tuple[int, ...]:
    ours, wanted = _parsed(one), _parsed(version)
    if ours is None or wanted is None:
        return (0,)
    return abs(ours.major - wanted.major), abs(ours.minor - wanted.minor), abs(ours.micro - wanted.micro)


def _kind(version: str, supported: Sequence[str], editable: bool) -> str:
    parsed = _parsed(version)
    if editable:
        return "an editable installation"
    if parsed is None:
        return "which is no version as packages have them"
    if parsed.local:
        return "a build of someone's own"
    if parsed.is_devrelease:
        return "a development version"
    if parsed.is_prerelease:
        return "a pre-release"
    if parsed.is_postrelease:
        return "a post-release"
    if order(version) < order(supported[0]):
        return "older than every release that has one"
    if order(version) > order(supported[-1]):
        return "newer than every release that has one"
    return "which lies between releases that have one"


def _commands(near: Series, version: str, editable: bool) -> str:
    """What brings the series there: by the release's wheel, or by a copy of the tree where there is none."""
    parsed = _parsed(version)
    if editable or parsed is None or parsed.local or parsed.is_devrelease:
        init = f"ddtree-patch fork init {version} --from-tree COPY_OF_THE_TREE --work DIR"
        return f"{init}, then ddtree-patch fork port --from {near.name} --work DIR"
    return f"ddtree-patch fork port --from {near.name} --to {version} --work DIR"


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None
