"""Change all files of a request, or none. The order is that of steps.STEPS."""

from __future__ import annotations

import os
import sys
import time

from . import bytecode
from .backups import BACKUPS, collect_backups, keep
from .checked import Checked
from .failures import Refusal, translated
from .files import describe, hash_of, link, make_directory, read, rename, symlink, unlink, write_file, write_state
from .journal import JOURNAL, RECORD, Entry, finish, ignore_hangups, stage, sync_folders, undo, write_journal
from .lock import locked
from .programs import run_child
from .site import Site
from .steps import STEPS, step

IMPORT_CODE = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
IMPORT_SECONDS = 600  # torch from a cold disk takes minutes


def commit(site: Site, request: dict) -> dict:
    """Carry out a commit request. On any failure everything is undone and the Refusal raised."""
    ignore_hangups()
    with locked(site, request.get("who", "")):
        step("check")
        if os.path.exists(site.state(JOURNAL)):
            raise Refusal(
                "Conflict",
                "an earlier commit was undone, but what it left could not be removed",
                site.state(JOURNAL),
                "ddtree-patch status names the files; make their directories writable",
            )
        work = Commit(site, request)
        try:
            work.back_up()
            step("journal")
            journal = work.journal()
            write_journal(site, journal)
        except BaseException:
            collect_backups(site, work.old_receipt)
            raise
        try:
            work.write()
            work.keep()
            work.rename()
            work.refresh_bytecode()
            work.import_check()
            work.read_back()
            step("stage")
            stage(site, journal)
            step("decide")
            journal["phase"] = "committed"
            write_journal(site, journal)
        except BaseException as error:
            if site.load(JOURNAL)["phase"] == "writing":
                left = undo(site, journal)
                if left and isinstance(error, Refusal):
                    error.reply["next"] += f"; all was put back, but these could not be removed: {', '.join(left)}"
                raise
            # The decision stands though its write failed at the end: what dies from here on, the next run finishes.
        finish(site, journal)
    return {
        "committed": True,
        "commit_time": work.time,
        "record": work.record_note,
        "steps": list(STEPS),
        "read_back": {entry.path: entry.after for entry in work.sources},
    }


class Commit(Checked):
    """One commit; the methods are its steps."""

    def back_up(self) -> None:
        step("backup")
        folder = self.site.state(BACKUPS)
        with translated(folder):
            self.site.make_private(folder)
        for sha, data in self.store.items():
            write_state(self.site.state(BACKUPS, sha), data)
        for entry in self.entries:
            if entry.before:
                keep(self.site, entry.before, entry.file, self.needed)
        for name, value in self.bytecode.items():
            keep(self.site, value["sha"], self.site.lengthen(name), self.needed)

    def write(self) -> None:
        for folder in self.directories:
            with translated(folder):
                make_directory(folder)
        for entry in self.entries:
            step("write")
            if entry.after is not None:
                with translated(entry.file):
                    self._write_beside(entry)

    def _write_beside(self, entry: Entry) -> None:
        original = self._original(entry)
        if original and original["link"] and self._leads_to(entry, original["link"]):
            unlink(entry.new)
            symlink(original["link"], entry.new)
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

    def keep(self) -> None:
        step("keep")
        for entry in self.entries:
            if entry.before:
                with translated(entry.file):
                    _keep_old(entry)
        sync_folders(self.entries)

    def rename(self) -> None:
        for entry in self.entries:
            step("record" if entry.path == RECORD else "rename")
            with translated(entry.file):
                if hash_of(entry.file) != entry.before:
                    raise _changed(entry)
                if entry.after:
                    rename(entry.new, entry.file)
                else:
                    unlink(entry.file)
        sync_folders(self.entries)

    def refresh_bytecode(self) -> None:
        step("bytecode")
        originals = {entry.path for entry in self.sources if self._original(entry)}
        with translated(self.site.package_dir):
            bytecode.remove([entry.file for entry in self.sources], self.prefixes)
            bytecode.restore(
                self.site,
                {path: value for path, value in self.host["bytecode"].items() if value["source"] in originals},
                self.needed,
            )
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
            raise Refusal(
                "Conflict",
                f"the patched modules do not import: {last}",
                sys.executable,
                "the old files are back; see the trace",
                detail=done["stderr"][-4000:],
            )

    def read_back(self) -> None:
        step("read-back")
        for entry in self.entries:
            found = hash_of(entry.file)
            if found != entry.after:
                raise Refusal(
                    "Conflict",
                    f"the file reads back as {found}, not {entry.after}",
                    entry.file,
                    "look for another program that writes there",
                )
            if entry.before and hash_of(entry.old) != entry.before:
                raise _changed(entry)


def _changed(entry: Entry) -> Refusal:
    return Refusal(
        "Drift",
        f"someone else changed {entry.path} while this commit was under way: their file stays",
        entry.file,
        "find out who, then run the command again",
    )


def _keep_old(entry: Entry) -> None:
    if link(entry.file, entry.old):
        return
    if entry.meta["link"]:
        symlink(entry.meta["link"], entry.old)
    else:
        write_file(entry.old, read(entry.file), entry.meta, entry.file)
