"""A strict reader of unified diffs, as git and ``fork export`` write them.

unidiff parses.  What it writes from what it understood must be the patch's own text again, so nothing in a patch is
skipped, repaired or guessed; what is checked here beside that is what the text means.  Bytes travel through unidiff as
latin-1, which maps each byte to one character and back.
"""

from __future__ import annotations

import re
from io import StringIO
from itertools import zip_longest

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import PatchedFile, PatchSet

from patcher.errors import SeriesProblem
from patcher.series.udiff import NO_NEWLINE, FilePatch, Hunk
from patcher.series.udiff_names import nested, read_name

# The lines of git between two files: no rename, no other mode, nothing binary.
GIT_LINES = re.compile(
    r"(diff --git [^\n]+\n((new|deleted) file mode 100644\n)?(index [0-9a-f]+\.\.[0-9a-f]+( 100(644|755))?\n)?)?"
)
NEXT_STEP = "restore the patch; one written by hand: commit its change in a work tree (fork init), then fork export"


def parse(raw: bytes, source: str) -> tuple[FilePatch, ...]:
    """Read a patch; ``source`` names it in errors.  Raises SeriesProblem, with the line, for whatever is not plain."""
    lines = list(StringIO(raw.decode("latin-1")))  # which splits at \n only
    if not raw.endswith(b"\n"):
        raise _problem(source, len(lines), "the patch is empty, or cut off: its last line has no line end")
    start = next((at for at, line in enumerate(lines) if line.startswith(("diff --git ", "--- "))), len(lines))
    for number, line in enumerate(lines[:start], 1):
        if line.startswith(("+++ ", "@@ ")):
            raise _problem(source, number, f"a line of a diff without the file's header: {line!r}")
    patch_set = _patch_set(lines, start, source)
    if not patch_set:
        raise _problem(source, len(lines), "no change of a file in it: not a unified diff")
    files: dict[str, FilePatch] = {}
    for parsed in patch_set:
        at = start + (parsed.diff_line_no or 0)
        file = _file(parsed, start, at, source)
        if file.path in files:
            raise _problem(source, at, f"{file.path} is changed twice in one patch")
        files[file.path] = file
    if nested(files):
        raise _problem(source, len(lines), f"{nested(files)} cannot be a file and a directory")
    return tuple(files.values())


def _problem(source: str, line: int, what: str) -> SeriesProblem:
    return SeriesProblem(what, where=f"{source}, line {line}", next_step=NEXT_STEP)


def _patch_set(lines: list[str], start: int, source: str) -> PatchSet:
    """The files of the patch, whose text from ``start`` on is exactly what unidiff makes of them."""
    unread = iter(lines[start:])
    try:
        patch_set = PatchSet(unread)
    except (UnidiffParseError, ValueError) as error:  # ValueError: a number too long to be one
        number = len(lines) - len(list(unread))
        raise _problem(source, number, f"not a valid unified diff: {str(error).strip()}") from error
    for file in patch_set:
        info = "".join(file.patch_info or ())
        if file.is_binary_file or not GIT_LINES.fullmatch(info):
            what = f"not supported, only a plain change of a text file is: {info.strip()!r}"
            raise _problem(source, start + (file.diff_line_no or 0), what)
    for number, (found, written) in enumerate(zip_longest(lines[start:], StringIO(str(patch_set))), start + 1):
        if found != written and (found is None or _in_full(found) != written):
            raise _problem(source, number, f"not as git and fork export write a patch: {found!r}")
    return patch_set


def _in_full(line: str) -> str:
    """A header's line as unidiff writes it: no length of a hunk is left out, no tab stands behind a name."""
    if line.startswith(("--- ", "+++ ")):
        return line.replace("\t\n", "\n")
    return re.sub(r"^@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@", _lengths, line)


def _lengths(header: re.Match[str]) -> str:
    old, new = (side if "," in side else f"{side},1" for side in header.groups())
    return f"@@ -{old} +{new} @@"


def _file(file: PatchedFile, start: int, at: int, source: str) -> FilePatch:
    if file.source_timestamp or file.target_timestamp:
        raise _problem(source, at, "not as git and fork export write a patch: a time stands behind a name")
    try:
        old, new = read_name(file.source_file, "a"), read_name(file.target_file, "b")
    except ValueError as error:
        raise _problem(source, at, str(error)) from error
    path = old or new
    if path is None or (new or old) != path:
        raise _problem(source, at, f"a rename, or no name: {file.source_file!r} and {file.target_file!r}")
    named = file.source_file if old else file.target_file
    sides = [named.replace(f"{'a' if old else 'b'}/", f"{side}/", 1) for side in "ab"]
    if file.patch_info and file.patch_info[0] != f"diff --git {sides[0]} {sides[1]}\n":
        raise _problem(source, at, "the names in the file's header differ")
    kind = "create" if old is None else "delete" if new is None else "modify"
    hunks = _hunks(file, start, at, source)
    if not hunks and kind == "modify":
        raise _problem(source, at, "a file without any hunk")
    if (kind == "create" and any(h.old for h in hunks)) or (kind == "delete" and any(h.new for h in hunks)):
        raise _problem(source, at, f"the hunk does not {kind} {path} as the header says")
    return FilePatch(path, kind, hunks)


def _hunks(file: PatchedFile, start: int, at: int, source: str) -> tuple[Hunk, ...]:
    hunks = []
    end = shift = 0
    for parsed in file:
        if not any(line.line_type in ("+", "-") for line in parsed):
            raise _problem(source, at, f"a hunk that changes nothing: {str(parsed).strip()!r}")
        header = start + (parsed[0].diff_line_no or 0) - 1
        hunk = Hunk(_index(parsed.source_start, parsed.source_length), header, _body(parsed, header, source))
        new_index = _index(parsed.target_start, parsed.target_length)
        if min(hunk.old_index, new_index) < 0:
            raise _problem(source, header, "a hunk of lines cannot start at line 0")
        if hunk.old_index < end:
            raise _problem(source, header, "the hunk overlaps the one before it, or stands in the wrong order")
        if new_index != hunk.old_index + shift:
            raise _problem(source, header, "the hunk's old and new line numbers contradict the hunks before it")
        if hunk.at_start and hunk.old_index:
            raise _problem(source, header, "less context above than below: the hunk would have to stand at line 1")
        end = hunk.old_index + len(hunk.old)
        shift += len(hunk.new) - len(hunk.old)
        hunks.append(hunk)
    return tuple(hunks)


def _index(start: int, length: int) -> int:
    # "-5,0" means behind line 5; "-5,2" means from line 5 on.
    return start if length == 0 else start - 1


def _body(parsed: ParsedHunk, header: int, source: str) -> tuple[tuple[bytes, bytes], ...]:
    body: list[tuple[bytes, bytes]] = []
    ended: set[str] = set()
    for number, line in enumerate(parsed, header + 1):
        if line.line_type == "\\":
            if str(line) != f"{NO_NEWLINE}\n" or not body or not body[-1][1].endswith(b"\n"):
                raise _problem(source, number, f"not understood: {str(line)!r}")
            tag, text = body[-1]
            body[-1] = tag, text.removesuffix(b"\n")
            ended |= {"-", "+"} if tag == b" " else {tag.decode()}
        elif line.line_type not in (" ", "-", "+"):
            raise _problem(source, number, f"a line behind those that the hunk's header counts: {str(line)!r}")
        elif line.line_type in ended or (line.line_type == " " and ended):
            raise _problem(source, number, "a line follows one that is marked as the file's last")
        else:
            body.append((line.line_type.encode(), line.value.encode("latin-1")))
    return tuple(body)
