"""What the agent syncs, and when: enough for a disk that keeps no order at all (tests/faults/lossy_disk.py)."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from patcher.agent.main import answer
from tests.faults.lossy_disk import LossyDisk
from tests.support.installations import Installation

JOBS = {
    "apply": ("pristine", "temperature"),
    "upgrade": ("ddtree", "temperature"),
    "revert": ("temperature", "pristine"),
}


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """The agent runs in this process, and it ignores hangups."""
    names = (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT)
    before = [signal.getsignal(name) for name in names]
    yield
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)


def ask(tree: Installation, op: str, **request) -> dict:
    return answer({"op": op, "package": "sglang", "site_packages": str(tree.site), **request})


def record(folder: Path, before: str, after: str) -> tuple[LossyDisk, dict, dict]:
    """A commit from one stage to the other as it went to the disk, and the tree before and after it."""
    tree = Installation.tree(folder)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)
    if before != "pristine":
        ask(tree, "commit", **tree.request(before))
    old = tree.snapshot(compiled=False)
    disk = LossyDisk(folder)
    with disk.recording():
        ask(tree, "commit", **tree.request(after))
    return disk, files(old), files(tree.snapshot(compiled=False))


def files(snapshot: dict) -> dict[str, str]:
    return {path: content for path, (_, content) in snapshot.items() if content not in ("directory", "compiled")}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_crash_at_any_moment_loses_nothing(tmp_path: Path, job: str, rounds: int):
    disk, old, new = record(tmp_path / "tree", *JOBS[job])
    dice, wrong = random.Random(job), []
    for after in range(len(disk.events) + 1):
        for number, keep in enumerate([0, 1, *[0.5] * rounds]):
            tree = Installation(tmp_path / f"{after}-{number}")
            disk.crash(after, keep, dice, tree.site)
            left = journal(tree)
            said = ask(tree, "inspect")["recovered"]
            found = files(tree.snapshot(compiled=False))
            state = "old" if found == old else "new" if found == new else "mixed"
            promised = {"writing": ("undone", "old"), "committed": ("finished", "new")}.get(left, ("nothing", state))
            if state == "mixed" or (said, state) != promised or tree.leftovers():
                wrong.append(
                    f"after {disk.events[after - 1]} with {keep} kept: journal {left}, {said}, {state} "
                    f"{tree.leftovers()}"
                )
            if after == len(disk.events) and state != "new":
                wrong.append("what was reported as done is lost")
    assert wrong == []


def journal(tree: Installation) -> str:
    file = tree.state / "journal.json"
    return json.loads(file.read_bytes())["phase"] if file.exists() else "none"
