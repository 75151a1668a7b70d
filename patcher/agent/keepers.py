"""Which program starts a server again when it ends. What cannot be told for certain is taken for none."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

from . import proc
from .proc import Stat, control_groups
from .programs import run_child

# By their process names; all of them start their programs as children of their own.
SUPERVISORS = {"supervisord": "supervisor", "runsv": "command", "s6-supervise": "command", "supervise": "command"}
SYSTEMCTL_S = 5
# As docker-ID.scope or docker/ID, by how the engine makes its control groups; libpod-ID.scope/container.
_ENGINES = re.compile(
    r"(?:docker|containerd|nerdctl|libpod|crio)[-/:][0-9a-f]{12,}(?:\.scope)?(?:/|$)|[/-]kubepods\b", re.MULTILINE
)


def keeper_of(pid: int) -> dict | None:
    """{"kind", "name"} of what keeps a process running; None when nothing is known to.

    kind: systemd, systemd --user, supervisor, command (runit, s6 and the like) or container.
    """
    try:
        return _container(pid) or _supervisor(pid) or _unit(pid)
    except ProcessLookupError:  # it, or one above it, ended while we looked
        return None


def _container(pid: int) -> dict | None:
    """An engine's, seen from outside: within a container everything that is seen is in it, as we are.

    Process ids of its own do not make one: unshare, bwrap and apptainer give those too, and start nothing again.
    """
    try:
        inside = os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:  # another account's process does not show it
        return None
    return {"kind": "container", "name": "a container"} if inside and of_engine(control_groups(pid)) else None


def of_engine(cgroups: str) -> bool:
    """Whether the lines of /proc/PID/cgroup name a container of an engine that may restart it."""
    return bool(_ENGINES.search(cgroups))


def _supervisor(pid: int) -> dict | None:
    """The supervisor above, where the process is still in the session of the program that it supervises.

    An ssh server, a terminal or a notebook that a supervisor runs gives each shell a session of its own, and what
    ended up below a supervisor because that is process 1 is in its own session as well.
    """
    line = list(_line(pid))
    for (below_pid, below), (above_pid, above) in zip(line, line[1:]):
        program = _program(above_pid, above)
        kind = SUPERVISORS.get(program)
        if kind:
            # supervisord leaves its programs in its own session; the others may begin one for each.
            own = above if kind == "supervisor" else below
            # It gives each program a process group, which an orphan that it was given, as process 1 say, does not lead.
            is_program = kind != "supervisor" or below.group == below_pid
            name = f"{program} (process {above_pid})"
            return {"kind": kind, "name": name} if is_program and line[0][1].session == own.session else None
    return None


def _unit(pid: int) -> dict | None:
    """The systemd unit that restarts it: the unit's main process is it, or is above it and leads its session.

    To be in a unit's control group alone says little: without logind all that ssh starts is in that of ssh.service.
    Nor does a session alone: what a job of atd left behind is in that of atd.
    """
    unit, scope = unit_of(control_groups(pid))
    line = list(_line(pid))
    if not unit or not line or not shutil.which("systemctl"):
        return None
    reply = run_child(
        ["systemctl", *scope, "show", "--property=MainPID,Restart", "--", unit],
        b"",
        {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"} if scope else {},
        SYSTEMCTL_S,
    )
    shown = dict(line.split("=", 1) for line in reply["stdout"].split("\n") if "=" in line)
    main = [str(above) for above, _ in line if above in (pid, line[0][1].session)]
    if shown.get("MainPID") not in main or shown.get("Restart") in (None, "", "no"):
        return None
    return {"kind": " ".join(["systemd", *scope]), "name": unit}


def unit_of(cgroups: str) -> tuple[str, list[str]]:
    """(the service that the lines of /proc/PID/cgroup name, empty for none; systemctl's options for its manager)."""
    paths = {}
    for line in cgroups.splitlines():
        number, controllers, path = line.split(":", 2)
        paths[controllers or number] = path
    # Where systemd keeps its units in the one hierarchy, it leaves the processes of the other at its root.
    parts = [path.split("/") for path in (paths.get("name=systemd", ""), paths.get("0", "")) if path not in ("", "/")]
    units = [part for part in (parts[0] if parts else ()) if part.endswith((".service", ".scope"))]
    if not units or not units[-1].endswith(".service"):
        return "", []  # a session's scope, or the root of a container's own groups
    return units[-1], ["--user"] if any(unit.startswith("user@") for unit in units[:-1]) else []


def _line(pid: int) -> Iterator[tuple[int, Stat]]:
    """The process, its parent, and so on upwards."""
    process = proc.stat(pid)
    while process:
        yield pid, process
        pid = process.parent
        process = proc.stat(pid)


def _program(pid: int, process: Stat) -> str:
    """A process's name, or that of a supervisor which is a script and was not started by its own name."""
    words = proc.command_line(pid) if process.name.startswith("python") else []
    script = os.path.basename(words[1]) if len(words) > 1 else ""
    return script if script in SUPERVISORS else process.name
