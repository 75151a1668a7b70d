"""What an installation looks like after a fault: old, new or mixed, and what was left behind."""

from __future__ import annotations

import json
import marshal
from pathlib import Path
from typing import Any

from patcher.agent.backups import needed_backups
from patcher.agent.files import NEW, OLD
from tests.faults.causes import THEIRS, WORKER
from tests.support.installations import Installation, sha

STATE_FILES = {"receipt.json", "history.jsonl", "state.json", "backups"}


def state(installation: Installation, old: dict[str, Any], new: dict[str, Any], *, theirs: bool = False) -> str:
    """ "old" or "new" when every file of the package and RECORD is, else "mixed". theirs: but for the one changed."""
    found = _files(installation)
    if theirs:
        found.pop(WORKER, None)
    names = [
        name
        for name, files in (("old", old), ("new", new))
        if found == {path: value for path, value in files.items() if not (theirs and path == WORKER)}
    ]
    return " and ".join(names) or "mixed"


def _files(installation: Installation) -> dict[str, Any]:
    return {path: value for path, value in files_of(installation).items() if not path.endswith((NEW, OLD))}


def files_of(installation: Installation) -> dict[str, Any]:
    """Every file of site-packages but bytecode: its mode and sha256."""
    return {
        path: value
        for path, value in installation.snapshot(compiled=False).items()
        if value[1] not in ("directory", "compiled")
    }


def journal(installation: Installation) -> str:
    """What the journal says: "none", or its phase."""
    file = installation.state / "journal.json"
    return json.loads(file.read_bytes())["phase"] if file.exists() else "none"


def has_their_line(installation: Installation) -> bool:
    return (installation.site / WORKER).read_bytes().endswith(THEIRS)


def litter(installation: Installation, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """What no command may leave, once the next one has run. start, end: snapshots of which one's directories count."""
    found = [f"left: {path}" for path in installation.leftovers()]
    found += [f"stale bytecode: {path}" for path in installation.site.rglob("*.pyc") if _is_stale(path)]
    folders = {path for path, value in installation.snapshot(compiled=False).items() if value[1] == "directory"}
    known = [{path for path, value in snapshot.items() if value[1] == "directory"} for snapshot in (start, end)]
    if folders not in known:
        found.append(f"directories: {sorted(folders ^ known[0])}")
    if installation.state.parent.exists():
        found += _litter_of_state(installation)
    return found


def _litter_of_state(installation: Installation) -> list[str]:
    if not installation.state.exists():
        return ["left: an empty state directory"]
    names = {path.name for path in installation.state.iterdir()}
    found = [f"left: {name}" for name in sorted(names - STATE_FILES)]
    receipt = json.loads((installation.state / "receipt.json").read_bytes()) if "receipt.json" in names else None
    kept = {path.name for path in (installation.state / "backups").glob("*")}
    if kept != needed_backups(receipt):
        found.append(
            f"backups: {len(kept - needed_backups(receipt))} too many, {len(needed_backups(receipt) - kept)} missing"
        )
    found += [
        f"damaged: {path}" for path in (installation.state / "backups").glob("*") if sha(path.read_bytes()) != path.name
    ]
    return found


def _is_stale(compiled: Path) -> bool:
    """Whether Python would run this and it is not what the source says."""
    source = compiled.parent.parent / (compiled.name.split(".")[0] + ".py")
    if not source.exists():
        return True
    data, info = compiled.read_bytes(), source.stat()
    flags = int.from_bytes(data[4:8], "little")
    current = data[8:16] == (int(info.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little") + info.st_size.to_bytes(4, "little")
    if flags == 0 and not current:
        return False  # Python compiles it again
    return marshal.loads(data[16:]) != compile(source.read_bytes(), str(source), "exec", dont_inherit=True)
