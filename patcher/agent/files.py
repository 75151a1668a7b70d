"""Reading, hashing and writing files, so that a crash leaves the old bytes or the new."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator

from .failures import translated

NEW, OLD = ".ddtree-new", ".ddtree-old"  # suffixes of what is kept beside a file while a commit is under way


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def opened(folder: str) -> Iterator[int]:
    """A handle of a directory, reached without following any link.

    Whatever is written, removed or given to somebody goes through one: who may write in a directory of the package
    could put a link in the place of another at any moment, and lead an agent that runs as root out of it.
    """
    handle = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in filter(None, folder.split("/")):
            try:
                inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            except OSError as error:
                raise type(error)(error.errno, error.strerror, folder) from error
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def entries(folder: str) -> list[str]:
    """The names in a directory; none where it does not exist. Raises OSError where a link leads to it."""
    try:
        with opened(folder) as handle:
            listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
            try:
                return sorted(os.listdir(listed))
            finally:
                os.close(listed)
    except FileNotFoundError:
        return []


def rename(old: str, new: str) -> None:
    """Both in one directory."""
    folder, name = os.path.split(new)
    with opened(folder) as handle:
        os.rename(os.path.basename(old), name, src_dir_fd=handle, dst_dir_fd=handle)


def symlink(target: str, path: str) -> None:
    folder, name = os.path.split(path)
    with opened(folder) as handle:
        os.symlink(target, name, dir_fd=handle)


def make_directory(path: str) -> None:
    """A directory with the owner and mode of the one it is in. Raises FileExistsError."""
    folder, name = os.path.split(path)
    with opened(folder) as handle:
        os.mkdir(name, 0o700, dir_fd=handle)
        like = os.fstat(handle)
        made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
        try:
            os.fchmod(made, stat.S_IMODE(like.st_mode))
            if like.st_uid != os.geteuid():
                os.fchown(made, like.st_uid, like.st_gid)
        finally:
            os.close(made)
    sync_directory(folder)


def make_directories(path: str) -> None:
    """PATH and those above it, as far as they are missing."""
    if not os.path.isdir(path):
        make_directories(os.path.dirname(path))
        make_directory(path)


def give(path: str, uid: int, gid: int, mode: int) -> None:
    """Set the owner and mode of a regular file; of a link, never of what it leads to: that is an OSError."""
    folder, name = os.path.split(path)
    with opened(folder) as directory:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.fchown(handle, uid, gid)
            os.fchmod(handle, mode & 0o777)
        finally:
            os.close(handle)


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
    return {
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "mtime_ns": info.st_mtime_ns,
        "link": os.readlink(path) if os.path.islink(path) else None,
    }


def write_file(path: str, data: bytes, meta: dict, like: str | None = None) -> None:
    """Create PATH with DATA, the mode, owner and time of META and the extended attributes of the file LIKE; synced."""
    unlink(path)
    folder, name = os.path.split(path)
    with opened(folder) as directory:
        handle = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
        )
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        if like is not None:
            copy_attributes(like, handle)
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
    (from_folder, from_name), (folder, name) = os.path.split(source), os.path.split(path)
    try:
        with opened(from_folder) as here, opened(folder) as there:
            os.link(from_name, name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
            raise
        return False
    return True


def copy_attributes(source: str, target: int) -> None:
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
            rename(path + NEW, path)
            sync_directory(os.path.dirname(path))
    finally:
        unlink(path + NEW)


def put_state(path: str, data: bytes) -> None:
    """As write_state, but what is staged is used, and what is there already is not written again."""
    if read(path) != data:
        if read(path + NEW) != data:
            stage_state(path, data)
        rename(path + NEW, path)
    sync_directory(os.path.dirname(path))


def unlink(path: str) -> None:
    folder, name = os.path.split(path)
    with contextlib.suppress(FileNotFoundError), opened(folder) as handle:
        os.unlink(name, dir_fd=handle)


def sync_directory(path: str) -> None:
    with opened(path) as directory:
        handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_empty(directories: Iterable[str]) -> None:
    """Remove DIRECTORIES, children before parents, as far as nothing is left in them."""
    for folder in sorted(directories, reverse=True):
        above, name = os.path.split(folder)
        with contextlib.suppress(OSError), opened(above) as handle:  # gone already, or someone else's files live there
            os.rmdir(name, dir_fd=handle)
