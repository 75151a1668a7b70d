"""The plans of an apply and of a revert, from a series and an installation."""

from __future__ import annotations

from collections.abc import Mapping

from patcher.errors import Conflict, Drift, Locked
from patcher.moment import local_time
from patcher.plan.drift import Difference
from patcher.plan.moves import base_of, bring, common, difference, restore
from patcher.plan.plan import Action, Plan
from patcher.series.model import PRISTINE, Series
from patcher.wire.types import Change, Inspection


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
            action = restore(path, entry, told)
            if action is None and inspection.receipt_state != "valid":
                # The package was replaced since: the file belongs to the new installation.
                continue
        else:
            action = bring(series, path, stage, entry, told)
            origin[path] = base_of(series, path, entry, told)
        if action is None:
            drifted.append(difference(series, path, entry))
        else:
            actions.append(action)
    if drifted:
        raise drift(drifted, series.package, inspection.version)
    found = common(series, actions, inspection)
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
        action = restore(path, entry, told[path]) if receipt else None
        if series and path in series.files and (action is None or (action.from_backup and entry.before_data is None)):
            before = told[path].before
            if before == series.sha256(path, PRISTINE):
                action = bring(series, path, PRISTINE, entry, None) or action
        if action is None:
            drifted.append(difference(series, path, entry))
        else:
            actions.append(action)
    if drifted:
        package = receipt.package if receipt else series.package if series else ""
        raise drift(drifted, package, inspection.version)
    stage = receipt.stage if receipt else PRISTINE
    if series and not receipt:
        stage = common(series, actions, inspection)
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
