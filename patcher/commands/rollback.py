"""Put the old state back after an apply that went wrong once its files were written, and check that it is back."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from patcher.errors import DdtreePatchError, Interrupted, Locked, RollbackFailed
from patcher.hosts import LOCAL_NAME, HostSettings
from patcher.installation.session import Session
from patcher.installation.transaction import undo
from patcher.plan.plan import Plan
from patcher.server.client import ServerProblem
from patcher.server.server import Serving


@dataclass(frozen=True)
class ServerBefore:
    """What the server was before the apply: its process (id and start tick), None when there was none.

    `running` is also true of one that an earlier command had stopped before it was cut off: it is meant to run.
    `identities` is None where it did not answer.
    """

    process: tuple[int, int] | None
    running: bool
    patched: bool
    identities: set[str | None] | None


def roll_back(session: Session, serving: Serving, plan: Plan, before: ServerBefore, failure: Exception) -> None:
    """Files first (of all nodes), then the server. Raises RollbackFailed, with the commands that remain to be typed.

    `failure` is why; RollbackFailed names it too.
    """
    result = session.result
    manual = [_revert_command(session), _restart_command(session)]
    try:
        with session.node.together():
            undo_files(session, plan)
        manual = [_restart_command(session)]
        with result.step("bring back the old server") as step:
            if not all(session.node.share(before.running).values()):
                serving.service.stop()
                step.detail = "stopped, as it was before"
                return
            if all(session.node.share(_undisturbed(serving, before)).values()) and before.process:
                step.detail = f"process {before.process[0]} was never ended, and answers as before"
                return
            report = serving.bring_back(patched=before.patched, identities=before.identities)
            step.detail = f"process {report.pid} answers as before"
    except Interrupted:
        raise
    except Locked as taken:
        result.summary = (
            "not rolled back: the installation is someone else's by now"
            if result.changed
            else "the files are as before; another command is restarting the server"
        )
        raise Locked(
            f"the apply failed ({failure}), and {taken.what}",
            where=session.host.name,
            next_step="ddtree-patch status says where the host stands",
        ) from failure
    except DdtreePatchError as error:
        result.summary = "the old state could not be put back"
        raise RollbackFailed(
            f"the apply failed ({failure}), and the old state could not be put back: {error.what}",
            where=session.host.name,
            next_step=f"run these commands, in this order{serving.log_hint()}",
            commands=manual,
            last_resort=serving.service.by_hand(),
            detail=error.detail,
        ) from failure


def bring_back(session: Session, serving: Serving, server: Mapping[str, Any], patch: str, failure: Exception) -> None:
    """Start the server with the command line that it had, after a restart that changed no file failed.

    `server`: as Serving.look gave the one to be put back; `patch`: the identity of the files. Raises RollbackFailed.
    """
    try:
        with session.result.step("bring back the server as it ran") as step:
            serving.service.start_as(server["argv"])
            report = serving.bring_back(patched=True, identities={patch})
            step.detail = f"process {report.pid} answers, with the command line from before"
    except (Interrupted, Locked):  # or another command sees to the server by now
        raise
    except DdtreePatchError as error:
        raise RollbackFailed(
            f"the server could not be restarted ({failure}), nor started as it ran before: {error.what}; it is down",
            where=session.host.name,
            next_step="correct service.args or the server's definition, then run this command" + serving.log_hint(),
            commands=[_restart_command(session)],
            detail=error.detail,
        ) from failure


def _undisturbed(serving: Serving, before: ServerBefore) -> bool:
    """Whether the very process from before answers as it did: its restart was refused, and would be again."""
    server = serving.service.live()
    if server is None or (server["pid"], server["ticks"]) != before.process:
        return False
    if not serving.host.answers:
        return True
    if before.identities is None:
        return False
    try:
        serving.check_greedy_answer()
        return not serving.identity_problem(before.identities)
    except ServerProblem:
        return False


def take_back(session: Session, plan: Plan, failure: Exception) -> None:
    """Undo this node's commit because of another node's `failure`. Raises RollbackFailed when that cannot be done."""
    try:
        undo_files(session, plan)
    except Interrupted:
        raise
    except DdtreePatchError as error:
        raise RollbackFailed(
            f"{failure}, and the files of this node could not be put back: {error.what}",
            where=session.host.name,
            next_step="run this command",
            commands=[_revert_command(session)],
            detail=error.detail,
        ) from failure


def undo_files(session: Session, plan: Plan) -> None:
    """Put back the files that this apply replaced, if it did."""
    if plan.is_noop:
        return
    with session.result.step("roll back the files") as step:
        undo(session, plan, "apply")
        session.result.changed = False
        step.detail = f"{len(plan.changes)} files are as before the apply"


def _revert_command(session: Session) -> str:
    """The command that puts back the files of the very installation that is being worked on."""
    host, target = session.host, session.target
    words = _for_hosts("revert", host, [host.name])
    words += ["--site-packages", target.site_packages] if target.is_tree else _venv(session)
    return shlex.join([*words, "--no-restart"])


def _restart_command(session: Session) -> str:
    """The command that restarts its server; of several nodes, all of them, from the venvs that hosts.toml names."""
    words = _for_hosts("restart", session.host, session.node.all)
    if session.node.alone:
        words += _venv(session)
    return shlex.join(words)


def _venv(session: Session) -> list[str]:
    interpreter = session.inspection.interpreter
    return ["--venv", interpreter.prefix] if interpreter else []


def _for_hosts(command: str, host: HostSettings, names: Iterable[str]) -> list[str]:
    words = ["ddtree-patch", command]
    # --local means the host called `local`, or the defaults: another one of this machine has to be named.
    here = host.local and (not host.config or host.name == LOCAL_NAME)
    words += ["--local"] if here else [word for name in names for word in ("--host", name)]
    return [*words, *(["--config", str(host.config.absolute())] if host.config else [])]
