"""Change all files of a request, or none. The order is that of steps.STEPS."""

from __future__ import annotations

import base64
import errno
import os
import re
import stat
import sys
import time
import uuid
import warnings

from . import bytecode
from .failures import Refusal, os_refusal, translated, user_name, write_problem
from .files import describe, hash_of, read, sha256, sync_directory, unlink, write_file, write_state
from .journal import (
    HISTORY,
    JOURNAL,
    RECEIPT,
    RECORD,
    STATE,
    Entry,
    collect_backups,
    finish,
    ignore_hangups,
    needed_backups,
    undo,
    write_journal,
)
from .lock import locked
from .look import receipt_state
from .programs import run_child
from .record import record_lines, rewrite_record
from .site import STATE_DIRECTORY, Site
from .steps import STEPS, step

IMPORT_CODE = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
IMPORT_SECONDS = 600  # torch from a cold disk takes minutes


def commit(site: Site, request: dict) -> dict:
    """Carry out a commit request. On any failure everything is undone and the Refusal raised."""
    ignore_hangups()
    with locked(site, request.get("who", "")):
        step("check")
        if os.path.exists(site.state(JOURNAL)):
            raise Refusal("Conflict", "an earlier commit was undone, but what it left could not be removed",
                          site.state(JOURNAL), "ddtree-patch status names the files; make their directories writable")
        work = Commit(site, request)
        try:
            work.back_up()
            step("journal")
            journal = work.journal()
            write_journal(site, journal)
        except BaseException:
            collect_backups(site)
            raise
        try:
            work.write()
            work.rename()
            work.refresh_bytecode()
            work.import_check()
            work.read_back()
            step("decide")
            journal["phase"] = "committed"
            write_journal(site, journal)
        except BaseException as error:
            left = undo(site, {**journal, "phase": "writing"})
            if left and isinstance(error, Refusal):
                error.reply["next"] += f"; everything was put back, but these could not be removed: {', '.join(left)}"
            raise
        finish(site, journal)
    return {"committed": True, "commit_time": work.time, "record": work.record_note, "steps": list(STEPS),
            "read_back": {entry.path: entry.after for entry in work.sources}}


class Commit:
    """One commit. Constructing it checks everything that can be checked without writing; raises Refusal."""

    def __init__(self, site: Site, request: dict):
        self.site = site
        self.receipt = request.get("receipt")
        self.imports = request.get("imports") or []
        self.store = {sha: base64.b64decode(text) for sha, text in (request.get("store") or {}).items()}
        self.prefixes = [prefix for prefix in (*(request.get("pycache_prefixes") or ()),
                                               os.environ.get("PYTHONPYCACHEPREFIX")) if prefix]
        self.time, self.id, self.who = time.time(), uuid.uuid4().hex, request.get("who", "")
        self.history = {**(request.get("history") or {}), "id": self.id, "time": self.time, "who": self.who}
        self.old_receipt = site.load(RECEIPT)
        # What earlier commits of the same installation remember of it; nothing, if it was replaced since.
        self.host = self.old_receipt["host"] if receipt_state(site, self.old_receipt) == "valid" else {
            "meta": {}, "bytecode": {}, "directories": [], "seen": []}
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
        for path in (*(entry.file for entry in self.entries), site.state(JOURNAL)):
            problem = write_problem(path)
            if problem:
                raise os_refusal(OSError(problem["errno"], os.strerror(problem["errno"])), problem["path"])

    def journal(self) -> dict:
        """All that a later run needs to undo or finish this commit."""
        return {
            "id": self.id, "phase": "writing", "since": self.time, "who": self.who, "installation": self.site.identity,
            "entries": [entry.as_dict() for entry in self.entries], "bytecode": self.bytecode,
            "prefixes": self.prefixes, "made_directories": [self.site.shorten(name) for name in self.directories],
            "old_directories": self.host["directories"],
            "receipt": self.receipt, "history": self.history,
        }

    # ------------------------------------------------------------ checks

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
            raise Refusal("Drift", f"{len(drifted)} of {len(actions)} files are not as when the plan was made: {names}",
                          self.site.root, "run the command again", files=drifted)
        return entries

    def _new_bytes(self, action: dict) -> bytes | None:
        if action["after"] is None:
            return None
        data = self.site.backup(action["after"]) if action.get("backup") else base64.b64decode(action["data"])
        if sha256(data) != action["after"]:
            raise Refusal("Conflict", "the new bytes do not have the hash that they should", action["path"],
                          "run the command again")
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
            raise Refusal("Conflict", f"the new file does not compile: {error}", entry.path,
                          "correct the series") from error

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
        untrue = [path for path, told in files.items()
                  if told["after"] != (after[path] if path in after else hash_of(self.site.locate(path)))]
        if untrue and "host" in self.receipt:
            self.receipt = None  # an older receipt that was stale when it was taken away: there is nothing to put back
            return
        if untrue:
            raise Refusal("Conflict", f"the receipt does not say what will be installed: {', '.join(untrue)}",
                          self.site.root, "report this as a bug")
        patched = {path for path, told in files.items() if told["before"] != told["after"]}
        fresh = {entry.path: entry for entry in self.sources
                 if entry.path in patched and entry.path not in self.host["seen"]}
        self.receipt["host"] = {
            "id": self.id, "commit_time": self.time, "user": user_name(os.geteuid()),
            "installation": self.site.identity, "record": None,
            "seen": sorted((set(self.host["seen"]) | set(fresh)) & patched),
            "meta": {**{path: meta for path, meta in self.host["meta"].items() if path in patched},
                     **{path: entry.meta for path, entry in fresh.items() if entry.before}},
            "bytecode": {**{name: value for name, value in self.host["bytecode"].items() if value["source"] in patched},
                         **{name: value for name, value in self.bytecode.items() if value["source"] in fresh}},
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

    # ------------------------------------------------------------ changes

    def back_up(self) -> None:
        step("backup")
        folder = self.site.state("backups")
        with translated(folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        for sha, data in self.store.items():
            self._keep(sha, data)
        for entry in self.entries:
            if entry.before:
                self._keep(entry.before, read(entry.file))
        for name, value in self.bytecode.items():
            self._keep(value["sha"], read(self.site.lengthen(name)))

    def _keep(self, sha: str, data: bytes | None) -> None:
        path = self.site.state("backups", sha)
        if data is None or sha256(data) != sha:
            raise Refusal("Drift", "a file changed while it was read", path, "run the command again")
        if hash_of(path) != sha:
            write_state(path, data)

    def write(self) -> None:
        for folder in self.directories:
            like = os.stat(os.path.dirname(folder))
            with translated(folder):
                os.mkdir(folder)
                os.chmod(folder, stat.S_IMODE(like.st_mode))
                if like.st_uid != os.geteuid():
                    os.chown(folder, like.st_uid, like.st_gid)
        for entry in self.entries:
            step("write")
            if entry.after is not None:
                with translated(entry.file):
                    self._write_beside(entry)

    def _write_beside(self, entry: Entry) -> None:
        original = self._original(entry)
        if original and original["link"] and self._leads_to(entry, original["link"]):
            unlink(entry.new)
            os.symlink(original["link"], entry.new)
            return
        # A new file looks like the package's own; never executable, never with the time of another file.
        like = entry.meta or original or describe(os.path.join(self.site.package_dir, "__init__.py"))
        meta = dict(like, mtime_ns=None)
        if original:
            meta["mtime_ns"] = original["mtime_ns"]
        elif entry.meta and int(time.time()) == entry.meta["mtime_ns"] // 10**9:
            meta["mtime_ns"] = entry.meta["mtime_ns"] + 2 * 10**9  # see bytecode.py: never the same second and size
        write_file(entry.new, entry.data, meta, entry.file if os.path.exists(entry.file) else None)

    def _original(self, entry: Entry) -> dict | None:
        """The description of the original file when this commit puts the original bytes back, else None."""
        if entry.path == RECORD:
            reverted = self.record_note == "restored"
        else:
            reverted = self.receipt is None or self.receipt["files"].get(entry.path, {}).get("before") == entry.after
        return self.host["meta"].get(entry.path) if reverted else None

    @staticmethod
    def _leads_to(entry: Entry, link: str) -> bool:
        return hash_of(os.path.join(os.path.dirname(entry.file), link)) == entry.after

    def rename(self) -> None:
        for entry in self.entries:
            step("record" if entry.path == RECORD else "rename")
            with translated(entry.file):
                if entry.before:
                    _keep_old(entry)
                if entry.after:
                    os.rename(entry.new, entry.file)
                else:
                    unlink(entry.file)
        for folder in sorted({os.path.dirname(entry.file) for entry in self.entries}):
            if os.path.isdir(folder):
                sync_directory(folder)

    def refresh_bytecode(self) -> None:
        step("bytecode")
        originals = {entry.path for entry in self.sources if self._original(entry)}
        with translated(self.site.package_dir):
            bytecode.remove([entry.file for entry in self.sources], self.prefixes)
            bytecode.restore(self.site, {path: value for path, value in self.host["bytecode"].items()
                                         if value["source"] in originals})
        step("compile")
        for entry in self.sources:
            if entry.after and entry.path not in originals and entry.file.endswith(".py") and not self.site.tree:
                with translated(entry.file):
                    bytecode.compile_file(entry.file)

    def import_check(self) -> None:
        step("import")
        if not self.imports or self.site.tree:
            return
        done = run_child([sys.executable, "-I", "-B", "-c", IMPORT_CODE, *self.imports], b"", {}, IMPORT_SECONDS)
        if done["rc"] != 0:
            last = done["stderr"].strip().rpartition("\n")[2]
            raise Refusal("Conflict", f"the patched modules do not import: {last}", sys.executable,
                          "the old files are back; see the trace", detail=done["stderr"][-4000:])

    def read_back(self) -> None:
        step("read-back")
        for entry in self.entries:
            found = hash_of(entry.file)
            if found != entry.after:
                raise Refusal("Conflict", f"the file reads back as {found}, not {entry.after}", entry.file,
                              "look for another program that writes there")


def _keep_old(entry: Entry) -> None:
    """Keep the old inode under another name: putting it back needs no space and loses nothing."""
    unlink(entry.old)
    try:
        os.link(entry.file, entry.old, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        if entry.meta["link"]:
            os.symlink(entry.meta["link"], entry.old)
        else:
            write_file(entry.old, read(entry.file), entry.meta, entry.file)
