"""Data from elsewhere (a host's reply, a file of settings, a server's answer) as the types that this tool relies on."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_origin

import msgspec
from msgspec import Meta

T = TypeVar("T")

Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Time = Annotated[float, Meta(ge=0, lt=250_000_000_000)]  # a unix time that can be shown; NaN is outside of any bounds

_OF_TOML = (datetime.date, datetime.datetime)  # which has them as they are; a string is none
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_NAMES = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "date": "a date",
    "datetime": "a time",
    "null": "null",
}


class Misfit(ValueError):
    """Data that does not have its type: `path` are the keys that lead to the first wrong value, `what` the fault."""

    def __init__(self, path: tuple[str, ...], what: str) -> None:
        self.path = path
        self.what = what
        super().__init__(": ".join((*path, what)))


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """What a program says: keys that it does not name are passed over."""


@dataclass_transform(frozen_default=True)
class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a file that people write: a key that it does not name is a mistake."""


def typed(value: Any, kind: type[T]) -> T:
    """`value`, which is made of dicts, lists, texts, numbers and None, as `kind`. Raises Misfit."""
    try:
        return msgspec.convert(value, kind, builtin_types=_OF_TOML)
    except msgspec.ValidationError as error:
        raise _misfit(value, kind, str(error)) from error
    except (ValueError, RecursionError) as error:  # a lone surrogate in base64; data that is too deep
        raise Misfit((), str(error)) from error


def _misfit(value: Any, kind: type[Any], text: str) -> Misfit:
    """msgspec's own words and `$.path[...]` made readable; `[...]` is an object's key that is not a field."""
    what, _, place = text.rpartition(" - at `") if " - at `" in text else (text, "", "")
    path: list[str | int] = []
    here: Any = value
    for field, index in _STEP.findall(place):
        key: str | int = field or (int(index) if index.isdigit() else _culprit(value, here, path, kind, text))
        here = here[key]
        path.append(key)
    one_key = re.search(r"(missing required|unknown) field `(.*)`", what)
    if one_key:
        known = f"; known here: {', '.join(_keys(_kind_at(kind, path)))}" if one_key[1] == "unknown" else ""
        path.append(one_key[2])
        what = "unknown key" + known if one_key[1] == "unknown" else "is missing"
    elif what.startswith("Invalid enum value"):
        what = f"must be one of {', '.join(map(str, _choices(_kind_at(kind, path))))}"
    what = re.sub(r"`([^`]*)`", lambda found: _in_words(found[1]), what)
    what = what.replace("Expected", "must be").replace(", got ", ", not ")
    return Misfit(tuple(str(key)[:80] for key in path), what)


def _in_words(names: str) -> str:
    """`int | null` is "a whole number": that a value may be left out needs no saying."""
    words = names.split(" | ")
    return " or ".join(_NAMES.get(word, word) for word in words if word != "null" or len(words) == 1)


def _culprit(value: Any, here: Any, path: list[str | int], kind: type[Any], text: str) -> str:
    """The key of the object `here`, to which `path` leads, that the fault `text` is about."""
    keys: list[str] = list(here)
    return next(key for key in keys if _fault(_with(value, path, {key: here[key]}), kind) == text)


def _fault(value: Any, kind: type[Any]) -> str:
    try:
        msgspec.convert(value, kind, builtin_types=_OF_TOML)
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


def _kind_at(kind: Any, path: Iterable[str | int]) -> Any:
    """The type of what `path` leads to in a `kind`, as far as structs, lists and tables of them go."""
    for key in path:
        struct = next((one for one in _parts(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)} if struct else {}
        kind = fields.get(str(key), kind)  # a number, or a key of one's own: the type of the elements is in `kind`
    return kind


def _parts(kind: Any) -> list[Any]:
    return [kind, *(part for argument in get_args(kind) for part in _parts(argument))]


def _keys(kind: Any) -> list[str]:
    structs = [one for one in _parts(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    return [field.encode_name for struct in structs[:1] for field in msgspec.structs.fields(struct)]


def _choices(kind: Any) -> list[Any]:
    return [choice for one in _parts(kind) if get_origin(one) is Literal for choice in get_args(one)]
