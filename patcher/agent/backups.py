"""Old bytes, kept under their sha256: what a revert writes, or the undoing of a commit."""

from __future__ import annotations

import os
import stat
from collections.abc import Container

from .failures import Refusal
from .files import NEW, entries, give, hash_of, link, read, sha256, unlink, write_state
from .site import Site

BACKUPS = "backups"


def needed_backups(receipt: dict | None) -> set[str]:
    """Hashes of all that a revert of RECEIPT writes."""
    if receipt is None:
        return set()
    host = receipt["host"]
    needed = {told["before"] for told in receipt["files"].values() if told["before"] not in (None, told["after"])}
    needed |= {value["sha"] for value in host["bytecode"].values()}
    return needed | ({host["record"]["before"]} if host["record"] else set())


def keep(site: Site, sha: str, file: str, needed: Container[str]) -> None:
    """Keep the bytes of FILE, which has SHA: a copy of what is needed for good, else a second name for now."""
    path = site.state(BACKUPS, sha)
    if hash_of(path) == sha:
        return
    if sha not in needed and link(os.path.realpath(file), path):
        if hash_of(path) == sha:
            return
        unlink(path)
    data = read(file)
    if data is None or sha256(data) != sha:
        raise Refusal("Drift", "a file changed while it was read", file, "run the command again")
    write_state(path, data)


def collect_backups(site: Site, receipt: dict | None) -> None:
    """Remove backups that RECEIPT does not need, and half-written state files; what stays is private."""
    needed, folder = needed_backups(receipt), site.state(BACKUPS)
    for name in entries(folder):
        path = os.path.join(folder, name)
        if name not in needed:
            unlink(path)
        elif stat.S_IMODE(os.lstat(path).st_mode) != 0o600:  # compiled, and brought back by a revert that was undone
            give(path, os.geteuid(), os.getegid(), 0o600)
    for name in entries(site.state_dir):
        if name.endswith(NEW):
            unlink(site.state(name))
