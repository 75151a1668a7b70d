"""What a commit is about to do, on disk, and how to undo or finish it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal

from . import bytecode
from .backups import collect_backups, needed_backups
from .failures import Refusal, os_refusal
from .files import (
    NEW,
    OLD,
    hash_of,
    make_directories,
    put_state,
    read,
    remove_empty,
    rename,
    stage_state,
    sync_directory,
    unlink,
    write_file,
    write_state,
)
from .lock import lock_holder, locked
from .site import Site
from .steps import UNDO, UNDONE, step

JOURNAL, RECEIPT, HISTORY, STATE = "journal.json", "receipt.json", "history.jsonl", "state.json"
RECORD = "RECORD"  # the name of the entry for the distribution's RECORD


class Entry:
    """One path of a commit: what it must be before, what it is after.

    path: relative to the import root, or RECORD. file: absolute. before, after: sha256, None for no file.
    meta: describe() of the file that goes (or went, in an earlier commit), None if it is not known.
    new, old: where the new file waits and the old one is kept.
    """

    def __init__(
        self, path: str, file: str, before: str | None, after: str | None, meta: dict | None, data: bytes | None = None
    ):
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
        collect_backups(site, site.load(RECEIPT))
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

    What cannot be removed (a directory became read-only) is returned, and the journal stays for the next command.
    Raises Refusal (RollbackFailed) where a file cannot be put back.
    """
    entries = entries_of(site, journal)
    replaced = _was_reinstalled(site, journal, entries)
    stuck = []
    for entry in reversed(entries):
        step(UNDO)
        try:
            _undo_entry(site, entry, replaced)
        except (OSError, Refusal) as error:
            stuck.append((entry, str(error)))
    if stuck:
        raise _hands_needed(site, stuck)
    step(UNDONE)
    left = _clear(site, journal, entries, replaced)
    sync_folders(entries)
    if not left:
        try:
            unlink(site.state(JOURNAL))
            sync_directory(site.state_dir)
        except OSError:
            return [site.state(JOURNAL)]
        collect_backups(site, site.load(RECEIPT))
    return left


def _clear(site: Site, journal: dict, entries: list[Entry], replaced: bool) -> list[str]:
    """Remove temporary files, new bytecode and new directories, and give the old bytecode back; gives what is left."""
    back = {entry.path for entry in entries if not replaced and hash_of(entry.file) == entry.before}
    old = {site.lengthen(name): (name, value) for name, value in journal["bytecode"].items() if value["source"] in back}
    intact = {path for path, (_, value) in old.items() if hash_of(path) == value["sha"]}
    unwanted = [path for entry in entries for path in (entry.old, entry.new)]  # in this order: see _is_untouched
    unwanted += [
        path
        for entry in entries
        for path in bytecode.compiled_files(entry.file, journal["prefixes"])
        if path not in intact
    ]
    left = []
    for path in unwanted:
        try:
            unlink(path)
        except OSError:
            left.append(path)
    for folder in sorted({os.path.dirname(path) for path in unwanted}):
        if os.path.isdir(folder):
            sync_directory(folder)
    bytecode.remove_caches(entry.file for entry in entries)
    with contextlib.suppress(OSError):  # Python compiles them again
        bytecode.restore(
            site,
            {name: value for path, (name, value) in old.items() if path not in intact},
            needed_backups(site.load(RECEIPT)),
        )
    remove_empty(map(site.lengthen, journal["made_directories"]))
    return left


def _undo_entry(site: Site, entry: Entry, replaced: bool) -> None:
    """replaced: whether the file may be that of another installation, which is not ours to touch."""
    found = hash_of(entry.file)
    if found == entry.before:
        return
    if found in (entry.after, None):
        _put_back(site, entry)
    elif not replaced and not _is_untouched(entry):
        raise Refusal("Drift", "someone else changed it meanwhile")


def _is_untouched(entry: Entry) -> bool:
    """Whether the new file never took the path, so that what someone else wrote there lost nothing and stays."""
    if entry.before is None:
        return False
    waits = entry.after is not None and os.path.lexists(entry.new)
    return waits or not os.path.lexists(entry.old) or os.path.samefile(entry.old, entry.file)


def sync_folders(entries: list[Entry]) -> None:
    for folder in sorted({os.path.dirname(entry.file) for entry in entries}):
        if os.path.isdir(folder):
            sync_directory(folder)


def _was_reinstalled(site: Site, journal: dict, entries: list[Entry]) -> bool:
    """Whether pip or uv put another installation in the place since the journal was written."""
    return journal["installation"] != site.identity or any(
        entry.path == RECORD and hash_of(entry.file) not in (entry.before, entry.after) for entry in entries
    )


def _put_back(site: Site, entry: Entry) -> None:
    if entry.before is None:
        unlink(entry.file)
    elif os.path.lexists(entry.old):
        rename(entry.old, entry.file)
    else:
        make_directories(os.path.dirname(entry.file))
        write_file(entry.new, site.backup(entry.before), entry.meta)
        rename(entry.new, entry.file)


def _hands_needed(site: Site, stuck: list[tuple[Entry, str]]) -> Refusal:
    told = "; ".join(f"{entry.file} ({why})" for entry, why in stuck)
    return Refusal(
        "RollbackFailed",
        f"not every file could be put back: {told}",
        site.root,
        "solve that, or run the commands; then run any command of this tool: it takes up the rest",
        commands=[_by_hand(site, entry) for entry, _ in stuck],
    )


def _by_hand(site: Site, entry: Entry) -> str:
    if entry.before is None:
        return f"rm -f {shlex.quote(entry.file)}"
    if os.path.lexists(entry.old):
        return f"mv -f {shlex.quote(entry.old)} {shlex.quote(entry.file)}"
    return f"cp {shlex.quote(site.state('backups', entry.before))} {shlex.quote(entry.file)}"


def stage(site: Site, journal: dict) -> None:
    """Write what finish will put in place beside its places, so that nothing it does needs space."""
    for name, data in _state_files(site, journal).items():
        if data is not None:
            stage_state(site.state(name), data)


def finish(site: Site, journal: dict) -> None:
    """Do what remains after the decision. May be killed and repeated.

    Raises Refusal (RollbackFailed: this can no longer be undone) when it cannot; the journal stays then.
    """
    try:
        _finish(site, journal)
    except (OSError, Refusal) as error:
        why = os_refusal(error, error.filename or site.state_dir) if isinstance(error, OSError) else error
        raise Refusal(
            "RollbackFailed",
            f"the new files are in place, but the commit is not at its end: {why}",
            why.reply["where"],
            f"{why.reply['next']}; then any command of this tool finishes it",
        ) from error


def _finish(site: Site, journal: dict) -> None:
    receipt, files = journal["receipt"], _state_files(site, journal)
    step("receipt")
    _put(site, {name: data for name, data in files.items() if name != HISTORY})
    step("history")
    _put(site, {name: data for name, data in files.items() if name == HISTORY})
    step("clean")
    entries = entries_of(site, journal)
    for entry in entries:
        unlink(entry.old)
    sync_folders(entries)  # before the journal goes: nothing would remove them then
    remove_empty(map(site.lengthen, journal["old_directories"]))
    collect_backups(site, receipt)
    step("drop")
    unlink(site.state(JOURNAL))
    sync_directory(site.state_dir)


def _state_files(site: Site, journal: dict) -> dict[str, bytes | None]:
    """The state files as the commit leaves them, by name; None for one that must go."""
    receipt = journal["receipt"]
    if receipt is None and site.tree:
        return {RECEIPT: None, STATE: None, HISTORY: None}  # as it came: it has no prefix to keep a history in
    files = {RECEIPT: receipt and json.dumps(receipt, indent=1, sort_keys=True).encode()}
    if receipt and not os.path.exists(site.state(STATE)):
        files[STATE] = b"{}"  # RECORD lists it
    return {**files, HISTORY: history_with(site, journal["history"])}


def _put(site: Site, files: dict[str, bytes | None]) -> None:
    for name, data in files.items():
        if data is None:
            unlink(site.state(name))
        else:
            put_state(site.state(name), data)


def history_with(site: Site, line: dict) -> bytes:
    """The history file with one line more, unless it has that line already."""
    data = read(site.state(HISTORY)) or b""
    if any(json.loads(old).get("id") == line["id"] for old in data.splitlines()):
        return data
    return data + json.dumps(line, sort_keys=True).encode() + b"\n"
