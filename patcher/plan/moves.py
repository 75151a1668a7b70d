"""What has to happen to one file of a series, from whatever known state it is in."""

from __future__ import annotations

from patcher.errors import SeriesProblem
from patcher.plan.drift import Difference, describe
from patcher.plan.plan import EARLIER, MIXED, Action
from patcher.series.model import PRISTINE, UNKNOWN, Series, sha256
from patcher.wire.types import Change, FileEntry, Inspection


def bring(series: Series, path: str, target: str, entry: FileEntry, told: Change | None) -> Action | None:
    """The action that brings the file to the state ``target``; None if it is in no known state."""
    old, before, after = entry.data, entry.sha256, series.sha256(path, target)
    states = series.state_of(path, before)
    state = _name(series, states)
    if before == after:
        return Action(path, "already", target, before, after, old, old)
    if UNKNOWN not in states:
        return _action(path, state, before, after, old, series.move(path, old, state, target))
    if not told or told.after != before:
        return None
    # The receipt vouches for the file: an earlier version of the series wrote it.  What it replaced is the base.
    base_states = series.state_of(path, told.before)
    base = None if told.before is None else entry.before_data
    if UNKNOWN in base_states or (base is None and told.before is not None):
        return None
    return _action(path, EARLIER, before, after, old, series.move(path, base, _name(series, base_states), target))


def restore(path: str, entry: FileEntry, told: Change) -> Action | None:
    """The action that puts back what the receipt says was there before; None if the file is neither."""
    old, before, after = entry.data, entry.sha256, told.before
    if before == after:
        return Action(path, "already", PRISTINE, before, after, old, old)
    if before != told.after:
        return None
    return _action(path, "patched", before, after, old, entry.before_data, from_backup=after is not None)


def _action(
    path: str,
    state: str,
    before: str | None,
    after: str | None,
    old: bytes | None,
    new: bytes | None,
    from_backup: bool = False,
) -> Action:
    kind = "create" if before is None else "delete" if after is None else "modify"
    if sha256(old) != before or (not from_backup and sha256(new) != after):
        raise SeriesProblem("the bytes and their sha256 do not belong together", where=path, next_step="Inspect again.")
    return Action(path, kind, state, before, after, old, new, from_backup)


def base_of(series: Series, path: str, entry: FileEntry, told: Change | None) -> str | None:
    """What a revert must put back: what the receipt remembers, if the file is still as it says, else pristine."""
    if told and entry.sha256 == told.after:
        return told.before
    return series.sha256(path, PRISTINE)


def difference(series: Series | None, path: str, entry: FileEntry) -> Difference:
    if series and path in series.files:
        return describe(series, path, entry)
    return Difference(path, 0, UNKNOWN, f"neither as the receipt left it nor as before: sha256 {entry.sha256}")


def common(series: Series, actions: list[Action], inspection: Inspection) -> str:
    """The one state that all files of the series are in, else "mixed" or "an earlier series"."""
    possible = set(series.states)
    for path in series.files:
        possible &= series.state_of(path, inspection.files[path].sha256)
    if possible:
        return _name(series, frozenset(possible))
    return EARLIER if any(action.state == EARLIER for action in actions) else MIXED


def _name(series: Series, states: frozenset[str]) -> str:
    """The first of several states that look the same."""
    return next((state for state in series.states if state in states), UNKNOWN)
