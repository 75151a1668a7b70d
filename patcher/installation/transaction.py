"""Writing a plan to a host, and taking it back: the two requests, and what is checked of the reply."""

from __future__ import annotations

import getpass
import json
import socket
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from patcher import __version__
from patcher.errors import Conflict, Locked, RollbackFailed
from patcher.installation.session import Session
from patcher.moment import local_time
from patcher.plan.plan import Plan
from patcher.series.model import PRISTINE
from patcher.wire.types import Committed, Inspection

# Importing SGLang loads torch, which takes many seconds on a cold page cache.
IMPORT_TIMEOUT_S = 300.0
_IMPORT_EACH = """
import importlib, json, sys
good = []
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except Exception:
        continue
    good.append(name)
print("importable:" + json.dumps(good))
"""


def commit(session: Session, plan: Plan, command: str, imports: Sequence[str]) -> Committed:
    """Write the plan in one transaction; gives the agent's reply.

    Raises the agent's typed error, with nothing changed, Locked when someone else's commit came between the plan and
    this one, or Conflict when what was read back is not what was sent.
    """
    receipt = plan.receipt()
    try:
        reply = session.target.commit(
            actions=plan.request(),
            receipt=receipt and receipt | _signature(),
            imports=list(imports),
            history=history_line(command, plan),
            store=_store(plan),
            pycache_prefixes=_caches(session),
        )
    except Conflict as conflict:
        _refuse_if_overtaken(session, conflict)
        raise
    session.committed = reply.commit_time
    wrong = [action.path for action in plan.changes if reply.read_back.get(action.path) != action.after]
    if wrong:
        raise Conflict(
            f"read back after the commit, these files are not what was written: {', '.join(wrong)}",
            where=session.host.name,
            next_step="ddtree-patch status, then revert; suspect the file system",
        )
    return reply


def undo(session: Session, plan: Plan, command: str) -> None:
    """Put back what `commit` replaced: every file, and the receipt that was there. Raises as commit does.

    Locked when someone else has changed the installation since the commit: it is theirs then.
    """
    actions = [
        {
            "path": action.path,
            "before": action.after,
            "after": action.before,
            "data": None if action.old is None else b64encode(action.old).decode(),
            "backup": False,
        }
        for action in plan.changes
    ]
    try:
        reply = session.target.commit(
            actions=actions,
            receipt=plan.receipt_found and plan.receipt_found.whole,
            imports=[],
            history=history_line(f"roll back {command}", plan),
            pycache_prefixes=_caches(session),
        )
    except Conflict as conflict:
        receipt = session.target.inspect().receipt
        if not receipt or receipt.host.commit_time != session.committed:
            raise _overtaken(session) from conflict
        raise
    wrong = [action.path for action in plan.changes if reply.read_back.get(action.path) != action.before]
    if wrong:
        raise RollbackFailed(f"these files are not as before: {', '.join(wrong)}", where=session.host.name)


def importable(session: Session, plan: Plan) -> tuple[list[str], str]:
    """(the modules that a commit can be held to, why others cannot).

    A module that does not import before the patch (no GPU driver here, another environment than the server's) says
    nothing about the patch when it does not import after it. New modules count when every changed one can be imported.
    """
    changed = [m for m, a in _modules(plan) if a.before is not None]
    new = [m for m, a in _modules(plan) if a.before is None]
    if session.target.is_tree:
        return [], "a tree of files has no interpreter"
    if not changed:
        return new, ""
    reply = session.target.run_python(_IMPORT_EACH, [json.dumps(changed)], IMPORT_TIMEOUT_S)
    lines = [line for line in reply.stdout.split("\n") if line.startswith("importable:")]
    # Only names that were asked for: what is imported on the host is decided here.
    good = [name for name in changed if f'"{name}"' in lines[-1]] if lines else []
    if len(good) == len(changed):
        return changed + new, ""
    return good, f"{len(changed) - len(good)} modules do not import outside the server even before the patch"


def _refuse_if_overtaken(session: Session, conflict: Conflict) -> None:
    """Raise Locked, which names the other, when this tool changed the installation since it was inspected."""
    if _commit_id(session.target.inspect()) == _commit_id(session.inspection):
        return
    raise _overtaken(session) from conflict


def _overtaken(session: Session) -> Locked:
    lines = session.target.history()  # none after the revert of a tree
    other = f"{lines[-1].who} at {local_time(lines[-1].time)}" if lines else "someone else just now"
    return Locked(
        f"the installation was changed by {other}, since the plan was made",
        where=session.host.name,
        next_step="run the command again: it goes by what is installed then",
    )


def _commit_id(inspection: Inspection) -> str | None:
    return inspection.receipt.host.id if inspection.receipt else None


def history_line(command: str, plan: Plan) -> dict[str, Any]:
    return {
        "event": command,
        "series": plan.series.name if plan.series else None,
        "from": plan.stage_from,
        "to": plan.stage_to,
        "files": len(plan.changes),
        "tool": __version__,
    }


def describe(plan: Plan) -> str:
    """A plan in one line."""
    kinds = [action.kind for action in plan.actions]
    counts = ", ".join(f"{kinds.count(kind)} to {kind}" for kind in ("create", "modify", "delete") if kind in kinds)
    already = kinds.count("already")
    return f"{plan.stage_from} -> {plan.stage_to}: {counts or 'no file to change'}" + (
        f", {already} as they should be" if already else ""
    )


def _modules(plan: Plan) -> list[tuple[str, Any]]:
    names = dict(
        zip(
            [a.path for a in plan.changes if a.after is not None and a.path.endswith(".py")],
            plan.modules(),
            strict=True,
        )
    )
    return [(names[action.path], action) for action in plan.changes if action.path in names]


def _store(plan: Plan) -> dict[str, str]:
    """Bytes that a revert will need and the host cannot have: of files found patched without a receipt.

    By sha256, in base64. They are made by taking the series' own patches back from what is installed.
    """
    if plan.series is None or plan.receipt() is None:
        return {}
    told = plan.receipt_found.files if plan.receipt_found else {}
    store = {}
    for action in plan.actions:
        wanted = plan.origin.get(action.path)
        known = told.get(action.path)
        if wanted is None or wanted == action.before or (known and known.before == wanted):
            continue
        store[wanted] = plan.series.move(action.path, action.old, action.state, PRISTINE)
    return {sha: b64encode(data).decode() for sha, data in store.items() if data is not None}


def _caches(session: Session) -> list[str]:
    """Where the servers on the host keep bytecode outside the installation (PYTHONPYCACHEPREFIX)."""
    return sorted({p.pycache_prefix for p in session.target.processes if p.pycache_prefix})


def _signature() -> dict[str, str]:
    return {"by": f"{getpass.getuser()}@{socket.gethostname()}", "tool": __version__}
