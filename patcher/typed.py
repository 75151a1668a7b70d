"""Data from elsewhere (a host's reply, a file of settings, a server's answer) as the types that this tool relies on."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar, dataclass_transform

import msgspec
from msgspec import Meta

T = TypeVar("T")

Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Time = Annotated[float, Meta(ge=0, lt=250_000_000_000)]  # a unix time that can be shown; NaN is outside of any bounds

_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


class Misfit(ValueError):
    """Data that does not have its type: `path` are the keys that lead to the first wrong value, `what` the fault."""

    def __init__(self, path: tuple[str, ...], what: str) -> None:
        self.path = path
        self.what = what
        super().__init__(": ".join((*path, what)))


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that it does not name are passed over."""


def typed(value: Any, kind: type[T]) -> T:
    """`value`, which is made of dicts, lists, texts, numbers and None, as `kind`. Raises Misfit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _misfit(value, kind, str(error)) from error
    except (ValueError, RecursionError) as error:  # a lone surrogate in base64; data that is too deep
        raise Misfit((), str(error)) from error


def _misfit(value: Any, kind: type[Any], text: str) -> Misfit:
    """msgspec says `[...]` for an object's key that is not a field; here it is named."""
    what, _, place = text.rpartition(" - at `")
    if not what:
        return Misfit((), text)
    path: list[str | int] = []
    here: Any = value
    for field, index in _STEP.findall(place):
        key: str | int = field or (int(index) if index.isdigit() else _culprit(value, here, path, kind, text))
        here = here[key]
        path.append(key)
    return Misfit(tuple(str(key)[:80] for key in path), what)


def _culprit(value: Any, here: Any, path: list[str | int], kind: type[Any], text: str) -> str:
    """The key of the object `here`, to which `path` leads, that the fault `text` is about."""
    keys: list[str] = list(here)
    return next(key for key in keys if _fault(_with(value, path, {key: here[key]}), kind) == text)


def _fault(value: Any, kind: type[Any]) -> str:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError) as error:
        return str(error)
    return ""


def _with(value: Any, path: list[str | int], new: Any) -> Any:
    """`value` with `new` in the place of what `path` leads to."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: _with(value[key], rest, new)}
    return [_with(old, rest, new) if number == key else old for number, old in enumerate(value)]
