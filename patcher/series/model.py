"""What a patch series is: its patches in stages, and what every file's bytes must be in each state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patcher.errors import SeriesProblem
from patcher.series import udiff
from patcher.series.support import Support

PRISTINE = "pristine"
UNKNOWN = "unknown"
GREEDY_STAGE, SAMPLING_STAGE = "greedy", "sampling"  # of the series that are shipped
OLD_STAGE_NAMES = {"ddtree": GREEDY_STAGE, "temperature": SAMPLING_STAGE}  # in receipts, journals and habits


@dataclass(frozen=True)
class Stage:
    name: str
    purpose: str


@dataclass(frozen=True)
class Patch:
    """One patch; ``file`` is its path relative to the series' directory, ``sha256`` that of the patch file.

    ``name`` is the file's name without number and suffix.  A ``shared`` patch lies in the core beside the series, and
    other series use the same file.
    """

    name: str
    file: str
    stage: str
    purpose: str
    files: tuple[udiff.FilePatch, ...]
    sha256: str

    @property
    def shared(self) -> bool:
        return self.file.startswith("../")


@dataclass(frozen=True)
class FileState:
    """sha256 of one file, pristine and after each stage; None where the file does not exist."""

    pristine: str | None
    after: Mapping[str, str | None]


@dataclass(frozen=True)
class Series:
    """``line_digests`` maps each file that exists pristine to the digests (see ``line_digest``) of its lines."""

    name: str
    package: str
    versions: tuple[str, ...]
    stages: tuple[Stage, ...]
    patches: tuple[Patch, ...]
    files: Mapping[str, FileState]
    ops: tuple[str, ...]
    line_digests: Mapping[str, tuple[bytes, ...]]
    directory: Path
    support: Support

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that a file can be in, from pristine to the last stage."""
        return (PRISTINE, *(stage.name for stage in self.stages))

    def stage_called(self, name: str) -> str | None:
        """The stage of this name, or of this old name; None if there is none."""
        return next((state for state in (name, current_stage_name(name)) if state in self.states[1:]), None)

    def sha256(self, path: str, state: str) -> str | None:
        """What the file's sha256 is in that state; None where it does not exist."""
        file = self.files[path]
        return file.pristine if state == PRISTINE else file.after[state]

    def state_of(self, path: str, sha256: str | None) -> frozenset[str]:
        """The states in which the file has this hash (None: does not exist); {"unknown"} if there is none."""
        states = frozenset(state for state in self.states if self.sha256(path, state) == sha256)
        return states or frozenset({UNKNOWN})

    def render(self, path: str, pristine: bytes | None, stage: str) -> bytes | None:
        """The file's bytes after ``stage``.  Raises Conflict where a hunk does not fit, or the hash is another."""
        return self.move(path, pristine, PRISTINE, stage)

    def move(self, path: str, data: bytes | None, start: str, end: str) -> bytes | None:
        """The file's bytes in state ``end`` from those in state ``start``, forwards or backwards."""
        for patch in self._between(path, start, end):
            data = udiff.apply(patch, data)
        if sha256(data) != self.sha256(path, end):
            raise SeriesProblem(
                f"the patches produce a {path} with another hash than series.toml says",
                where=self.name,
                next_step="Refresh the series from its work tree.",
            )
        return data

    def digests(self, path: str, state: str) -> tuple[bytes, ...]:
        """The digests of the file's lines in ``state``; empty where it does not exist."""
        lines = list(self.line_digests[path]) if path in self.line_digests else None
        for patch in self._between(path, PRISTINE, state):
            lines = udiff.splice(patch.mapped(line_digest), lines)
        return tuple(lines or ())

    def identity(self, stage: str) -> str:
        """One hash for all files after ``stage``: the patched server computes the same over its own files."""
        after = {path: self.sha256(path, stage) for path in self.files}
        return identity(after)

    def _between(self, path: str, start: str, end: str) -> list[udiff.FilePatch]:
        first, last = self.states.index(start), self.states.index(end)
        between = self.states[min(first, last) + 1 : max(first, last) + 1]
        found = [file for patch in self.patches if patch.stage in between for file in patch.files if file.path == path]
        return found if first <= last else [udiff.reverse(file) for file in reversed(found)]


def current_stage_name(name: str) -> str:
    """What a stage is called today."""
    return OLD_STAGE_NAMES.get(name, name)


def sha256(data: bytes | None) -> str | None:
    """hex sha256; None for a file that does not exist."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def line_digest(line: bytes) -> bytes:
    """Four bytes that tell a line, with its line end, from another one."""
    return hashlib.sha256(line).digest()[:4]


def identity(hashes: Mapping[str, str | None]) -> str:
    """sha256 over ``path NUL sha256 newline`` of the files that exist, sorted by path."""
    lines = (f"{path}\0{value}\n" for path, value in sorted(hashes.items()) if value is not None)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
