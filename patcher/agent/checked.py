"""A commit request, checked: all that can be refused is refused before anything is written."""

from __future__ import annotations

import base64
import os
import re
import sys
import time
import uuid
import warnings

from . import bytecode
from .backups import needed_backups
from .failures import Refusal, os_refusal, user_name, write_problem
from .files import describe, hash_of, read, sha256
from .journal import HISTORY, JOURNAL, RECEIPT, RECORD, STATE, Entry
from .look import receipt_state
from .record import record_lines, rewrite_record
from .site import STATE_DIRECTORY, Site


class Checked:
    """A commit request of which everything is checked that can be without writing; raises Refusal.

    entries: the files that change, RECORD among them; sources: without it. directories: that are missing. bytecode:
    the compiled files there are. receipt: as it will be written. needed: the backups that it needs. host: what
    earlier commits of this installation remember. record_note: what happens to RECORD, in words.
    """

    def __init__(self, site: Site, request: dict):
        self.site = site
        self.receipt = request.get("receipt")
        self.imports = request.get("imports") or []
        self.store = {sha: base64.b64decode(text) for sha, text in (request.get("store") or {}).items()}
        self.prefixes = [
            prefix
            for prefix in (*(request.get("pycache_prefixes") or ()), os.environ.get("PYTHONPYCACHEPREFIX"))
            if prefix
        ]
        self.time, self.id, self.who = time.time(), uuid.uuid4().hex, request.get("who", "")
        self.history = {**(request.get("history") or {}), "id": self.id, "time": self.time, "who": self.who}
        self.old_receipt = site.load(RECEIPT)
        # What earlier commits of the same installation remember of it; nothing, if it was replaced since.
        self.host = (
            self.old_receipt["host"]
            if receipt_state(site, self.old_receipt) == "valid"
            else {"meta": {}, "bytecode": {}, "directories": [], "seen": []}
        )
        self.sources = self._entries(request["actions"])
        self.entries = list(self.sources)
        for entry in self.sources:
            self._check_syntax(entry)
        self.directories = self._missing_directories()
        self.bytecode = bytecode.snapshot(site, {entry.path: entry.file for entry in self.sources}, self.prefixes)
        self.record_note = "none lists these files"
        self._complete_receipt()
        self._plan_record()
        self._check_revertible()
        self.needed = needed_backups(self.receipt)
        for path in (*(entry.file for entry in self.entries), site.state(JOURNAL)):
            problem = write_problem(path)
            if problem:
                raise os_refusal(OSError(problem["errno"], os.strerror(problem["errno"])), problem["path"])

    def journal(self) -> dict:
        """All that a later run needs to undo or finish this commit."""
        return {
            "id": self.id,
            "phase": "writing",
            "since": self.time,
            "who": self.who,
            "installation": self.site.identity,
            "entries": [entry.as_dict() for entry in self.entries],
            "bytecode": self.bytecode,
            "prefixes": self.prefixes,
            "made_directories": [self.site.shorten(name) for name in self.directories],
            "old_directories": self.host["directories"],
            "receipt": self.receipt,
            "history": self.history,
        }

    def _entries(self, actions: list[dict]) -> list[Entry]:
        entries, drifted = [], []
        for action in actions:
            path, file = action["path"], self.site.locate(action["path"])
            found = hash_of(file)
            if found != action["before"]:
                drifted.append({"path": path, "expected": action["before"], "found": found})
                continue
            meta = self.host["meta"].get(path) if found is None else describe(file)
            entries.append(Entry(path, file, action["before"], action["after"], meta, self._new_bytes(action)))
        if drifted:
            names = ", ".join(item["path"] for item in drifted)
            raise Refusal(
                "Drift",
                f"{len(drifted)} of {len(actions)} files are not as when the plan was made: {names}",
                self.site.root,
                "run the command again",
                files=drifted,
            )
        return entries

    def _new_bytes(self, action: dict) -> bytes | None:
        if action["after"] is None:
            return None
        data = self.site.backup(action["after"]) if action.get("backup") else base64.b64decode(action["data"])
        if sha256(data) != action["after"]:
            raise Refusal(
                "Conflict",
                "the new bytes do not have the hash that they should",
                action["path"],
                "run the command again",
            )
        return data

    def _check_syntax(self, entry: Entry) -> None:
        minimum = re.search(r">=\s*(\d+)\.(\d+)", self.site.requires)
        too_old = minimum is not None and sys.version_info[:2] < (int(minimum[1]), int(minimum[2]))
        if entry.data is None or not entry.file.endswith(".py") or (self.site.tree and too_old):
            return  # an interpreter older than the package may patch a tree, but cannot judge it
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(entry.data, entry.file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise Refusal(
                "Conflict", f"the new file does not compile: {error}", entry.path, "correct the series"
            ) from error

    def _missing_directories(self) -> list[str]:
        missing = set()
        for entry in self.sources:
            folder = os.path.dirname(entry.file)
            while entry.after and not os.path.isdir(folder):
                missing.add(folder)
                folder = os.path.dirname(folder)
        return sorted(missing)

    def _complete_receipt(self) -> None:
        """Add to the receipt what only the host knows and a revert needs ("host")."""
        if self.receipt is None:
            return
        files = self.receipt["files"]
        after = {entry.path: entry.after for entry in self.sources}
        untrue = [
            path
            for path, told in files.items()
            if told["after"] != (after[path] if path in after else hash_of(self.site.locate(path)))
        ]
        if untrue and "host" in self.receipt:
            self.receipt = None  # an older receipt that was stale when it was taken away: there is nothing to put back
            return
        if untrue:
            raise Refusal(
                "Conflict",
                f"the receipt does not say what will be installed: {', '.join(untrue)}",
                self.site.root,
                "report this as a bug",
            )
        patched = {path for path, told in files.items() if told["before"] != told["after"]}
        fresh = {
            entry.path: entry for entry in self.sources if entry.path in patched and entry.path not in self.host["seen"]
        }
        self.receipt["host"] = {
            "id": self.id,
            "commit_time": self.time,
            "user": user_name(os.geteuid()),
            "installation": self.site.identity,
            "record": None,
            "seen": sorted((set(self.host["seen"]) | set(fresh)) & patched),
            "meta": {
                **{path: meta for path, meta in self.host["meta"].items() if path in patched},
                **{path: entry.meta for path, entry in fresh.items() if entry.before},
            },
            "bytecode": {
                **{name: value for name, value in self.host["bytecode"].items() if value["source"] in patched},
                **{name: value for name, value in self.bytecode.items() if value["source"] in fresh},
            },
            "directories": sorted({*self.host["directories"], *map(self.site.shorten, self.directories)}),
        }

    def _plan_record(self) -> None:
        """Make RECORD one more entry: as it was before the first commit on a full revert, else rewritten."""
        if self.site.record is None:
            return
        data, meta = read(self.site.record), describe(self.site.record)
        last = (self.old_receipt["host"]["record"] if self.old_receipt else None) or {}
        ours = last.get("after") == sha256(data)
        pristine = last["before"] if ours else sha256(data)
        kept = self._kept_record(pristine) if self.receipt is None and ours else None
        if kept is not None:
            new, self.record_note = kept, "restored"
        else:
            listed = [] if self.receipt is None else self._state_paths(pristine)
            new, self.record_note = rewrite_record(data, {e.path: e.data for e in self.sources}, listed), "rewritten"
        if self.receipt is not None:
            self.receipt["host"]["record"] = {"before": pristine, "after": sha256(new)}
            self.receipt["host"]["meta"][RECORD] = self.host["meta"].get(RECORD, meta)
        self.entries.append(Entry(RECORD, self.site.record, sha256(data), sha256(new), meta, new))

    def _kept_record(self, pristine: str) -> bytes | None:
        """RECORD as it was before the first commit; None if it is lost, or was kept of files patched by then."""
        try:
            data = self.site.backup(pristine)
        except Refusal:
            return None
        lines = record_lines(data)
        true = all(lines.get(entry.path, (b"", None))[1] == entry.after for entry in self.sources)
        return data if true and not any(STATE_DIRECTORY in path.split("/") for path in lines) else None

    def _state_paths(self, pristine_record: str) -> list[str]:
        """The state files as RECORD names them, so that uninstalling the package removes them too."""
        kept = sorted(needed_backups(self.receipt) | {pristine_record})
        base = os.path.realpath(os.path.dirname(self.site.dist_info))
        prefix = os.path.realpath(os.path.dirname(os.path.dirname(self.site.state_dir)))
        folder = os.path.relpath(os.path.join(prefix, STATE_DIRECTORY, self.site.package), base)
        return [f"{folder}/{name}" for name in (RECEIPT, HISTORY, STATE, *(f"backups/{sha}" for sha in kept))]

    def _check_revertible(self) -> None:
        """A receipt promises a revert: every old file must be at hand."""
        if self.receipt is None:
            return
        at_hand = {entry.before for entry in self.entries} | {value["sha"] for value in self.bytecode.values()}
        for sha in needed_backups(self.receipt) - at_hand - set(self.store):
            self.site.backup(sha)
