"""What state an installation's files are in, by their hashes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from patcher.installation.session import Session
from patcher.plan.plan import EARLIER
from patcher.series.model import Series

PRISTINE, UNKNOWN = "pristine", "unknown"
MIXED, DRIFT = "mixed", "drift"


def file_states(session: Session, series: Series) -> list[dict[str, Any]]:
    """Per file of the series: {"path", "state", "sha256", "states"}.

    `states` are all that its bytes fit (a file may be the same in several stages), `state` the first of them in the
    order pristine, then the stages; `an earlier series` for bytes that only the receipt knows, `unknown` for others.
    """
    left = session.receipt.files if session.receipt else {}
    order = [PRISTINE, *(stage.name for stage in series.stages)]
    rows = []
    for path in sorted(series.files):
        sha256 = session.sha256(path)
        fits = [name for name in order if name in series.state_of(path, sha256)]
        if not fits and path in left and left[path].after == sha256:
            fits = [EARLIER]
        rows.append({"path": path, "state": fits[0] if fits else UNKNOWN, "sha256": sha256, "states": fits})
    return rows


def shown(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows for a reader: where a file fits several states, the one that most files are in is named, else its first.

    Most: with one file edited, the others of a tree are still told to be pristine, or at its stage.
    """
    fits = Counter(state for row in rows for state in row["states"])
    return [{**row, "state": max(row["states"], key=fits.__getitem__, default=UNKNOWN)} for row in rows]


def overall_state(rows: Sequence[Mapping[str, Any]], series: Series) -> str:
    """`pristine` or a stage when every file is in it; `drift` when one is unknown; `mixed` when they differ.

    `an earlier series` when one is as only the receipt knows it.
    """
    if any(not row["states"] for row in rows):
        return DRIFT
    if any(EARLIER in row["states"] for row in rows):
        return EARLIER
    for name in (PRISTINE, *(stage.name for stage in series.stages)):
        if all(name in row["states"] for row in rows):
            return name
    return MIXED
