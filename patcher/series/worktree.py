"""A git work tree of a pristine release and our changes to it, and the series that is exported from it.

The tag ``pristine`` marks the untouched release; each commit after it becomes one patch.  A commit's subject is the
patch's name, its body says in one line what it is for, and a trailer ``Stage: NAME`` says to which stage it belongs.
A second trailer ``Shared: core`` marks a patch that only adds files and is shared by several series.
git's own settings, of the user and of the machine, have no influence on what is written.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from patcher.errors import DdtreePatchError, UsageProblem
from patcher.series import udiff
from patcher.series.git import commit_all, git, run
from patcher.series.model import Patch, Series
from patcher.series.write import PatchText

BASE = "pristine"
SUBJECT = re.compile(r"(\S+) (\S+), pristine")


@dataclass(frozen=True)
class Base:
    """The release that a work tree is made of."""

    package: str
    version: str


def make(work: Path, base: Base, fill: Callable[[Path], None]) -> None:
    """Make the work tree ``work``; ``fill`` writes the package's files into it.

    Raises UsageProblem if ``work`` is not empty.
    """
    if work.exists() and any(work.iterdir()):
        raise UsageProblem("the work tree's directory is not empty", where=str(work), next_step="name another one")
    work.mkdir(parents=True, exist_ok=True)
    try:
        fill(work)
    except DdtreePatchError:
        shutil.rmtree(work)
        raise
    git(work, "init", "--quiet", "--object-format=sha1", "--initial-branch=series")
    for key, value in (("core.autocrlf", "false"), ("core.filemode", "true"), ("core.symlinks", "true")):
        git(work, "config", key, value)
    (work / ".git/info/exclude").write_text("__pycache__/\n*.pyc\n")
    commit_all(work, f"{base.package} {base.version}, pristine")
    git(work, "tag", BASE)


def base_of(work: Path) -> Base:
    """What `make` made the work tree of; raises UsageProblem if it did not."""
    done = run(work, "log", "-1", "--format=%s", BASE) if work.is_dir() else None
    found = SUBJECT.fullmatch(done.stdout.decode().strip()) if done else None
    if not found:
        raise UsageProblem(
            "not a work tree of ddtree-patch", where=str(work), next_step="make one with ddtree-patch fork init"
        )
    return Base(*found.groups())


def replay(work: Path, series: Series) -> int:
    """One commit a patch; returns how many.  Raises Conflict if one does not fit."""
    for patch in series.patches:
        write_files(work, patch.files)
        commit_all(work, message_of(patch))
    return len(series.patches)


def write_files(tree: Path, files: Iterable[udiff.FilePatch]) -> None:
    """Change the tree's files as the patches of a file say.  Raises Conflict if one does not fit."""
    for file in files:
        target = tree / file.path
        new = udiff.apply(file, target.read_bytes() if target.exists() else None)
        if new is None:
            target.unlink()
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(new)


def message_of(patch: Patch) -> str:
    """The message of the commit that a patch becomes."""
    return PatchText(patch.name, patch.stage, patch.purpose, b"", patch.shared).message


def unmerged(work: Path) -> list[str]:
    """The paths with conflicts that are still open."""
    listed = git(work, "diff", "--name-only", "--diff-filter=U", "-z").decode().split("\0")
    return sorted({path for path in listed if path})


def is_picking(work: Path) -> bool:
    """Whether a port has stopped at a patch and waits for --continue."""
    return any((work / ".git" / name).exists() for name in ("CHERRY_PICK_HEAD", "sequencer"))
