"""Names of files in the headers of unified diffs, as git writes them, and what is no safe path."""

from __future__ import annotations

import re
from collections.abc import Collection

DEV_NULL = "/dev/null"
LONGEST_NAME = 240  # bytes; file systems take 255, and a commit needs a few more for the names beside it
QUOTED = re.compile(r'"((?:[^"\\]|\\(?:[0-3][0-7]{2}|[abfnrtv"\\]))*)"')


def read_name(name: str, side: str) -> str | None:
    """The path in a header's ``a/PATH`` or ``b/PATH`` (``side``), which is latin-1 text; None for /dev/null.

    Raises ValueError for a name that is not of that side, or no safe path.
    """
    if name == DEV_NULL:
        return None
    quoted = QUOTED.fullmatch(name)
    try:
        plain = quoted[1].encode("latin-1").decode("unicode_escape") if quoted else name
        prefix, _, path = plain.encode("latin-1").decode("utf-8").partition("/")
    except UnicodeError:
        prefix = path = ""
    if prefix != side or not _is_safe(path):
        raise ValueError(f"not {side}/ and a relative path of plain names in UTF-8: {name!r}")
    return path


def quote(path: str) -> str:
    """The name as git writes it in a header: in quotes, with escapes, if it holds anything but plain ASCII."""
    data = path.encode()
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in data):
        return path
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in data) + '"'


def nested(paths: Collection[str]) -> str:
    """A path that is a file and has another one below it; empty if there is none."""
    above = (path.split("/")[:count] for path in paths for count in range(1, path.count("/") + 1))
    return next((path for path in map("/".join, above) if path in paths), "")


def _is_safe(path: str) -> bool:
    parts = path.split("/")
    if any(part in ("", ".", "..", ".git") or len(part.encode()) > LONGEST_NAME for part in parts):
        return False
    return "\\" not in path and not any(ord(char) < 32 or ord(char) == 127 for char in path)
