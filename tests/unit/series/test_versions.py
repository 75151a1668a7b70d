"""Which series is nearest to a release that has none, and what the operator is told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from patcher.errors import UnsupportedVersion
from patcher.series.versions import choose, nearest, order


def series(*versions: str, package: str = "sglang") -> SimpleNamespace:
    return SimpleNamespace(name=f"{package}-{versions[0]}", package=package, versions=versions)


CATALOGUE = (series("0.5.11"), series("0.5.12", "0.5.12.post1"), series("0.5.15"), series("0.5.17"), series("0.5.23"))


@pytest.mark.parametrize(
    ("version", "kind", "near"),
    [
        ("0.5.13", "between", "0.5.12"),
        ("0.5.14", "between", "0.5.15"),
        ("0.5.16", "between", "0.5.15"),
        ("0.5.16.post1", "post-release", "0.5.15"),
        ("0.5.17.post1", "post-release", "0.5.17"),
        ("0.5.17.dev3+g123", "build of someone's own", "0.5.17"),
        ("0.5.17.dev3", "development", "0.5.17"),
        ("0.5.18rc1", "pre-release", "0.5.17"),
        ("0.5.17+acme.2", "build of someone's own", "0.5.17"),
        ("0.5.24", "newer", "0.5.23"),
        ("0.6.0", "newer", "0.5.23"),
        ("0.4.9", "older", "0.5.11"),
        ("0.5.2", "older", "0.5.11"),
        ("main", "no version", "0.5.23"),
    ],
)
def test_what_is_said_of_an_unsupported_release(version, kind, near):
    with pytest.raises(UnsupportedVersion) as caught:
        choose(CATALOGUE, "sglang", version)
    error = caught.value
    assert error.exit_code == 4 and version in error.what and kind in error.what
    assert f"the nearest is sglang-{near}" in error.what and f"--from sglang-{near} " in error.next_step


def test_what_pip_cannot_fetch_is_ported_from_a_copy_of_the_tree():
    for version, editable in (("0.5.17.dev3+g123", False), ("0.5.18", True), ("main", False)):
        with pytest.raises(UnsupportedVersion) as caught:
            choose(CATALOGUE, "sglang", version, editable)
        assert f"fork init {version} --from-tree" in caught.value.next_step
        assert ("editable" in caught.value.what) == editable
    with pytest.raises(UnsupportedVersion) as caught:
        choose(CATALOGUE, "sglang", "0.5.18")
    assert "--to 0.5.18 " in caught.value.next_step and "from-tree" not in caught.value.next_step


def test_a_supported_version_is_that_version_and_no_other_spelling():
    assert choose(CATALOGUE, "sglang", "0.5.12.post1") is CATALOGUE[1]
    assert choose(CATALOGUE, "sglang", "0.5.17", editable=True).name == "sglang-0.5.17"
    with pytest.raises(UnsupportedVersion, match="vllm"):
        choose(CATALOGUE, "vllm", "0.5.17")


numbers = st.integers(0, 40)
releases = st.tuples(st.integers(0, 2), st.integers(0, 9), numbers)


@given(st.sets(releases, min_size=1, max_size=6), releases)
def test_nearest_is_none_further_than_any_other(supported, wanted):
    """Oracle: no supported release lies strictly between the nearest and the wanted one."""
    catalogue = [series(".".join(map(str, one))) for one in supported]
    found = Version(nearest(catalogue, ".".join(map(str, wanted))).versions[0]).release
    low, high = min(found, wanted), max(found, wanted)
    assert not any(low < one < high for one in supported)
    assert wanted not in supported or found == wanted


@given(st.lists(releases, min_size=2), st.randoms())
def test_versions_are_in_the_order_of_packaging(all_releases, rng):
    texts = [".".join(map(str, one)) for one in all_releases]
    rng.shuffle(texts)
    assert [Version(one) for one in sorted(texts, key=order)] == sorted(map(Version, texts))
    assert sorted([*texts, "main"], key=order)[-1] == "main"
