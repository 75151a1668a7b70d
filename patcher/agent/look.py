"""What is installed, and the small files kept beside it."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import sys
import time
import uuid

from .backups import collect_backups, needed_backups
from .failures import Refusal, write_problem
from .files import hash_of, read, sha256, unlink, write_state
from .journal import HISTORY, JOURNAL, RECEIPT, STATE, history_with
from .lock import lock_holder, locked
from .missing import note
from .record import record_lines
from .site import Site


def receipt_state(site: Site, receipt: dict | None) -> str:
    """none, valid, or stale: the package was replaced under the patch, so the receipt speaks of files that are gone."""
    if receipt is None:
        return "none"
    host, files = receipt["host"], receipt["files"]
    if host["installation"] != site.identity:
        return "stale"
    if site.record and host["record"] and hash_of(site.record) != host["record"]["after"]:
        lines = record_lines(read(site.record))
        if any(lines.get(path, (None, None))[1] != told["after"] for path, told in files.items()):
            return "stale"
    changed = {path: told["before"] for path, told in files.items() if told["before"] != told["after"]}
    if changed and all(hash_of(site.locate(path)) == before for path, before in changed.items()):
        return "stale"
    return "valid"


def inspect(site: Site, request: dict) -> dict:
    """Everything that a plan needs. Writes nothing."""
    holder, receipt = lock_holder(site), site.load(RECEIPT)  # the holder: before the files are read, and after
    told = receipt["files"] if receipt else {}
    lines = record_lines(read(site.record)) if site.record else {}
    paths = sorted({*(request.get("paths") or ()), *told})
    problems = [write_problem(path) for path in (*map(site.locate, paths), site.state(JOURNAL))]
    problem = next(filter(None, problems), None)
    return {
        "root": site.root,
        "version": site.version,
        "editable": site.editable,
        "dist_info": site.dist_info,
        "record": site.record,
        "state_dir": site.state_dir,
        "package_dir": site.package_dir,
        "files": {path: _look_at(site, path, lines, told.get(path)) for path in paths},
        "interpreter": None
        if site.tree
        else {
            "executable": sys.executable,
            "version": sys.version.split()[0],
            "prefix": sys.prefix,
            "real_prefix": os.path.realpath(sys.prefix),
        },
        "receipt": receipt,
        "receipt_state": receipt_state(site, receipt),
        "journal": os.path.exists(site.state(JOURNAL)),
        "lock": holder or lock_holder(site),
        "missing_backups": sorted(sha for sha in needed_backups(receipt) if not _is_whole(site, sha)),
        "exposed": _exposed(site, paths),
        "free_bytes": _free_bytes(site.package_dir),
        "writable": problem
        and {"path": problem["path"], "mount": problem["mount"], "reason": os.strerror(problem["errno"])},
    }


def _look_at(site: Site, path: str, lines: dict, told: dict | None) -> dict:
    file = site.locate(path)
    data = read(file)
    info = None if data is None else os.stat(file)
    before = read(site.state("backups", told["before"])) if told and told["before"] else None
    whole = before is not None and sha256(before) == told["before"]
    return {
        "sha256": None if data is None else sha256(data),
        "record_sha256": lines.get(path, (None, None))[1],
        "size": info and info.st_size,
        "mode": info and stat.S_IMODE(info.st_mode),
        "uid": info and info.st_uid,
        "link": os.readlink(file) if os.path.islink(file) else None,
        "links": info and info.st_nlink,
        "data": None if data is None else base64.b64encode(data).decode(),
        # what the receipt would put back, where its backup is whole
        "before_data": base64.b64encode(before).decode() if whole else None,
    }


def _is_whole(site: Site, sha: str) -> bool:
    return hash_of(site.state("backups", sha)) == sha


def _exposed(site: Site, paths: list[str]) -> list[str]:
    """Directories of the files, of the package and of the state in which any account may exchange what is there."""
    folders = {site.root, os.path.dirname(os.path.dirname(site.state_dir))}
    for path in paths:
        folder = os.path.dirname(site.locate(path))
        while site.holds(folder + os.sep):
            folders.add(folder)
            folder = os.path.dirname(folder)
    modes = {folder: os.stat(folder).st_mode for folder in folders if os.path.isdir(folder)}
    return sorted(folder for folder, mode in modes.items() if mode & stat.S_IWOTH and not mode & stat.S_ISVTX)


def _free_bytes(path: str) -> int:
    """What this account may still write there."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def forget(site: Site, request: dict) -> dict:
    """Drop a receipt whose package is gone. No file of the package is touched."""
    with locked(site, request.get("who", "")):
        receipt = site.load(RECEIPT)
        found = receipt_state(site, receipt)
        if found == "valid":
            raise Refusal(
                "Conflict", "the receipt is in force: its files are installed", site.state(RECEIPT), "use revert"
            )
        if receipt is not None:
            unlink(site.state(RECEIPT))
            write_state(
                site.state(HISTORY),
                history_with(
                    site,
                    {
                        **(request.get("history") or {}),
                        "event": "forget",
                        "id": uuid.uuid4().hex,
                        "time": time.time(),
                        "who": request.get("who", ""),
                    },
                ),
            )
            collect_backups(site, None)
    return {"forgotten": receipt is not None, "receipt_state": found}


def history(site: Site, request: dict) -> dict:
    return {"lines": [json.loads(line) for line in (read(site.state(HISTORY)) or b"").splitlines()]}


def state(site: Site, request: dict) -> dict:
    """Small JSON values that outlive the connection. A value of null removes its name.

    "missing": {"port", "is_missing"} of a server, kept beside them.
    """
    put, get = request.get("put") or {}, request.get("get") or ()
    for name in (*put, *get):
        if not re.fullmatch(r"[a-z_0-9]+", name):
            raise Refusal("UsageProblem", "a name of the state has letters a-z, digits and _ only", name)
    values = site.load(STATE) or {}
    if put:
        with locked(site, request.get("who", "")):
            values = {**(site.load(STATE) or {}), **put}
            values = {name: value for name, value in values.items() if value is not None}
            write_state(site.state(STATE), json.dumps(values).encode())
    if request.get("missing"):
        note(**request["missing"])
    return {"values": {name: values.get(name) for name in get}}
