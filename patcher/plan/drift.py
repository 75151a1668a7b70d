"""Says in what an installed file differs from what a series knows: the line, what was expected there, what is there."""

from __future__ import annotations

from dataclasses import dataclass

from patcher.series import udiff
from patcher.series.model import PRISTINE, UNKNOWN, Series, line_digest
from patcher.wire.types import FileEntry


@dataclass(frozen=True)
class Difference:
    """One file in no known state.  ``line`` is the first that differs from ``nearest``, 0 if none can be named."""

    path: str
    line: int
    nearest: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


def describe(series: Series, path: str, entry: FileEntry) -> Difference:
    """``entry`` is what inspect says of the file."""
    data = entry.data
    if data is None:
        return Difference(path, 0, PRISTINE, "the file does not exist")
    installed = [line_digest(line) for line in udiff.split_lines(data)]
    existing = [state for state in series.states if series.sha256(path, state) is not None]
    # The nearest state is the one that leaves the shortest piece between what is equal at the start and at the end.
    pieces = {state: _differing(series.digests(path, state), installed) for state in existing}
    nearest = min(existing, key=lambda state: max(pieces[state][1:]))
    start, old_length, _ = pieces[nearest]
    expected_lines = series.digests(path, nearest)
    found = udiff.split_lines(data)
    if series.sha256(path, PRISTINE) is None and (start == 0 or not data):
        what = "empty" if not data else "not a version of the file that this series adds"
        return Difference(path, 0, nearest, f"the series adds this file, but one exists already: it is {what}")
    installed_text = udiff.show(found[start] if start < len(found) else None)
    expected = _expected(series, path, expected_lines[start] if start < len(expected_lines) else None)
    where = _place(series, path, nearest, start, old_length)
    origin = _origin(series, path, entry, nearest)
    text = f"expected {expected}, installed {installed_text} ({where}; compared with {nearest}; {origin})"
    return Difference(path, start + 1, nearest, text)


def _differing(old: tuple[bytes, ...], new: list[bytes]) -> tuple[int, int, int]:
    """(start, lines of old, lines of new) of the piece that is not equal."""
    shorter = min(len(old), len(new))
    start = 0
    while start < shorter and old[start] == new[start]:
        start += 1
    end = 0
    while end < shorter - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return start, len(old) - start - end, len(new) - start - end


def _expected(series: Series, path: str, digest: bytes | None) -> str:
    """The text of a line of which the digest is known, if a hunk shows it."""
    if digest is None:
        return udiff.show(None)
    for patch in series.patches:
        for file in patch.files:
            for hunk in file.hunks if file.path == path else ():
                for _, line in hunk.lines:
                    if line_digest(line) == digest:
                        return udiff.show(line)
    return "another line"


def _place(series: Series, path: str, state: str, start: int, length: int) -> str:
    """Which hunk, of the next patch that would change the file, covers the lines."""
    later = series.states[series.states.index(state) + 1 :]
    for patch in series.patches:
        for file in patch.files:
            if patch.stage not in later or file.path != path:
                continue
            for number, hunk in enumerate(file.hunks, 1):
                if start < hunk.old_index + len(hunk.old) and hunk.old_index < start + max(length, 1):
                    return f"in hunk {number} of {patch.name}"
            return "outside of the lines that the patches show"
    return "outside of the lines that the patches show"


def _origin(series: Series, path: str, entry: FileEntry, nearest: str) -> str:
    """What the distribution's own RECORD says of the file."""
    record = entry.record_sha256
    if record is not None and record == entry.sha256:
        return f"RECORD lists this very file: it is another build of {series.package} than the one this series is for"
    if record is not None and UNKNOWN not in series.state_of(path, record):
        return "edited since it was installed"
    return f"sha256 {entry.sha256}, not {series.sha256(path, nearest)}"
