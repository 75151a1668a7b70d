"""Reading, hashing and writing files, so that a crash leaves the old bytes or the new."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable

from .failures import translated

NEW, OLD = ".ddtree-new", ".ddtree-old"  # suffixes of what is kept beside a file while a commit is under way


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read(path: str) -> bytes | None:
    """The bytes of a file, None when there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def hash_of(path: str) -> str | None:
    data = read(path)
    return None if data is None else sha256(data)


def describe(path: str) -> dict:
    """What a revert needs beside the bytes: mode, owner, time, and where a link pointed."""
    info = os.stat(path)
    return {"mode": stat.S_IMODE(info.st_mode), "uid": info.st_uid, "gid": info.st_gid, "mtime_ns": info.st_mtime_ns,
            "link": os.readlink(path) if os.path.islink(path) else None}


def write_file(path: str, data: bytes, meta: dict, like: str | None = None) -> None:
    """Create PATH with DATA, the mode, owner and time of META and the extended attributes of the file LIKE; synced."""
    unlink(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        if like is not None:
            copy_attributes(like, path)
        info = os.fstat(handle)
        if (info.st_uid, info.st_gid) != (meta["uid"], meta["gid"]):
            os.fchown(handle, meta["uid"], meta["gid"])
        os.fchmod(handle, meta["mode"] & 0o777)  # never setuid, whatever a state file says
        if meta.get("mtime_ns") is not None:
            os.utime(handle, ns=(meta["mtime_ns"], meta["mtime_ns"]))
        os.fsync(handle)


def link(source: str, path: str) -> bool:
    """Make PATH a second name of SOURCE (of the link itself, if it is one); False where the file system cannot."""
    unlink(path)
    try:
        os.link(source, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
            raise
        return False
    return True


def copy_attributes(source: str, target: str) -> None:
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        names = []  # a file system without attributes has none to lose
    for name in names:
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as error:
            # Without privileges the kernel sets the security labels itself, from the directory.
            if error.errno != errno.ENOTSUP and not name.startswith("security."):
                raise


def stage_state(path: str, data: bytes) -> None:
    """Write what will be a file of the state directory beside it, private. Raises Refusal."""
    with translated(path):
        write_file(path + NEW, data, {"mode": 0o600, "uid": os.geteuid(), "gid": os.getegid()})


def write_state(path: str, data: bytes) -> None:
    """Write a file of the state directory: private, whole or not at all. Raises Refusal."""
    try:
        stage_state(path, data)
        with translated(path):
            os.rename(path + NEW, path)
            sync_directory(os.path.dirname(path))
    finally:
        unlink(path + NEW)


def put_state(path: str, data: bytes) -> None:
    """As write_state, but what is staged is used, and what is there already is not written again."""
    if read(path) != data:
        if read(path + NEW) != data:
            stage_state(path, data)
        os.rename(path + NEW, path)
    sync_directory(os.path.dirname(path))


def unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_empty(directories: Iterable[str]) -> None:
    """Remove DIRECTORIES, children before parents, as far as nothing is left in them."""
    for folder in sorted(directories, reverse=True):
        with contextlib.suppress(OSError):  # gone already, or someone else's files live there now
            os.rmdir(folder)
