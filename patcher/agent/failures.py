"""Failures that the operator is told of, those of the file system in words."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
from collections.abc import Iterator


class Refusal(Exception):
    """An expected failure. kind: the name of the operator side's error class; more: fields of the reply."""

    def __init__(self, kind: str, what: str, where: str = "", next_step: str = "", **more):
        super().__init__(what)
        self.reply = {"kind": kind, "what": what, "where": where, "next": next_step, **more}


def os_refusal(error: OSError, path: str) -> Refusal:
    """The Refusal for an OSError on PATH, naming the mount where that is the cause."""
    mount = mount_of(path)
    code = error.errno
    if code == errno.EROFS:
        what, next_step = "the file system is read-only", f"mount {mount} writable, or patch the image it comes from"
    elif code == errno.EBUSY:
        what = "the path is a mount point and cannot be replaced"
        next_step = f"change the file where it is mounted from, or remove the mount {mount}"
    elif code in (errno.ENOSPC, errno.EDQUOT):
        what, next_step = "no space is left", f"free some space on {mount}"
    elif code in (errno.EACCES, errno.EPERM):
        what = f"no permission as user {user_name(os.geteuid())}"
        next_step = "connect as the owner, or set sudo = true for this host"
    else:
        what, next_step = f"the file system refuses: {error}", f"look at the file system {mount}"
    return Refusal("Conflict", f"{what} (mount {mount})", path, next_step, mount=mount)


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn an OSError inside into a Refusal about PATH."""
    try:
        yield
    except OSError as error:
        raise os_refusal(error, path) from error


def mounts() -> list[str]:
    """Mount points of this machine as this process sees them."""
    with open("/proc/self/mountinfo", "rb") as file:
        fields = [line.split(b" ")[4] for line in file.read().split(b"\n") if line]
    return [os.fsdecode(re.sub(rb"\\(\d{3})", lambda code: bytes([int(code[1], 8)]), field)) for field in fields]


def real_path(path: str) -> str:
    """PATH with its directories resolved, but not itself: a rename replaces the link, not its target."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def mount_of(path: str) -> str:
    real = real_path(path)
    around = [point for point in mounts() if real == point or real.startswith(point.rstrip("/") + "/")]
    return max(around, key=len, default="/")


def write_problem(path: str) -> dict | None:
    """Why PATH could not be replaced (path, mount, errno), or None. Nothing is written to find out."""
    if real_path(path) in mounts():
        return {"path": path, "mount": path, "errno": errno.EBUSY}
    folder = os.path.dirname(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return {"path": path, "mount": mount_of(path), "errno": errno.EROFS}
    if not os.access(folder, os.W_OK | os.X_OK):
        return {"path": path, "mount": mount_of(path), "errno": errno.EACCES}
    return None


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
