"""What a commit is about to do, on disk, and how to undo or finish it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal

from . import bytecode
from .failures import Refusal
from .files import NEW, OLD, hash_of, read, remove_empty, sync_directory, unlink, write_file, write_state
from .lock import lock_holder, locked
from .site import Site
from .steps import UNDO, step

JOURNAL, RECEIPT, HISTORY, STATE = "journal.json", "receipt.json", "history.jsonl", "state.json"
RECORD = "RECORD"  # the name of the entry for the distribution's RECORD


class Entry:
    """One path of a commit: what it must be before, what it is after.

    path: relative to the import root, or RECORD. file: absolute. before, after: sha256, None for no file.
    meta: describe() of the file that goes (or went, in an earlier commit), None if it is not known.
    new, old: where the new file waits and the old one is kept.
    """

    def __init__(self, path: str, file: str, before: str | None, after: str | None, meta: dict | None,
                 data: bytes | None = None):
        self.path, self.file, self.before, self.after, self.meta, self.data = path, file, before, after, meta, data
        folder, name = os.path.split(file)
        self.new, self.old = os.path.join(folder, f".{name}{NEW}"), os.path.join(folder, f".{name}{OLD}")

    def as_dict(self) -> dict:
        """What the journal keeps: no absolute path, so that it speaks of the tree it lies in, wherever that is."""
        return {"path": self.path, "before": self.before, "after": self.after, "meta": self.meta}


def entries_of(site: Site, journal: dict) -> list[Entry]:
    """The entries of a journal; a path outside the package is a Refusal."""
    return [Entry(file=_place(site, item["path"]), **item) for item in journal["entries"]]


def _place(site: Site, path: str) -> str:
    return os.path.join(site.dist_info, "RECORD") if path == RECORD else site.locate(path)


def write_journal(site: Site, journal: dict) -> None:
    write_state(site.state(JOURNAL), json.dumps(journal).encode())


def recover(site: Site, who: str) -> dict:
    """Undo or finish what a dead run left, unless another run is at work. Says which, and of which files.

    "left": what could not be removed.
    Raises Refusal (RollbackFailed) where that cannot be done.
    """
    nothing = {"recovered": "nothing", "files": [], "left": []}
    if not any(os.path.exists(site.state(name)) for name in (JOURNAL, "lock")) or lock_holder(site):
        return nothing
    ignore_hangups()
    try:
        with locked(site, who):
            return _recover(site) or nothing
    except Refusal as refusal:
        if refusal.reply["kind"] == "Locked":
            return nothing  # another run began to recover in the same moment
        raise


def _recover(site: Site) -> dict | None:
    journal = site.load(JOURNAL)
    if journal is None:
        collect_backups(site)
        return None
    files = [item["path"] for item in journal["entries"] if item["path"] != RECORD]
    if journal["phase"] == "committed":
        finish(site, journal)
        return {"recovered": "finished", "files": files, "left": []}
    return {"recovered": "undone", "files": files, "left": undo(site, journal)}


def ignore_hangups() -> None:
    """A dropped connection must not end a commit half way."""
    for name in (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)


def undo(site: Site, journal: dict) -> list[str]:
    """Put everything back as the journal found it, then drop it. May be killed and repeated.

    What cannot be removed (a directory became read-only) is given back, and the journal stays for the next command.
    Raises Refusal (RollbackFailed) where a file cannot be put back.
    """
    entries = entries_of(site, journal)
    replaced = _was_reinstalled(site, journal, entries)
    stuck = []
    for entry in reversed(entries):
        step(UNDO)
        try:
            found = hash_of(entry.file)
            if found == entry.before:
                continue
            if found == entry.after or found is None:
                _put_back(site, entry)
            elif not replaced:  # else the new installation's file, which is not ours to touch
                stuck.append((entry, "someone else changed it meanwhile"))
        except (OSError, Refusal) as error:
            stuck.append((entry, str(error)))
    if stuck:
        raise _hands_needed(site, stuck)
    left = _clear(site, journal, entries, replaced)
    for folder in sorted({os.path.dirname(entry.file) for entry in entries}):
        if os.path.isdir(folder):
            sync_directory(folder)
    if not left:
        unlink(site.state(JOURNAL))
        collect_backups(site)
    return left


def _clear(site: Site, journal: dict, entries: list[Entry], replaced: bool) -> list[str]:
    """Remove temporary files, new bytecode and new directories, and give the old bytecode back; gives what is left."""
    old = {} if replaced else {site.lengthen(name): (name, value) for name, value in journal["bytecode"].items()}
    intact = {path for path, (_, value) in old.items() if hash_of(path) == value["sha"]}
    unwanted = [path for entry in entries for path in (entry.new, entry.old)]
    unwanted += [path for entry in entries for path in bytecode.compiled_files(entry.file, journal["prefixes"])
                 if path not in intact]
    left = []
    for path in unwanted:
        try:
            unlink(path)
        except OSError:
            left.append(path)
    bytecode.remove_caches(entry.file for entry in entries)
    with contextlib.suppress(OSError):  # no space: Python compiles them again
        bytecode.restore(site, {name: value for path, (name, value) in old.items() if path not in intact})
    remove_empty(map(site.lengthen, journal["made_directories"]))
    return left


def _was_reinstalled(site: Site, journal: dict, entries: list[Entry]) -> bool:
    """Whether pip or uv put another installation in the place since the journal was written."""
    return journal["installation"] != site.identity or any(
        entry.path == RECORD and hash_of(entry.file) not in (entry.before, entry.after) for entry in entries)


def _put_back(site: Site, entry: Entry) -> None:
    if entry.before is None:
        unlink(entry.file)
    elif hash_of(entry.old) == entry.before:
        os.rename(entry.old, entry.file)
    else:
        os.makedirs(os.path.dirname(entry.file), exist_ok=True)
        write_file(entry.new, site.backup(entry.before), entry.meta)
        os.rename(entry.new, entry.file)
        unlink(entry.old)


def _hands_needed(site: Site, stuck: list[tuple[Entry, str]]) -> Refusal:
    commands = [f"cp {shlex.quote(site.state('backups', entry.before))} {shlex.quote(entry.file)}" if entry.before
                else f"rm -f {shlex.quote(entry.file)}" for entry, _ in stuck]
    told = "; ".join(f"{entry.file} ({why})" for entry, why in stuck)
    return Refusal("RollbackFailed", f"not every file could be put back: {told}", site.root,
                   "run the commands, then any command of this tool: it takes up the rest", commands=commands)


def finish(site: Site, journal: dict) -> None:
    """Do what remains after the decision. May be killed and repeated."""
    step("receipt")
    receipt = journal["receipt"]
    if receipt is None:
        unlink(site.state(RECEIPT))
    else:
        write_state(site.state(RECEIPT), json.dumps(receipt, indent=1, sort_keys=True).encode())
        if not os.path.exists(site.state(STATE)):
            write_state(site.state(STATE), b"{}")  # RECORD lists it
    step("history")
    if receipt is None and site.tree:
        for name in (HISTORY, STATE):  # a reverted tree is as it came: it has no prefix to keep a history in
            unlink(site.state(name))
    else:
        add_history(site, journal["history"])
    step("clean")
    for entry in entries_of(site, journal):
        unlink(entry.old)
    remove_empty(map(site.lengthen, journal["old_directories"]))
    collect_backups(site)
    step("drop")
    unlink(site.state(JOURNAL))
    sync_directory(site.state_dir)


def needed_backups(receipt: dict | None) -> set[str]:
    """Hashes of all that a revert of RECEIPT writes."""
    if receipt is None:
        return set()
    host = receipt["host"]
    needed = {told["before"] for told in receipt["files"].values() if told["before"] not in (None, told["after"])}
    needed |= {value["sha"] for value in host["bytecode"].values()}
    return needed | ({host["record"]["before"]} if host["record"] else set())


def collect_backups(site: Site) -> None:
    """Remove backups that the receipt does not need, and half-written state files."""
    needed = needed_backups(site.load(RECEIPT))
    folder = site.state("backups")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name not in needed:
            unlink(os.path.join(folder, name))
    for name in os.listdir(site.state_dir):
        if name.endswith(NEW):
            unlink(site.state(name))


def add_history(site: Site, line: dict) -> None:
    data = read(site.state(HISTORY)) or b""
    if not any(json.loads(old).get("id") == line["id"] for old in data.splitlines()):
        write_state(site.state(HISTORY), data + json.dumps(line, sort_keys=True).encode() + b"\n")
