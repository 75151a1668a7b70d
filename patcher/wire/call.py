"""Talk to the agent on a host: one request, one exec channel, one reply or one typed error."""

from __future__ import annotations

import ast
import functools
import getpass
import json
import re
import secrets
import socket
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from patcher import errors
from patcher.agent.operations import modules_of
from patcher.ssh.connection import Completed, Connection
from patcher.typed import Frozen, Misfit, typed
from patcher.wire import replies

BOOTSTRAP = (
    'import sys,zlib;exec(compile(zlib.decompress(sys.stdin.buffer.read(int(sys.argv[1]))),"ddtree_agent","exec"))'
)
LOADER = """
import importlib.abc, importlib.util, sys

if sys.version_info < (3, 9):
    sys.exit("too old for the agent")

class Bundle(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    modules = MODULES

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.partition(".")
        if package == "ddtree_agent" and (module or "__init__") in self.modules:
            return importlib.util.spec_from_loader(name, self, is_package=not module)

    def exec_module(self, module):
        name = module.__name__.partition(".")[2] or "__init__"
        exec(compile(self.modules[name], "ddtree_agent/%s.py" % name, "exec"), module.__dict__)

sys.meta_path.insert(0, Bundle())
from ddtree_agent.main import main
main()
"""
ANY_PYTHON = "python3"  # what runs the agent on a host while its environment is not known yet
MAX_REPLY = 256 << 20  # bytes; a host's reply may not unpack to more
AGENT = Path(__file__).parents[1] / "agent"


class AgentError(Frozen):
    """Why the agent refuses. `kind` is the name of one of patcher.errors; `commands` are left to be typed by hand."""

    kind: str
    what: str
    where: str
    next: str
    detail: str = ""
    commands: tuple[str, ...] = ()


def call_agent(
    connection: Connection,
    python: str,
    request: dict[str, Any],
    *,
    timeout: float | None = 600,
    on_stderr: Callable[[bytes], None] | None = None,
) -> dict[str, Any]:
    """Run one operation of the agent on the host and return its reply.

    python: the interpreter that runs it; for everything but `processes` and trees that is the environment's own.
    request: "op", the target ("package", "site_packages") and what the operation needs; see agent/.
    timeout: seconds. on_stderr: called with pieces of standard error as they come.
    Raises the typed error that the agent names; HostUnreachable when no whole reply came, BadAnswer for one that is not
    the agent's;
    NoInstallation when PYTHON is not there or too old; DdtreePatchError with a trace for a bug of the agent.
    """
    nonce = secrets.token_hex(16)
    source = _source(request["op"])
    sent = zlib.compress(json.dumps({"who": _who(), **request, "nonce": nonce}).encode())
    done = connection.run(
        [python, "-I", "-c", BOOTSTRAP, str(len(source))], input=source + sent, timeout=timeout, on_stderr=on_stderr
    )
    frame = _unframe(done.stdout, nonce)
    if frame is None:
        raise _no_reply(connection, python, done)
    reply = _parsed(frame, connection.name)
    if "error" in reply:
        raise _as_error(reply["error"], connection.name)
    return reply


@functools.cache
def _source(op: str) -> bytes:
    """The modules that an operation needs and what imports them from memory, as one Python text.

    Nothing is written on the host. Compressed: it is sent with each request, and on a slow line it is most of what is.
    """
    modules = {name: _text(name) for name in sorted({"__init__", *_with_imports(modules_of(op))})}
    return zlib.compress(LOADER.replace("MODULES", repr(modules)).encode(), 9)


def _with_imports(names: Iterable[str]) -> set[str]:
    """These modules of the agent, and all that they import of it."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _imports(name)
    return found


@functools.cache
def _imports(name: str) -> list[str]:
    """The modules of the agent that a module of it imports."""
    imports = [node for node in ast.walk(ast.parse(_text(name))) if isinstance(node, ast.ImportFrom) and node.level]
    return [module for node in imports for module in ([node.module] if node.module else [to.name for to in node.names])]


@functools.cache
def _text(name: str) -> str:
    return (AGENT / f"{name}.py").read_text(encoding="utf-8")


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _unframe(stdout: bytes, nonce: str) -> bytes | None:
    """The reply between whatever else the login printed, None if it is not there as a whole."""
    match = re.search(rb"<<ddtree-agent %s (\d{1,18})>>\n" % nonce.encode(), stdout)
    if match is None:
        return None
    data = stdout[match.end() : match.end() + int(match[1])]
    return data if len(data) == int(match[1]) else None


def _parsed(frame: bytes, host: str) -> dict[str, Any]:
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(frame, MAX_REPLY)
        if not unpacking.eof:
            raise replies.bad_answer("(it is cut short, or too long)", host)
        reply = json.loads(data)
    except (zlib.error, ValueError, RecursionError) as error:
        raise replies.bad_answer(f"(it cannot be read: {error})", host) from error
    if not isinstance(reply, dict):
        raise replies.bad_answer("(no object)", host)
    return reply


def _as_error(error: Any, host: str) -> errors.DdtreePatchError:
    try:
        told = typed(error, AgentError)
    except Misfit as misfit:
        return replies.bad_answer(f"(an error of no known kind: {misfit})", host)
    kind = getattr(errors, told.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.DdtreePatchError)):
        return replies.bad_answer(f"(an error of no known kind: {told.kind})", host)
    where = f"{host}: {told.where}" if told.where else host
    if kind is errors.RollbackFailed:
        return kind(told.what, commands=told.commands, where=where, next_step=told.next, detail=told.detail)
    return kind(told.what, where=where, next_step=told.next, detail=told.detail)


def _no_reply(connection: Connection, python: str, done: Completed) -> errors.DdtreePatchError:
    said = b"\n".join((done.stdout[-2000:], done.stderr[-4000:])).decode(errors="replace").strip()
    if done.rc in (126, 127):
        return errors.NoInstallation(
            f"there is no interpreter {python}",
            where=connection.name,
            detail=said,
            next_step="give the environment that serves, the folder above bin/python3: --venv",
        )
    if "too old for the agent" in said or "unknown option: -i" in said.lower():
        return errors.NoInstallation(
            f"{python} is no CPython 3.9 or later",
            where=connection.name,
            detail=said,
            next_step="give the environment that serves, the folder above bin/python3: --venv",
        )
    return errors.HostUnreachable(
        f"the agent ended without an answer (exit status {done.rc})",
        where=connection.name,
        detail=said,
        next_step="run the command again: it says where the host stands, and finishes or undoes; if this comes again, "
        "see that the login's start-up files (.bashrc) neither end the shell nor read its input",
    )
