"""A strict reader of unified diffs.

unidiff finds the files and hunks.  What it lets through is checked here, line by line, because each of these has put a
wrong byte somewhere before: text that is mangled, counts that do not add up, names that leave the package, changes that
are no text.  Bytes travel through unidiff as latin-1, which maps each byte to one character and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import Line, PatchedFile, PatchSet

from patcher.errors import SeriesProblem
from patcher.series.udiff import NO_NEWLINE, FilePatch, Hunk, split_lines
from patcher.series.udiff_names import file_name, git_names, nested

FOOTER = "-- "
HUNK_START = re.compile(r"@@ -\d+(,\d+)? \+\d+(,\d+)? @@")
GIT_PLAIN = re.compile(r"index [0-9a-f]+\.\.[0-9a-f]+( 100(644|755))?|(new|deleted) file mode 100644")
GIT_REFUSED = {
    "old mode": "a change of mode",
    "new mode": "a change of mode",
    "new file mode 100755": "an executable file",
    "new file mode 120000": "a symbolic link",
    "new file mode 160000": "a submodule",
    "deleted file mode": "the removal of something other than a plain file",
    "index": "a symbolic link or a submodule",
    "rename": "a rename",
    "copy": "a copy",
    "similarity": "a rename or copy",
    "dissimilarity": "a rewrite",
    "GIT binary patch": "a binary file",
    "Binary file": "a binary file",
}


def parse(raw: bytes, source: str) -> tuple[FilePatch, ...]:
    """Read a patch; ``source`` names it in errors.  Raises SeriesProblem, with the line, for whatever is not plain."""
    lines = [line.decode("latin-1") for line in split_lines(raw)]
    if not lines:
        raise SeriesProblem("the patch is empty", where=source, next_step="Restore the patch file.")
    patch_set = _unidiff(lines, source)
    if any(not hunk for file in patch_set for hunk in file):
        raise _problem(source, len(lines), "a hunk without any line")
    covered = {line.diff_line_no for file in patch_set for hunk in file for line in hunk if line.diff_line_no}
    _check_between_hunks(lines, covered, source)
    if not patch_set:
        raise SeriesProblem(
            "no change of a file in it: not a unified diff", where=source, next_step="Restore the patch file."
        )
    if len(lines) in covered and not lines[-1].endswith("\n"):
        raise _problem(source, len(lines), "the last line has no line end: the patch is cut off")
    files = tuple(_file(file, lines, source) for file in patch_set)
    seen: set[str] = set()
    for parsed, file in zip(files, patch_set, strict=True):
        if parsed.path in seen:
            raise _problem(source, _number(file), f"{parsed.path} is changed twice in one patch")
        seen.add(parsed.path)
    if nested(seen):
        raise _problem(source, len(lines), f"{nested(seen)} cannot be a file and a directory")
    return files


def _number(part: PatchedFile | Line) -> int:
    """The line of the patch that it begins at, from 1; 0 for what the patch has no line of."""
    return part.diff_line_no or 0


def _problem(source: str, line: int, what: str) -> SeriesProblem:
    return SeriesProblem(what, where=f"{source}, line {line}", next_step="Restore the patch file.")


def _unidiff(lines: list[str], source: str) -> PatchSet:
    at = 0

    def feed() -> Iterator[str]:
        nonlocal at
        for line in lines:
            at += 1
            yield line

    try:
        return PatchSet(feed())
    except (UnidiffParseError, ValueError) as error:  # ValueError: a number too long to be one
        # unidiff says what is wrong, but not where; how far it has read is known here.
        raise _problem(source, at, f"not a valid unified diff: {str(error).strip()}") from error


def _check_between_hunks(lines: list[str], covered: set[int], source: str) -> None:
    """Every line outside of hunks must be one that is understood: unidiff takes unknown lines for comments."""
    state = "preamble"
    for number, line in enumerate(lines, 1):
        if number in covered:
            state = "body"
            continue
        text = line.removesuffix("\n")
        previous, state = state, _next_state(state, text)
        if state == "?":
            raise _problem(source, number, _why_refused(previous, text))
        if state not in ("preamble", "footer") and text.endswith("\r"):
            raise _problem(source, number, "the patch has CRLF line ends: it was mangled on its way")
    if state in ("source", "target", "hunk"):
        raise _problem(source, len(lines), "the patch ends in the middle of a file's header")
    if state == "git" and not lines[-1].endswith("\n"):
        raise _problem(source, len(lines), "the last line has no line end: the patch is cut off")


def _next_state(state: str, text: str) -> str:
    """The grammar outside of hunk bodies; "?" for a line that has no place there."""
    if state == "footer":
        return "?" if re.match(r"diff |--- |\+\+\+ |@@ ", text) else "footer"
    if state == "source":
        return "target" if text.startswith("+++ ") else "?"
    if state == "target" or (state in ("body", "blank", "marker") and text.startswith("@@ ")):
        return "hunk" if HUNK_START.match(text) else "?"
    if text.startswith("diff --git ") and state != "hunk":
        return "git"
    if text.startswith("--- ") and state != "hunk":
        return "source"
    if state == "git" and GIT_PLAIN.fullmatch(text):
        return "git"
    if state == "preamble":
        return "?" if text.startswith(("+++ ", "@@ ", "GIT binary patch", "Binary file")) else "preamble"
    if text == NO_NEWLINE and state == "body":
        return "marker"
    if not text:
        return "blank"
    return "footer" if text == FOOTER else "?"


def _why_refused(state: str, text: str) -> str:
    for start, what in GIT_REFUSED.items():
        if text.startswith(start):
            return f"{what} is not supported: {text!r}"
    if state == "source":
        return f"a line '+++ NAME' must follow '--- NAME', not {text!r}"
    if state == "body":
        return f"{text!r} stands behind the lines that the hunk's header counts"
    return f"a line that belongs to no unified diff: {text!r}"


def _file(file: PatchedFile, lines: list[str], source: str) -> FilePatch:
    at = _number(file)
    git = git_names(lines[at - 1], source, at)
    has_header = bool(file)
    names: tuple[str | None, str | None] | None = git
    if has_header:
        header = _number(file[0][0]) - 1
        names = file_name(lines[header - 3], lines[header - 2], source, header - 2)
    info = list(takewhile(GIT_PLAIN.match, lines[at:])) if git else []
    created = any(line.startswith("new file") for line in info)
    deleted = any(line.startswith("deleted file") for line in info)
    if names is None or (not has_header and not (created or deleted)):
        raise _problem(source, at, "a file without any hunk")
    old, new = names
    if has_header and ((created and old is not None) or (deleted and new is not None)):
        raise _problem(source, at, f"the header says both that the file is new or deleted and that it is not: {names}")
    path = old or new
    if path is None or (git is not None and path not in git):
        raise _problem(source, at, "the names in the file's header differ")
    if created and deleted:
        raise _problem(source, at, "the header says both that the file is new and that it is deleted")
    kind = "create" if created or old is None else "delete" if deleted or new is None else "modify"
    hunks = _hunks(file, lines, source)
    if (kind == "create" and any(h.old for h in hunks)) or (kind == "delete" and any(h.new for h in hunks)):
        raise _problem(source, at, f"the hunk does not {kind} {path} as the header says")
    return FilePatch(path, kind, hunks)


def _hunks(file: PatchedFile, lines: list[str], source: str) -> tuple[Hunk, ...]:
    hunks = []
    end = shift = 0
    for parsed in file:
        header = _number(parsed[0]) - 1
        body = _body(parsed, lines, source)
        hunk = Hunk(_index(parsed.source_start, parsed.source_length), header, body)
        new_index = _index(parsed.target_start, parsed.target_length)
        if min(hunk.old_index, new_index) < 0:
            raise _problem(source, header, "a hunk of lines cannot start at line 0")
        if hunk.old_index < end:
            raise _problem(source, header, "the hunk overlaps the one before it, or stands in the wrong order")
        if new_index != hunk.old_index + shift:
            raise _problem(source, header, "the hunk's old and new line numbers contradict the hunks before it")
        if not any(tag != b" " for tag, _ in body):
            raise _problem(source, header, "the hunk changes nothing")
        if hunk.at_start and hunk.old_index:
            raise _problem(source, header, "less context above than below: the hunk would have to stand at line 1")
        end = hunk.old_index + len(hunk.old)
        shift += len(hunk.new) - len(hunk.old)
        hunks.append(hunk)
    return tuple(hunks)


def _index(start: int, length: int) -> int:
    # "-5,0" means behind line 5; "-5,2" means from line 5 on.
    return start if length == 0 else start - 1


def _body(parsed: ParsedHunk, lines: list[str], source: str) -> tuple[tuple[bytes, bytes], ...]:
    body: list[tuple[bytes, bytes]] = []
    first = _number(parsed[0])
    last = max(map(_number, parsed))
    if last < len(lines) and lines[last].startswith("\\"):
        last += 1
    ended: set[bytes] = set()
    for number in range(first, last + 1):
        text = lines[number - 1]
        if text.startswith("\\"):
            if text.removesuffix("\n") != NO_NEWLINE or not body or not body[-1][1].endswith(b"\n"):
                raise _problem(source, number, f"not understood: {text!r}")
            side, data = body[-1]
            body[-1] = side, data.removesuffix(b"\n")
            ended |= {b"-", b"+"} if side == b" " else {side}
            continue
        # A blank context line often loses its one space on the way; the counts say that it is one.
        tag, line = (" ", text) if text in ("\n", "\r\n") else (text[0], text[1:])
        if tag.encode() in ended or (tag == " " and ended):
            raise _problem(source, number, "a line follows one that is marked as the file's last")
        body.append((tag.encode(), line.encode("latin-1")))
    return tuple(body)
