"""What state an installation's files are in, by their hashes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from patcher.installation.session import Session
from patcher.plan.plan import EARLIER
from patcher.series.model import Series

PRISTINE, UNKNOWN = "pristine", "unknown"
MIXED, DRIFT = "mixed", "drift"


@dataclass(frozen=True)
class FileState:
    """`states` are all that the file's bytes fit (a file may be the same in several stages), in the order pristine,
    then the stages; `an earlier series` for bytes that only the receipt knows; none for others."""

    path: str
    sha256: str | None
    states: tuple[str, ...]


def file_states(session: Session, series: Series) -> list[FileState]:
    """The state of each file of the series."""
    left = session.receipt.files if session.receipt else {}
    order = [PRISTINE, *(stage.name for stage in series.stages)]
    rows = []
    for path in sorted(series.files):
        sha256 = session.sha256(path)
        fits = tuple(name for name in order if name in series.state_of(path, sha256))
        if not fits and path in left and left[path].after == sha256:
            fits = (EARLIER,)
        rows.append(FileState(path, sha256, fits))
    return rows


@dataclass(frozen=True)
class ShownState:
    """A file for a reader: `state` is one of `states`, or `unknown`."""

    path: str
    state: str
    sha256: str | None
    states: tuple[str, ...]


def shown(rows: Sequence[FileState]) -> list[ShownState]:
    """The rows for a reader: where a file fits several states, the one that most files are in is named, else its first.

    Most: with one file edited, the others of a tree are still told to be pristine, or at its stage.
    """
    fits = Counter(state for row in rows for state in row.states)
    return [
        ShownState(row.path, max(row.states, key=fits.__getitem__, default=UNKNOWN), row.sha256, row.states)
        for row in rows
    ]


def overall_state(rows: Sequence[FileState], series: Series) -> str:
    """`pristine` or a stage when every file is in it; `drift` when one is unknown; `mixed` when they differ.

    `an earlier series` when one is as only the receipt knows it.
    """
    if any(not row.states for row in rows):
        return DRIFT
    if any(EARLIER in row.states for row in rows):
        return EARLIER
    for name in (PRISTINE, *(stage.name for stage in series.stages)):
        if all(name in row.states for row in rows):
            return name
    return MIXED
