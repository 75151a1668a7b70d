"""SGLang servers that run on this machine, as /proc shows them."""

from __future__ import annotations

import contextlib
import os

from . import proc
from .failures import user_name
from .keepers import keeper_of
from .missing import noted


def processes(request: dict) -> dict:
    """The servers that run, and those that are missing."""
    return {"processes": launchers(), "missing": noted()}


def launchers() -> list[dict]:
    """The launcher processes of all servers, not the children that these start."""
    found = {}
    for pid in proc.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            process = _look_at(pid)
            if process:
                found[pid] = process
    servers = [process for process in found.values() if process.pop("parent") not in found]
    return [{**process, "keeper": keeper_of(process["pid"])} for process in servers]


def is_launcher(argv: list[str]) -> bool:
    """A Python that runs sglang.launch_server or `sglang serve`; a shell or sudo around it is none."""
    if not argv or not os.path.basename(argv[0]).startswith("python"):
        return False
    rest = argv[1:]
    while rest:
        word, rest = rest[0], rest[1:]
        if word in ("-X", "-W"):
            rest = rest[1:]
        elif word == "-m":
            return rest[:1] == ["sglang.launch_server"] or rest[:2] == ["sglang", "serve"]
        elif word == "-c":
            return False
        elif not word.startswith("-"):
            return word.endswith("sglang/launch_server.py") or (
                os.path.basename(word) == "sglang" and rest[:1] == ["serve"]
            )
    return False


def _look_at(pid: int) -> dict | None:
    argv = proc.command_line(pid)
    stat = proc.stat(pid) if is_launcher(argv) else None
    if stat is None:
        return None
    exe, cwd, log = proc.link(pid, "exe"), proc.link(pid, "cwd"), proc.link(pid, "fd/1")
    env = _environment(pid)
    python = _interpreter(argv[0], cwd, exe, env)
    prefix = os.path.dirname(os.path.dirname(python)) if python else None
    return {
        "pid": pid,
        "parent": stat.parent,
        "pgid": stat.group,
        "sid": stat.session,
        "start_time": proc.start_time(stat.ticks),
        "argv": argv,
        "exe": exe,
        "cwd": cwd,
        "python": python,
        "prefix": prefix if prefix and os.path.isfile(prefix + "/pyvenv.cfg") else None,
        "real_prefix": prefix and os.path.realpath(prefix),
        "listening": _listening(pid),
        "user": user_name(os.stat(f"/proc/{pid}").st_uid),
        "sglang_root": _source_root(argv, cwd, env),
        "log": log if log and os.path.isfile(log) else None,
        "pycache_prefix": _pycache_prefix(argv, cwd, env),
    }


def _environment(pid: int) -> dict[str, str]:
    try:
        parts = proc.environment(pid).split(b"\0")
    except PermissionError:
        return {}
    return dict(os.fsdecode(part).split("=", 1) for part in parts if b"=" in part)


def _interpreter(word: str, cwd: str | None, exe: str | None, env: dict[str, str]) -> str | None:
    """The interpreter as the process was started: through its venv, which EXE does not show."""
    if "/" in word:
        path = os.path.join(cwd or "/", word)
        return path if os.path.exists(path) else exe
    for folder in env.get("PATH", "").split(":"):
        path = os.path.join(folder, word)
        if folder and os.path.exists(path) and os.path.realpath(path) == exe:
            return path
    return exe


def _pycache_prefix(argv: list[str], cwd: str | None, env: dict[str, str]) -> str | None:
    """Where the process keeps bytecode outside of its packages: -X pycache_prefix=DIR, else PYTHONPYCACHEPREFIX."""
    options = argv[1 : argv.index("-m")] if "-m" in argv else argv[1:]
    joined = [word + after if word == "-X" else word for word, after in zip(options, [*options[1:], ""])]
    given = [word.partition("=")[2] for word in joined if word.startswith("-Xpycache_prefix=")]
    prefix = given[-1] if given else env.get("PYTHONPYCACHEPREFIX")
    return os.path.join(cwd or "/", prefix) if prefix else None


def _source_root(argv: list[str], cwd: str | None, env: dict[str, str]) -> str | None:
    """The sglang directory that a working directory or PYTHONPATH puts before the installed one, else None.

    Python sources are not kept open, so the import path is all that can be asked.
    """
    places = [cwd] if cwd and "-m" in argv else []
    for place in (*places, *env.get("PYTHONPATH", "").split(":")):
        package = os.path.join(place, "sglang")
        if place and os.path.isfile(os.path.join(package, "__init__.py")):
            return os.path.realpath(package)
    return None


def _listening(pid: int) -> list[int]:
    """TCP ports on which the process itself listens."""
    mine = proc.sockets(pid)
    return sorted({port for inode, port in proc.listening(pid).items() if inode in mine}) if mine else []
