"""Names of files in the headers of unified diffs: quoting, prefixes, timestamps, and what is no safe path."""

from __future__ import annotations

import re
from collections.abc import Collection

from patcher.errors import SeriesProblem

DEV_NULL = "/dev/null"
LONGEST_NAME = 240  # bytes; file systems take 255, and a commit needs a few more for the names beside it
# What git and people put in front: a/ b/ by default, the mnemonic pairs (index, work tree, commit, object), --no-index.
PREFIX_PAIRS = {frozenset(pair) for pair in ("ab", "iw", "ci", "cw", "ow", "12")}
PREFIXED = re.compile(r"[abciow12]/")
SPACED_TIME = re.compile(r" +\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?( ?[-+]\d{4}| ?UTC| ?Z)?$")
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
ESCAPE = re.compile(r"\\([0-3][0-7]{2}|[abfnrtv\"\\])|\\")
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", '"': '"', "\\": "\\"}


def file_name(old_line: str, new_line: str, source: str, line: int) -> tuple[str | None, str | None]:
    """(old path, new path) of the lines ``--- NAME`` and ``+++ NAME``; None stands for /dev/null.

    Lines are latin-1 text.  ``line`` is the number of the first.  Raises SeriesProblem for a name that is no safe path.
    """
    return _pair(_header_name(old_line[4:], source, line), _header_name(new_line[4:], source, line + 1), source, line)


def git_names(line: str, source: str, number: int) -> tuple[str | None, str | None] | None:
    """(old path, new path) of a line ``diff --git OLD NEW``; None for any other line."""
    if not line.startswith("diff --git "):
        return None
    rest = line.removeprefix("diff --git ").removesuffix("\n")
    quoted = QUOTED.match(rest)
    if quoted:
        old, new = quoted.group(), rest[quoted.end() + 1 :]
    elif rest.endswith('"'):
        old, _, new = rest.partition(' "')
        new = f'"{new}'
    else:
        # Names may hold spaces; both are the same but for prefixes of one length, so the middle is the border.
        old, new = rest[: len(rest) // 2], rest[len(rest) // 2 + 1 :]
    return _pair(_unquote(old, source, number), _unquote(new, source, number), source, number)


def nested(paths: Collection[str]) -> str:
    """A path that is a file and has another one below it; empty if there is none."""
    above = (path.split("/")[:count] for path in paths for count in range(1, path.count("/") + 1))
    return next((path for path in map("/".join, above) if path in paths), "")


def quote(path: str) -> str:
    """The name as git writes it in a header: in quotes, with escapes, if it holds anything but plain ASCII."""
    data = path.encode()
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in data):
        return path
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in data) + '"'


def _header_name(text: str, source: str, line: int) -> str:
    name = text.removesuffix("\n")
    if name.endswith("\r"):
        raise _problem("the patch has CRLF line ends: it was mangled on its way", source, line)
    if name.startswith('"'):
        quoted = QUOTED.match(name)
        if quoted is None:
            raise _problem(f"a quoted name without an end: {name!r}", source, line)
        return _unquote(quoted.group(), source, line)
    return _unquote(SPACED_TIME.sub("", name.partition("\t")[0]), source, line)


def _unquote(name: str, source: str, line: int) -> str:
    if name.startswith('"'):

        def escaped(match: re.Match[str]) -> str:
            code = match.group(1)
            if code is None:
                raise _problem(f"a name with an unknown escape: {name}", source, line)
            return ESCAPED.get(code) or chr(int(code, 8))

        name = ESCAPE.sub(escaped, name[1:-1])
    try:
        return name.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _problem(f"a name that is not UTF-8: {name!r}", source, line) from error


def _pair(old: str, new: str, source: str, line: int) -> tuple[str | None, str | None]:
    sides = [None if name == DEV_NULL else name for name in (old, new)]
    if None in sides:
        # One side alone cannot tell a prefix from a folder: the usual ones are taken for prefixes.
        sides = [name[2:] if name and PREFIXED.match(name) else name for name in sides]
    elif old != new:
        both = PREFIXED.match(old) and PREFIXED.match(new) and old[2:] == new[2:]
        if not both or frozenset((old[0], new[0])) not in PREFIX_PAIRS:
            raise _problem(f"a rename, or prefixes that are unknown: {old!r} and {new!r}", source, line)
        sides = [old[2:], new[2:]]
    for name in sides:
        if name is not None:
            _must_be_safe(name, source, line)
    return sides[0], sides[1]


def _must_be_safe(path: str, source: str, line: int) -> None:
    parts = path.split("/")
    if any(len(part.encode()) > LONGEST_NAME for part in parts):
        raise _problem("a name that is too long for a file", source, line)
    unsafe = not path or "\\" in path or any(part in ("", ".", "..", ".git") for part in parts)
    if unsafe or any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise _problem(f"not a relative path of plain names: {path!r}", source, line)


def _problem(what: str, source: str, line: int) -> SeriesProblem:
    return SeriesProblem(what, where=f"{source}, line {line}", next_step="Restore the patch file.")
