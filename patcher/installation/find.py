"""Which installation on a host is meant: a tree, a venv, or the venv of the server that is running there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from patcher.errors import Conflict, NoInstallation, UsageProblem
from patcher.hosts import HostSettings
from patcher.installation.command_line import port_of
from patcher.ssh.connection import Connection
from patcher.wire import replies
from patcher.wire.call import ANY_PYTHON, call_agent
from patcher.wire.types import (
    REPLIES,
    Committed,
    Done,
    History,
    HistoryLine,
    Inspection,
    Keeper,
    MissingServer,
    Process,
    Processes,
    Ran,
    State,
)

R = TypeVar("R")

_SECRET_FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
# In a log: SGLang prints all of its arguments when it starts, and frameworks print command lines and headers.
_SECRET_TEXT = re.compile(r"""(?ix)
    ( (?:--)? \b (?:admin[-_])? (?:api[-_]key | ssl[-_]keyfile[-_]password) ["']? \s* [=:\s] \s*
    | \b authorization ["']? \s* [:=] \s* ["']? (?:bearer\s+)? | \b bearer \s+ )
    ( '[^']*' | "[^"]*" | [^\s,;)'"]+ )""")

_KINDS = {  # a keeper's kind -> the settings for it
    "systemd": '{{ kind = "systemd", unit = "{name}" }}',
    "systemd --user": '{{ kind = "systemd", scope = "user", unit = "{name}" }}',
    "supervisor": '{{ kind = "supervisor", program = "..." }}, named as `supervisorctl status` does',
    "command": '{{ kind = "command", restart = [...], stop = [...], start = [...] }}, with its own commands',
    "container": '{{ kind = "docker", container = "..." }}',
}


@dataclass(frozen=True)
class Target:
    """One installation on one host.

    `python` runs the agent there; `processes` are the SGLang launchers that run on the host, as the agent lists them
    (empty for a tree, which no server of ours is expected to run from).
    """

    host: HostSettings
    connection: Connection
    python: str
    site_packages: str
    package: str
    processes: tuple[Process, ...]

    @property
    def is_tree(self) -> bool:
        """True for a directory without interpreter: its files can be changed, but nothing runs them."""
        return bool(self.site_packages)

    @property
    def name(self) -> str:
        return self.host.name

    # Each is one operation of the agent here. It raises as call_agent does, and BadAnswer for a reply of another form.

    def inspect(self, paths: Iterable[str] = ()) -> Inspection:
        """The installation as it is, with these files and those of its receipt."""
        return self._asked(Inspection, "inspect", paths=list(paths))

    def commit(self, **request: Any) -> Committed:
        """Change all files of the request (see agent/checked.py), or none."""
        return self._asked(Committed, "commit", **request)

    def forget(self) -> None:
        """Drop a receipt whose package is gone."""
        self._asked(Done, "forget")

    def history(self) -> tuple[HistoryLine, ...]:
        """What was done to the installation, oldest first."""
        return self._asked(History, "history").lines

    def kept(self, name: str) -> Any:
        """What was kept under this name; None for nothing."""
        return self._asked(State, "state", get=[name]).values[name]

    def keep(self, name: str, value: Any) -> None:
        """Keep a JSON value in the installation's state; None drops it."""
        self._asked(State, "state", put={name: value}, get=[])

    def run_python(self, source: str, argv: Sequence[str], timeout: float) -> Ran:
        """Run a script with the installation's interpreter; `timeout` in seconds."""
        return self._asked(Ran, "run_python", source=source, argv=list(argv), env={}, timeout=timeout)

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Any operation by its name, for those who read the reply themselves. Its form is checked all the same."""
        reply: dict[str, Any] = msgspec.to_builtins(self._asked(REPLIES[op], op, **request))
        return reply

    def _asked(self, kind: type[R], op: str, **request: Any) -> R:
        asked = {"op": op, "site_packages": self.site_packages or None, "package": self.package, **request}
        return replies.reply_as(kind, asked, call_agent(self.connection, self.python, asked), self.name)


def find_target(connection: Connection, host: HostSettings, package: str) -> Target:
    """The installation that `host` means.

    Raises UsageProblem when several venvs serve and none was chosen, and NoInstallation when none was named and no
    server runs.
    """
    tool = sys.executable if host.local else ANY_PYTHON
    if host.site_packages:
        return Target(host, connection, tool, _path(host, host.site_packages, "site_packages"), package, ())
    venv = _path(host, host.venv, "venv") if host.venv else ""
    python = f"{venv}/bin/python3" if venv else tool
    asked = {"op": "processes", "package": package}
    reply = replies.reply_as(Processes, asked, call_agent(connection, python, asked), host.name)
    return Target(
        host,
        connection,
        python if venv else _serving_python(host, reply.processes, reply.missing),
        "",
        package,
        reply.processes,
    )


def _path(host: HostSettings, path: str, what: str) -> str:
    """`path` made absolute; on another machine it has to be that already: it is relative to nothing there."""
    if host.local:
        return os.path.abspath(os.path.expanduser(path))
    if not path.startswith("/"):
        raise UsageProblem(
            f"{what} must be an absolute path on {host.name}, not {path!r}",
            where=host.name,
            next_step=f"give the full path of the {what}",
        )
    return path.rstrip("/")


def _serving_python(host: HostSettings, processes: Sequence[Process], missing: Sequence[MissingServer]) -> str:
    """By the server on the port; else by the one that this tool stopped there and left down; else by any server."""
    port = host.endpoint.port
    running = {p.python or p.exe or "": describe_process(p) for p in processes}
    pythons = (
        {p.python or p.exe or "": describe_process(p) for p in processes if port in (None, *p.listening)}
        or {m.python: f"port {m.port}, stopped" for m in missing if port in (None, m.port)}
        or running
    )
    if not pythons:
        raise NoInstallation(
            "no SGLang server is running there, so its venv cannot be found out",
            where=host.name,
            next_step="give --venv PATH, or venv in hosts.toml; or start the server first",
        )
    if len(pythons) > 1:
        listing = "\n".join(
            f"--venv {os.path.dirname(os.path.dirname(python))}   # {server}" for python, server in pythons.items()
        )
        raise UsageProblem(
            f"servers of {len(pythons)} different venvs are running there",
            where=host.name,
            next_step="choose one with --venv",
            detail=listing,
        )
    return next(iter(pythons))


def serving_processes(target: Target, inspection: Inspection) -> list[Process]:
    """The servers on the host that run the very files that are being patched."""
    return [p for p in target.processes if _runs(p, inspection)]


def refuse_other_copy(target: Target, inspection: Inspection, port: int | None = None) -> None:
    """Raise Conflict when servers are running, but none of them from the installation that is to be patched.

    With `port` (else endpoint.port) only those on it count, or that were told it and do not listen yet.

    Patching a copy that nobody runs succeeds in every way that files can tell, and changes nothing for the users.
    """
    port = port or target.host.endpoint.port
    ours = serving_processes(target, inspection)
    meant = [p for p in target.processes if port is None or port in (p.listening or [port_of(p.argv)])]
    if any(p in ours for p in meant):
        return
    others = [p for p in meant if p not in ours]
    if not others:
        return
    raise Conflict(
        f"a server is running that uses another copy of {target.package} than {inspection.root}",
        where=target.name,
        next_step="give the --venv of that server, or --no-restart to change the files of this copy all the same",
        detail="\n".join(describe_process(p) for p in others),
    )


def refuse_kept(process: Process, keeper: Keeper, where: str) -> None:
    """Raise Conflict for a server that another program, its keeper, starts again when it ends."""
    kind = _KINDS.get(keeper.kind, "the kind of that")
    raise Conflict(
        f"process {process.pid} is kept running by {keeper.name}, which would start a second server once "
        "service.kind process ends this one",
        where=where,
        next_step=f"set service in hosts.toml to {kind.format(name=keeper.name)} (docs/services.md); or give "
        "--no-restart to change the files alone",
        detail=describe_process(process),
    )


def _runs(process: Process, inspection: Inspection) -> bool:
    """By the source tree that comes before the installed package where there is one, else by the venv."""
    if process.sglang_root or inspection.interpreter is None:
        return process.sglang_root == inspection.package_dir
    return process.real_prefix == inspection.interpreter.real_prefix


def describe_process(process: Process) -> str:
    """One line for a reader, without the secrets that a command line may hold."""
    ports = ",".join(map(str, process.listening)) or "none yet"
    return f"pid {process.pid}, port {ports}: {' '.join(redacted(process.argv))}"


def without_secrets(text: str) -> str:
    """A log's text with what looks like the value of a secret replaced."""
    return _SECRET_TEXT.sub(lambda found: f"{found[1]}***", text)


def redacted(argv: Sequence[str]) -> list[str]:
    """`argv` with the values of flags that hold secrets replaced."""
    shown, hide = [], False
    for word in argv:
        flag, equals, _ = word.partition("=")
        shown.append("***" if hide else f"{flag}=***" if equals and flag in _SECRET_FLAGS else word)
        hide = word in _SECRET_FLAGS
    return shown
