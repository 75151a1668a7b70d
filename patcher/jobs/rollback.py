"""Put the old state back after an apply that went wrong once its files were written, and check that it is back."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from patcher.errors import DdtreePatchError, Interrupted, RollbackFailed
from patcher.jobs.commit import undo
from patcher.jobs.serving import Serving
from patcher.jobs.session import Session
from patcher.plan import Plan


@dataclass(frozen=True)
class ServerBefore:
    """What the server was before the apply. `identities` is None where it did not answer."""

    running: bool
    patched: bool
    identities: set[str | None] | None


def roll_back(session: Session, serving: Serving, plan: Plan, before: ServerBefore, failure: Exception) -> None:
    """Files first (of all nodes), then the server. Raises RollbackFailed, with the commands that remain to be typed.

    `failure` is why; RollbackFailed names it too.
    """
    result = session.result
    manual = [_tool_command(session, "revert", "--no-restart"), _tool_command(session, "restart")]
    try:
        with session.node.together():
            undo_files(session, plan)
        manual = [_tool_command(session, "restart")]
        with result.step("bring back the old server") as step:
            if not all(session.node.share(before.running).values()):
                serving.service.stop()
                step.detail = "stopped, as it was before"
                return
            report = serving.restart(patched=before.patched, sampled=False, identities=before.identities)
            with session.node.together():
                serving.check_greedy_answer()
            step.detail = f"process {report.pid} answers as before"
    except Interrupted:
        raise
    except DdtreePatchError as error:
        raise RollbackFailed(
            f"the apply failed ({failure}), and the old state could not be put back: {error.what}",
            where=session.host.name, next_step="run these commands, in this order; the last ones on the host itself",
            commands=[*manual, *serving.start_commands()], detail=error.detail,
        ) from failure


def undo_files(session: Session, plan: Plan) -> None:
    """Put back the files that this apply replaced, if it did."""
    if plan.is_noop:
        return
    with session.result.step("roll back the files") as step:
        undo(session, plan, "apply")
        session.result.changed = False
        step.detail = f"{len(plan.changes)} files are as before the apply"


def _tool_command(session: Session, command: str, *options: str) -> str:
    """A command of this tool for the very installation that is being worked on."""
    host, target = session.host, session.target
    words = ["ddtree-patch", command, *(["--local"] if host.local else ["--host", host.name])]
    if target.is_tree:
        words += ["--site-packages", target.site_packages]
    else:
        words += ["--venv", session.inspection["interpreter"]["prefix"]]
    return shlex.join([*words, *options])
