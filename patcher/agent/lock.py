"""One commit at a time; a dead holder does not count."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator

from .failures import Refusal, os_refusal, translated
from .files import opened, read, remove_empty, sync_directory, unlink
from .proc import start_ticks
from .site import Site
from .steps import step


def boot_id() -> str:
    return (read("/proc/sys/kernel/random/boot_id") or b"").decode().strip()


def lock_holder(site: Site) -> dict | None:
    """Who holds the lock and is alive, None otherwise."""
    holder = _read_holder(site.state("lock"))
    alive = holder.get("boot_id") == boot_id() and start_ticks(holder["pid"]) == holder["start_ticks"]
    return holder if alive else None


def _read_holder(path: str) -> dict:
    try:
        holder = json.loads(read(path) or b"{}")
        return holder if isinstance(holder, dict) and {"pid", "start_ticks"} <= holder.keys() else {}
    except ValueError:
        return {}  # torn by a crash of the machine: nobody who lives wrote it


@contextlib.contextmanager
def locked(site: Site, who: str) -> Iterator[None]:
    """Hold the lock of the installation. Raises Refusal (Locked), naming the holder."""
    path = site.state("lock")
    handle = _acquire(site, path)
    try:
        holder = {
            "pid": os.getpid(),
            "start_ticks": start_ticks(os.getpid()),
            "boot_id": boot_id(),
            "host": socket.gethostname(),
            "who": who,
            "since": time.time(),
        }
        with translated(path):
            os.pwrite(handle, json.dumps(holder).encode(), 0)
            sync_directory(site.state_dir)  # what is left after a power loss is found by the lock or by the journal
        step("lock")
        yield
        step("unlock")
    finally:
        with contextlib.suppress(OSError):  # on what turned read-only: a dead holder's lock holds nobody up, and the
            unlink(path)  # failure that is on its way says more
        os.close(handle)
        remove_empty([site.state("backups"), site.state_dir, os.path.dirname(site.state_dir)])


def _acquire(site: Site, path: str) -> int:
    for _ in range(100):
        try:
            for folder in (os.path.dirname(site.state_dir), site.state_dir):
                site.make_private(folder)
            with opened(site.state_dir) as directory:
                handle = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        except FileNotFoundError:
            continue  # another run made or removed the directory just now
        except OSError as error:
            raise os_refusal(error, path) from error
        try:
            # The kernel gives a dead holder's lock up by itself. What the file says matters for the message, and where
            # the file system does not carry locks from one container or machine to the other.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise _held(path) from None
        except OSError as error:
            os.close(handle)
            raise os_refusal(error, path) from error
        if not os.path.exists(path) or os.stat(path).st_ino != os.fstat(handle).st_ino:
            os.close(handle)  # removed by its holder between our open and our lock
            continue
        if lock_holder(site):
            os.close(handle)
            raise _held(path)
        os.ftruncate(handle, 0)
        return handle
    raise Refusal("Conflict", "the lock file cannot be made", path, "look at this directory")


def _held(path: str) -> Refusal:
    holder = _read_holder(path)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"])) if holder else "just now"
    return Refusal(
        "Locked",
        f"{holder.get('who') or 'someone'} holds the lock since {since} "
        f"(process {holder.get('pid', '?')} on {holder.get('host', '?')})",
        path,
        "wait until it ends; a dead holder's lock is taken over by itself",
        holder=holder,
    )
