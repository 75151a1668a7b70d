"""Series x installation -> what is to be written.  A plan is data: shown by a dry run and executed as it stands."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patcher.errors import Conflict, Drift, Locked, SeriesProblem
from patcher.moment import local_time
from patcher.plan.drift import Difference, describe
from patcher.plan.server_action import ServerAction
from patcher.series import udiff
from patcher.series.model import PRISTINE, UNKNOWN, Series, sha256
from patcher.wire.types import Change, FileEntry, Inspection, Receipt

EARLIER = "an earlier series"
MIXED = "mixed"


@dataclass(frozen=True)
class Action:
    """What happens to one file; ``kind`` is "create", "modify", "delete" or "already" (nothing).

    ``before`` and ``after`` are sha256, None where the file does not exist; ``old`` and ``new`` the bytes.  With
    ``from_backup`` the host takes the bytes from its own backup; ``new`` is then known only if the host has shown it.
    ``state`` is what was found.
    """

    path: str
    kind: str
    state: str
    before: str | None
    after: str | None
    old: bytes | None
    new: bytes | None
    from_backup: bool = False

    @property
    def data(self) -> bytes | None:
        """The bytes to send."""
        return None if self.from_backup or self.kind == "already" else self.new


@dataclass(frozen=True)
class Plan:
    """``stage_from`` and ``stage_to`` are "pristine", a stage's name or "mixed".

    ``origin`` has per file the sha256 from before the first apply; ``receipt_found`` is the receipt on the host;
    ``server`` is None where nobody has looked at the server.
    """

    series: Series | None
    version: str
    stage_from: str
    stage_to: str
    actions: tuple[Action, ...]
    origin: Mapping[str, str | None]
    receipt_found: Receipt | None
    server: ServerAction | None = None

    @property
    def changes(self) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.kind != "already")

    @property
    def is_noop(self) -> bool:
        """Nothing to write, and the receipt on the host says so already."""
        return not self.changes and _core(self.receipt_found) == self.receipt()

    @property
    def identity(self) -> str | None:
        """Of the files after this plan, as a patched server reports it; None for files without the patch."""
        return self.series.identity(self.stage_to) if self.series and self.stage_to != PRISTINE else None

    def receipt(self) -> dict[str, Any] | None:
        """What the receipt must say after this plan; None if there must be none."""
        if self.series is None or self.stage_to == PRISTINE:
            return None
        return {
            "series": self.series.name,
            "package": self.series.package,
            "version": self.version,
            "stage": self.stage_to,
            "identity": self.identity,
            "files": {
                action.path: {"before": self.origin[action.path], "after": action.after}
                for action in self.actions
                if action.path in self.series.files
            },
        }

    def request(self) -> list[dict[str, Any]]:
        """The actions of a commit request."""
        return [
            {
                "path": action.path,
                "before": action.before,
                "after": action.after,
                "data": None if action.data is None else b64encode(action.data).decode(),
                "backup": action.from_backup,
            }
            for action in self.changes
        ]

    def modules(self) -> list[str]:
        """Dotted names of the modules that are written, for an import check."""
        paths = [action.path for action in self.changes if action.after is not None and action.path.endswith(".py")]
        return [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]

    def as_dict(self) -> dict[str, Any]:
        return {
            "series": self.series.name if self.series else None,
            "version": self.version,
            "stage_from": self.stage_from,
            "stage_to": self.stage_to,
            "identity": self.identity,
            "noop": self.is_noop,
            "actions": [
                {
                    "path": action.path,
                    "kind": action.kind,
                    "state": action.state,
                    "before": action.before,
                    "after": action.after,
                    "from_backup": action.from_backup,
                }
                for action in self.actions
            ],
            "server": self.server and self.server.as_dict(),
        }

    def unified_diff(self) -> bytes:
        """All changes as one diff; a file of which only the host has the new bytes is named in a comment."""
        parts = []
        for action in self.changes:
            if action.new is None and action.after is not None:
                parts.append(f"# {action.path}: restored from the backup on the host, {action.after}\n".encode())
            else:
                parts.append(udiff.make(action.path, action.old, action.new))
        return b"".join(parts)


def make_plan(series: Series, stage: str, inspection: Inspection) -> Plan:
    """The plan that brings every file of the series to ``stage``, from whatever known states they are in.

    ``inspection`` must cover the files of the series and of the receipt.  Raises Drift, which names each file in no
    known state, Locked while someone changes them, and SeriesProblem if the series gives other bytes than it promises.
    """
    refuse_moving_files(inspection)
    receipt = inspection.receipt
    receipt_files = receipt.files if receipt else {}
    actions: list[Action] = []
    origin: dict[str, str | None] = {}
    drifted: list[Difference] = []
    for path in sorted(set(series.files) | set(receipt_files)):
        entry = inspection.files[path]
        told = receipt_files.get(path)
        if told and path not in series.files:
            # An earlier series touched it, this one does not.
            action = _restore(path, entry, told)
            if action is None and inspection.receipt_state != "valid":
                # The package was replaced since: the file belongs to the new installation.
                continue
        else:
            action = _bring(series, path, stage, entry, told)
            origin[path] = _origin(series, path, entry, told)
        if action is None:
            drifted.append(_difference(series, path, entry))
        else:
            actions.append(action)
    if drifted:
        raise drift(drifted, series.package, inspection.version)
    found = _common(series, actions, inspection)
    return Plan(series, inspection.version, found, stage, tuple(actions), origin, receipt)


def make_revert_plan(inspection: Inspection, series: Series | None = None) -> Plan:
    """The plan that undoes what the receipt says; without a receipt, what ``series`` recognises.

    With ``series``, files are also restored by reversing its patches where the host has no backup.  Raises Conflict if
    the receipt is about another version, Drift for files that are neither as before nor as after the apply, Locked
    while someone changes them.
    """
    refuse_moving_files(inspection)
    receipt = inspection.receipt
    if receipt and inspection.receipt_state != "valid":
        raise Conflict(
            f"the receipt is stale: it is about version {receipt.version}, {inspection.version} is installed",
            where=receipt.package,
            next_step="Nothing of it is left to revert: apply anew, or drop the receipt.",
        )
    told: Mapping[str, Change] = {}
    if receipt:
        told = receipt.files
    elif series:
        told = {path: Change(before=file.pristine, after=None) for path, file in series.files.items()}
    actions: list[Action] = []
    drifted: list[Difference] = []
    for path in sorted(told):
        entry = inspection.files[path]
        action = _restore(path, entry, told[path]) if receipt else None
        if series and path in series.files and (action is None or (action.from_backup and entry.before_data is None)):
            before = told[path].before
            if before == series.sha256(path, PRISTINE):
                action = _bring(series, path, PRISTINE, entry, None) or action
        if action is None:
            drifted.append(_difference(series, path, entry))
        else:
            actions.append(action)
    if drifted:
        package = receipt.package if receipt else series.package if series else ""
        raise drift(drifted, package, inspection.version)
    stage = receipt.stage if receipt else PRISTINE
    if series and not receipt:
        stage = _common(series, actions, inspection)
    origin = {path: row.before for path, row in told.items()}
    return Plan(series, inspection.version, stage, PRISTINE, tuple(actions), origin, receipt)


def refuse_moving_files(inspection: Inspection) -> None:
    """What was read while someone changes it is neither old nor new, and no drift. Raises Locked."""
    holder = inspection.lock
    if holder:
        raise Locked(
            f"{holder.who or 'someone'} holds the lock since {local_time(holder.since)} and is changing "
            f"these files (process {holder.pid})",
            where=holder.host,
            next_step="wait until that ends, then run the command again",
        )


def drift(files: list[Difference], package: str, version: str) -> Drift:
    """The error for files of the installed package in no known state."""
    several = len(files) > 1
    return Drift(
        f"{len(files)} files of {package} {version} are in no known state"
        if several
        else f"1 file of {package} {version} is in no known state: {files[0]}",
        where=", ".join(f"{file.path}:{file.line}" if file.line else file.path for file in files),
        next_step="nothing was written; take the edits out, or reinstall the package: "
        f"pip install --force-reinstall --no-deps {package}=={version}",
        detail="\n".join(map(str, files)) if several else "",
    )


def _bring(series: Series, path: str, target: str, entry: FileEntry, told: Change | None) -> Action | None:
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


def _restore(path: str, entry: FileEntry, told: Change) -> Action | None:
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


def _origin(series: Series, path: str, entry: FileEntry, told: Change | None) -> str | None:
    """What a revert must put back: what the receipt remembers, if the file is still as it says, else pristine."""
    if told and entry.sha256 == told.after:
        return told.before
    return series.sha256(path, PRISTINE)


def _difference(series: Series | None, path: str, entry: FileEntry) -> Difference:
    if series and path in series.files:
        return describe(series, path, entry)
    return Difference(path, 0, UNKNOWN, f"neither as the receipt left it nor as before: sha256 {entry.sha256}")


def _common(series: Series, actions: list[Action], inspection: Inspection) -> str:
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


def _core(receipt: Receipt | None) -> dict[str, Any] | None:
    """The part of a receipt that a plan decides."""
    if receipt is None:
        return None
    return {
        "series": receipt.series,
        "package": receipt.package,
        "version": receipt.version,
        "stage": receipt.stage,
        "identity": receipt.identity,
        "files": {path: {"before": told.before, "after": told.after} for path, told in receipt.files.items()},
    }
