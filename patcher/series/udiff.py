"""Unified diffs on bytes: apply, reverse, make.

Applying knows no offset and no fuzz: a hunk fits at the line that it names, or it is a conflict.  Lines end at ``\\n``
only.  Reading a patch is the job of ``udiff_parse``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import diff_bytes, unified_diff

from patcher.errors import Conflict
from patcher.series.udiff_names import quote

NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True)
class Hunk:
    """Lines that are replaced: ``lines`` holds (tag, bytes) with tag one of b" ", b"-", b"+".

    ``old_index`` counts lines of the old file before the hunk; ``patch_line`` is where its header stands in the patch.
    """

    old_index: int
    patch_line: int
    lines: tuple[tuple[bytes, bytes], ...]

    @property
    def old(self) -> tuple[bytes, ...]:
        return tuple(text for tag, text in self.lines if tag != b"+")

    @property
    def new(self) -> tuple[bytes, ...]:
        return tuple(text for tag, text in self.lines if tag != b"-")

    @property
    def at_start(self) -> bool:
        """Less context above than below, or none: the hunk stands at the top of the file."""
        above, below = self._context()
        return above == 0 or above < below

    @property
    def at_end(self) -> bool:
        """Less context below than above, or none: the file ends with the hunk."""
        above, below = self._context()
        return below == 0 or below < above

    def _context(self) -> tuple[int, int]:
        tags = [tag for tag, _ in self.lines]
        above = next(count for count, tag in enumerate(tags) if tag != b" ")
        below = next(count for count, tag in enumerate(reversed(tags)) if tag != b" ")
        return above, below


@dataclass(frozen=True)
class FilePatch:
    """One file's change; ``kind`` is "create", "modify" or "delete"."""

    path: str
    kind: str
    hunks: tuple[Hunk, ...]

    def mapped(self, change: Callable[[bytes], bytes]) -> FilePatch:
        """The same patch with each line's bytes changed."""
        hunks = (replace(hunk, lines=tuple((tag, change(text)) for tag, text in hunk.lines)) for hunk in self.hunks)
        return replace(self, hunks=tuple(hunks))


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their ``\\n``; nothing else ends a line (bytes.splitlines would also split at a lone ``\\r``)."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def apply(patch: FilePatch, old: bytes | None) -> bytes | None:
    """The file after ``patch``; None is a file that does not exist.  Raises Conflict, with file, hunk and line."""
    lines = splice(patch, None if old is None else split_lines(old))
    return None if lines is None else b"".join(lines)


def splice(patch: FilePatch, lines: list[bytes] | None) -> list[bytes] | None:
    """``apply`` on lines, or on digests of lines with a patch that is ``mapped`` to digests."""
    if patch.kind == "create" and lines is not None:
        raise _conflict(patch, "the file that the patch creates exists already")
    if patch.kind != "create" and lines is None:
        raise _conflict(patch, "the file that the patch changes does not exist")
    old = lines or []
    new: list[bytes] = []
    done = 0
    for number, hunk in enumerate(patch.hunks, 1):
        _must_fit(patch, number, hunk, old)
        new += old[done : hunk.old_index]
        new += hunk.new
        done = hunk.old_index + len(hunk.old)
    new += old[done:]
    if patch.kind != "delete":
        return new
    if new:
        raise _conflict(patch, f"the patch removes an empty file, but this one has {len(new)} lines")
    return None


def reverse(patch: FilePatch) -> FilePatch:
    """The patch that undoes ``patch``."""
    kind = {"create": "delete", "delete": "create", "modify": "modify"}[patch.kind]
    swap = {b" ": b" ", b"-": b"+", b"+": b"-"}
    hunks = []
    shift = 0
    for hunk in patch.hunks:
        lines = tuple((swap[tag], text) for tag, text in hunk.lines)
        hunks.append(Hunk(hunk.old_index + shift, hunk.patch_line, lines))
        shift += len(hunk.new) - len(hunk.old)
    return FilePatch(patch.path, kind, tuple(hunks))


def make(path: str, old: bytes | None, new: bytes | None) -> bytes:
    """A unified diff of one file, as git writes it; None is a file that does not exist.  Empty if nothing differs."""
    if old == new:
        return b""
    names = [quote(f"{side}/{path}") for side in "ab"]
    head = f"diff --git {names[0]} {names[1]}\n"
    if old is None:
        head += "new file mode 100644\n"
    if new is None:
        head += "deleted file mode 100644\n"
    sides = ("/dev/null" if old is None else names[0], "/dev/null" if new is None else names[1])
    start, end = (f"{side}\t".encode() if " " in side else side.encode() for side in sides)
    body = diff_bytes(unified_diff, split_lines(old or b""), split_lines(new or b""), start, end)
    ended = (line if line.endswith(b"\n") else b"%s\n%s\n" % (line, NO_NEWLINE.encode()) for line in body)
    return head.encode() + b"".join(ended)


def show(line: bytes | None) -> str:
    """A line for people: invisible differences (line ends, tabs, odd bytes) are made visible."""
    if line is None:
        return "end of file"
    text = repr(line.removesuffix(b"\n").decode("utf-8", "backslashreplace"))
    return text if line.endswith(b"\n") else f"{text} without a line end"


def _must_fit(patch: FilePatch, number: int, hunk: Hunk, lines: list[bytes]) -> None:
    if hunk.old_index > len(lines):
        raise _conflict(patch, f"hunk {number} starts at line {hunk.old_index + 1}, the file has {len(lines)} lines")
    for line, expected in enumerate(hunk.old, hunk.old_index + 1):
        found = lines[line - 1] if line <= len(lines) else None
        if found != expected:
            what = f"hunk {number} does not fit at line {line}: expected {show(expected)}, found {show(found)}"
            raise _conflict(patch, what)
    end = hunk.old_index + len(hunk.old)
    if hunk.at_end and end != len(lines):
        raise _conflict(patch, f"hunk {number} ends the file at line {end}, the file has {len(lines)} lines")


def _conflict(patch: FilePatch, what: str) -> Conflict:
    return Conflict(what, where=patch.path, next_step="Restore the pristine file, or port the series to this version.")
