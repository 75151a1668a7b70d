"""Says whether data from elsewhere has the form that is relied upon.

A shape is: a type; None; a tuple of shapes, one of which must fit; a list of one shape, for a list of any length; a
dict of shapes, whose keys must be there (others may be too); or a Test. Only what the shape names is looked
at, so the depth of the data does not matter.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Test:
    """`problem(value)`: what is wrong with it, empty for nothing."""

    problem: Callable[[Any], str]


def each(shape: Any) -> Test:
    """An object whose keys are not known, and whose values all have this shape."""

    def look(value: Any) -> str:
        if not isinstance(value, dict):
            return _not("an object", value)
        return _first(value.items(), lambda _: shape)

    return Test(look)


def fitting(what: str, fits: Callable[[Any], bool]) -> Test:
    """What `fits` is true for."""
    return Test(lambda value: "" if fits(value) else _not(what, value))


ANY = fitting("anything", lambda value: True)
SHA256 = fitting("a sha256", lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None)
# A unix time that can be shown; NaN fits no comparison.
TIME = fitting("a time", lambda value: type(value) in (int, float) and 0 <= value < 250_000_000_000)
COUNT = fitting("a number", lambda value: type(value) is int and 0 <= value < 1 << 63)


def _is_base64(value: Any) -> bool:
    try:
        return isinstance(value, str) and base64.b64decode(value, validate=True) is not None
    except ValueError:
        return False


BASE64 = fitting("base64", _is_base64)


def problem(value: Any, shape: Any) -> str:
    """In what `value` differs first from `shape`, with the way to it; empty when it fits."""
    if isinstance(shape, Test):
        return shape.problem(value)
    if isinstance(shape, tuple):
        found = [problem(value, one) for one in shape]
        return "" if "" in found else found[-1]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _not("a list", value)
        return _first(enumerate(value), lambda _: shape[0])
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return _not("an object", value)
        missing = [key for key in shape if key not in value]
        if missing:
            return f"{missing[0]} is missing"
        return _first(((key, value[key]) for key in shape), shape.__getitem__)
    if shape is None:
        return "" if value is None else _not("null", value)
    return "" if type(value) is shape else _not(shape.__name__, value)


def _first(items: Any, shape_of: Callable[[Any], Any]) -> str:
    for key, value in items:
        found = problem(value, shape_of(key))
        if found:
            return f"{str(key)[:80]}: {found}"
    return ""


def _not(what: str, value: Any) -> str:
    told = type(value).__name__ if isinstance(value, list | dict) else repr(value)[:80]
    return f"{told} is not {what}"
