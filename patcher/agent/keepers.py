"""Which program starts a server again when it ends. What cannot be told for certain is taken for none."""

from __future__ import annotations

import os
import shutil

from .files import read
from .programs import run_child

# By their process names; all of them start their programs as children of their own.
SUPERVISORS = {"supervisord": "supervisor", "runsv": "command", "s6-supervise": "command", "supervise": "command"}
SYSTEMCTL_S = 5


def keeper_of(pid: int) -> dict | None:
    """{"kind", "name"} of what keeps a process running; None when nothing is known to.

    kind: systemd, systemd --user, supervisor, command (runit, s6 and the like) or container.
    """
    try:
        return _container(pid) or _supervisor(pid) or _unit(pid)
    except ProcessLookupError:  # it, or one above it, ended while we looked
        return None


def _container(pid: int) -> dict | None:
    """One with process ids of its own, below ours: within a container everything that is seen is in it, as we are."""
    try:
        inside = os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:  # another account's process does not show it
        return None
    return {"kind": "container", "name": "a container"} if inside else None


def _supervisor(pid: int) -> dict | None:
    """The supervisor above, where the process is still in the session of the program that it supervises.

    An ssh server, a terminal or a notebook that a supervisor runs gives each shell a session of its own, and what
    ended up below a supervisor because that is process 1 is in its own session as well.
    """
    process = below = _stat(pid)
    while below and (above := _stat(below["parent"])):
        kind = SUPERVISORS.get(above["name"])
        if kind:
            # supervisord leaves its programs in its own session; the others may begin one for each.
            own = above if kind == "supervisor" else below
            name = f"{above['name']} (process {above['pid']})"
            return {"kind": kind, "name": name} if process["sid"] == own["sid"] else None
        below = above
    return None


def _unit(pid: int) -> dict | None:
    """The systemd unit that restarts it: the process, or the leader of its session, is the unit's main process.

    To be in a unit's control group alone says little: without logind all that ssh starts is in that of ssh.service.
    """
    unit, scope = unit_of((read(f"/proc/{pid}/cgroup") or b"").decode("utf-8", "replace"))
    process = _stat(pid)
    if not unit or not process or not shutil.which("systemctl"):
        return None
    reply = run_child(["systemctl", *scope, "show", "--property=MainPID,Restart", "--", unit], b"",
                      {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"} if scope else {}, SYSTEMCTL_S)
    shown = dict(line.split("=", 1) for line in reply["stdout"].split("\n") if "=" in line)
    if shown.get("MainPID") not in (str(pid), str(process["sid"])) or shown.get("Restart") in (None, "", "no"):
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


def _stat(pid: int) -> dict | None:
    """None when it has ended, or is another account's and hidden; process 0 is none."""
    data = read(f"/proc/{pid}/stat")
    if data is None:
        return None
    head, tail = os.fsdecode(data).rsplit(")", 1)
    name, fields = head.split("(", 1)[1], tail.split()
    if name.startswith("python"):  # a script that was not started by its own name
        words = (read(f"/proc/{pid}/cmdline") or b"").split(b"\0")
        script = os.fsdecode(os.path.basename(words[1])) if len(words) > 1 else ""
        name = script if script in SUPERVISORS else name
    return {"pid": pid, "name": name, "parent": int(fields[1]), "sid": int(fields[3])}
