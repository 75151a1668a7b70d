"""Put the old state back after an apply that went wrong once its files were written, and check that it is back."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from patcher.commands.node import Node, process_of
from patcher.errors import DdtreePatchError, HostUnreachable, Interrupted, Locked, RollbackFailed
from patcher.hosts import LOCAL_NAME, HostSettings
from patcher.installation.transaction import undo
from patcher.report.outcome import Step
from patcher.rollout.unit import NodeFailed, PhaseFailed, Unit
from patcher.server.client import ServerProblem
from patcher.server.restart import Restart, Wanted, bring_back


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


def leaves_host_alone(error: DdtreePatchError) -> bool:
    """Whether this failure ends the command as it stands: the operator stopped it, or there is no way to the host.

    Kinds of HostUnreachable mean that the host answered and refused, so that a roll-back can be tried.
    """
    while isinstance(error, NodeFailed):
        error = error.cause
    return isinstance(error, Interrupted) or type(error) is HostUnreachable


def roll_back(unit: Unit[Node], before: Sequence[ServerBefore], failure: PhaseFailed) -> None:
    """Files first (of all nodes), then the server. Raises PhaseFailed: RollbackFailed has the commands that remain.

    `failure` is why; RollbackFailed names it too.
    """
    try:
        unit.each(undo_files)
    except PhaseFailed as worse:
        raise _stuck(unit, failure, worse, lambda node: [_revert_command(node), _restart_command(unit)]) from failure
    try:
        with unit.step("bring back the old server") as steps:
            _old_server(unit, before, steps)
    except PhaseFailed as worse:
        raise _stuck(unit, failure, worse, lambda node: [_restart_command(unit)]) from failure


def _old_server(unit: Unit[Node], before: Sequence[ServerBefore], steps: Sequence[Step]) -> None:
    was = dict(zip(unit.names, before, strict=True))
    if not all(one.running for one in before):
        unit.each(lambda node: node.serving.service.stop())
        details = ["stopped, as it was before"] * len(before)
    elif all(unit.each(lambda node: _undisturbed(node, was[node.result.host]))):
        details = [f"process {one.process[0]} was never ended, and answers as before" for one in before if one.process]
    else:
        wanted = {name: Wanted(one.patched, False, one.identities) for name, one in was.items()}
        reports = bring_back(unit.of(lambda node: node.restarting(wanted[node.result.host])))
        details = [f"process {report.pid} answers as before" for report in reports]
    for step, detail in zip(steps, details, strict=True):
        step.detail = detail


def _stuck(
    unit: Unit[Node], failure: PhaseFailed, worse: PhaseFailed, commands: Callable[[Node], Sequence[str]]
) -> PhaseFailed:
    """The errors of a roll-back that did not come to its end."""
    nodes = dict(zip(unit.names, unit.nodes, strict=True))

    def told(name: str, error: DdtreePatchError) -> DdtreePatchError:
        node, why = nodes[name], failure.errors[name]
        if isinstance(error, Interrupted):
            return error
        if isinstance(error, Locked):
            node.result.summary = (
                "not rolled back: the installation is someone else's by now"
                if node.result.changed
                else "the files are as before; another command is restarting the server"
            )
            return Locked(
                f"the apply failed ({why}), and {error.what}",
                where=name,
                next_step="ddtree-patch status says where the host stands",
            )
        node.result.summary = "the old state could not be put back"
        return RollbackFailed(
            f"the apply failed ({why}), and the old state could not be put back: {error.what}",
            where=name,
            next_step=f"run these commands, in this order{node.serving.log_hint()}",
            commands=commands(node),
            last_resort=node.serving.service.by_hand(),
            detail=error.detail,
        )

    return worse.each(told)


def bring_back_line(unit: Unit[Node], failure: PhaseFailed) -> None:
    """Start the server with the command line that it had, after a restart that changed no file failed.

    Raises PhaseFailed, with RollbackFailed.
    """

    def told(name: str, error: DdtreePatchError) -> DdtreePatchError:
        if isinstance(error, (Interrupted, Locked)):  # or another command sees to the server by now
            return error
        why, node = failure.errors[name], nodes[name]
        return RollbackFailed(
            f"the server could not be restarted ({why}), nor started as it ran before: {error.what}; it is down",
            where=name,
            next_step="correct service.args or the server's definition, then run this command"
            + node.serving.log_hint(),
            commands=[_restart_command(unit)],
            detail=error.detail,
        )

    nodes = dict(zip(unit.names, unit.nodes, strict=True))
    try:
        with unit.step("bring back the server as it ran") as steps:
            reports = bring_back(unit.of(_as_it_ran))
            for step, report in zip(steps, reports, strict=True):
                step.detail = f"process {report.pid} answers, with the command line from before"
    except PhaseFailed as worse:
        raise worse.each(told) from failure


def _as_it_ran(node: Node) -> Restart:
    node.serving.service.start_as(node.action.line or ())
    return node.restarting(Wanted(patched=True, sampled=False, identities={node.plan.identity}))


def _undisturbed(node: Node, before: ServerBefore) -> bool:
    """Whether the very process from before answers as it did: its restart was refused, and would be again."""
    serving = node.serving
    server = serving.service.live()
    if server is None or process_of(server) != before.process:
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


def take_back(node: Node, failure: DdtreePatchError) -> None:
    """Undo this node's commit because of another node's `failure`. Raises RollbackFailed when that cannot be done."""
    try:
        undo_files(node)
    except Interrupted:
        raise
    except DdtreePatchError as error:
        raise RollbackFailed(
            f"{failure}, and the files of this node could not be put back: {error.what}",
            where=node.result.host,
            next_step="run this command",
            commands=[_revert_command(node)],
            detail=error.detail,
        ) from failure
    node.result.summary = "rolled back: the files are as before, because those of another node are"


def undo_files(node: Node) -> None:
    """Put back the files that this apply replaced, if it did."""
    if node.plan.is_noop or not node.result.changed:
        return
    with node.result.step("roll back the files") as step:
        undo(node.session, node.plan, "apply")
        node.result.changed = False
        step.detail = f"{len(node.plan.changes)} files are as before the apply"


def _revert_command(node: Node) -> str:
    """The command that puts back the files of the very installation that is being worked on."""
    host, target = node.session.host, node.session.target
    words = _for_hosts("revert", host, [host.name])
    words += ["--site-packages", target.site_packages] if target.is_tree else _venv(node)
    return shlex.join([*words, "--no-restart"])


def _restart_command(unit: Unit[Node]) -> str:
    """The command that restarts the server; of several nodes, all of them, from the venvs that hosts.toml names."""
    words = _for_hosts("restart", unit.nodes[0].session.host, unit.names)
    if unit.alone:
        words += _venv(unit.nodes[0])
    return shlex.join(words)


def _venv(node: Node) -> list[str]:
    interpreter = node.session.inspection.interpreter
    return ["--venv", interpreter.prefix] if interpreter else []


def _for_hosts(command: str, host: HostSettings, names: Iterable[str]) -> list[str]:
    words = ["ddtree-patch", command]
    # --local means the host called `local`, or the defaults: another one of this machine has to be named.
    here = host.local and (not host.config or host.name == LOCAL_NAME)
    words += ["--local"] if here else [word for name in names for word in ("--host", name)]
    return [*words, *(["--config", str(host.config.absolute())] if host.config else [])]
