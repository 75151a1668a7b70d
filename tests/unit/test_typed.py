"""Data from elsewhere: what fits its type is taken, and of what does not the first wrong value is named."""

from __future__ import annotations

import pytest
from msgspec import field

from patcher.typed import Count, Frozen, Misfit, Sha256, Time, typed


class Entry(Frozen):
    data: bytes | None = None
    sha256: Sha256 | None = None
    hashes: dict[str, dict[str, Sha256]] = field(default_factory=dict)


class Reply(Frozen):
    when: Time = 0
    count: Count = 0
    ok: bool = False
    words: tuple[str, ...] = ()
    files: dict[str, Entry] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()


@pytest.mark.parametrize("when", [0, 1, 1.5, 249_999_999_999])
def test_times(when):
    assert typed({"when": when}, Reply).when == when


def test_what_is_taken():
    reply = typed({"count": 2**63 - 1, "words": ["\ud800"], "files": {"\ud800": {"data": "aGk="}}, "more": {}}, Reply)
    assert (reply.count, reply.words, reply.files["\ud800"].data) == (2**63 - 1, ("\ud800",), b"hi")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("when", odd) for odd in (float("nan"), float("inf"), -1, 10**12, 10**400, True, None, "1")),
        *(("count", odd) for odd in (1.0, True, -1, 2**63, 10**400, None)),
        *(("ok", odd) for odd in (0, 1, "true", None)),
        *(("words", odd) for odd in ("word", [1], [None], {"a": "b"})),
    ],
)
def test_what_is_not(key, value):
    with pytest.raises(Misfit) as caught:
        typed({key: value}, Reply)
    assert caught.value.path[:1] == (key,)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"files": {"a.b[2]": {}, "x/y.py": {"sha256": "0" * 63}}}, ("files", "x/y.py", "sha256")),
        ({"files": {"a": {"hashes": {"": {"b": "0" * 64, "\ud800": 1}}}}}, ("files", "a", "hashes", "", "\ud800")),
        ({"entries": [{}, {"data": "%"}]}, ("entries", "1", "data")),
        ({"entries": [{}, {"hashes": {"c": {}, "d": 1}}]}, ("entries", "1", "hashes", "d")),
        ({"files": {"a" * 999: 1}}, ("files", "a" * 80)),
        ([], ()),
    ],
)
def test_the_way_to_the_first_wrong_value_is_named(value, path):
    with pytest.raises(Misfit) as caught:
        typed(value, Reply)
    assert caught.value.path == path


def test_a_lone_surrogate_is_no_base64():
    with pytest.raises(Misfit):
        typed({"files": {"a": {"data": "\ud800"}}}, Reply)
