"""A series is carried to another release: git merges it three-way, patch by patch.

The base is the release that the series was written on, theirs the series on top of it, ours the work tree.  Each patch
becomes a commit beside the work tree's own history and is cherry-picked from there, so that conflicts are git's own
(markers, an unmerged index), and so are the means against them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from patcher.errors import PortConflict, UsageProblem
from patcher.series.git import git, run
from patcher.series.model import Series, sha256
from patcher.series.releases import unpack
from patcher.series.worktree import is_picking, message_of, unmerged, write_files

MARKER = re.compile(rb"<{7} ")
DEFINITION = re.compile(rb"\s*(?:async def|def|class) (\w+)")
KINDS = {  # which of base, ours and theirs (1, 2, 3) there are
    "123": "both changed it",
    "13": "the release has no such file any more",
    "12": "the patch removes it, the release changed it",
    "23": "both added it",
    "1": "both moved it",
    "2": "the release moved a file to it",
    "3": "the patch moved a file to it",
}
PICK = ("-c", "core.editor=true", "-c", "merge.conflictStyle=diff3")


@dataclass(frozen=True)
class OpenConflict:
    """Conflicts in one file; ``places`` are (line, name of the function or class around it)."""

    path: str
    kind: str
    places: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        at = [f"line {line}" + (f", in {name}" if name else "") for line, name in self.places]
        return f"{self.path}: {self.kind}" + "".join(f"\n    {place}" for place in at)


@dataclass(frozen=True)
class Ported:
    """``obsolete`` patches change nothing there any more; ``left_out`` maps patches to the paths that stay behind."""

    obsolete: tuple[str, ...]
    left_out: dict[str, tuple[str, ...]]


def start(work: Path, series: Series, wheel: Path, wanted: Collection[str]) -> Ported:
    """Pick the series' patches whose names are ``wanted`` onto the work tree.

    ``wheel`` is that of the first release that the series is made for.  What a patch that is not
    wanted creates is no part of the port, and changes of it are left out.  Raises UsageProblem for a work tree that is
    not clean, PortConflict, with the work tree as git leaves it, where a patch does not merge.
    """
    if is_picking(work) or git(work, "status", "--porcelain").strip():
        raise UsageProblem(
            "the work tree is not clean",
            where=str(work),
            next_step="commit its changes; a port that waits goes on with --continue",
        )
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        unpack(wheel, series.package, series.versions[0], tree)
        chosen, left_out = _commits(work, series, tree, wanted)
    return Ported(_pick(work, *chosen) if chosen else (), left_out)


def go_on(work: Path) -> tuple[str, ...]:
    """Commit what was resolved and pick the rest; gives the obsolete patches.

    Raises UsageProblem if no port waits, PortConflict as `start`.
    """
    if not is_picking(work):
        raise UsageProblem("no port waits here", where=str(work), next_step="start one with ddtree-patch fork port")
    if unmerged(work):
        raise _conflict(work)
    staged = git(work, "diff", "--cached", "--name-only", "--diff-filter=d", "-z").decode().split("\0")[:-1]
    marked = [path for path in staged if _places(work / path)]
    if marked:
        raise PortConflict(
            f"conflict markers are left in {', '.join(marked)}",
            where=str(work),
            next_step="take them out, git add the files, then run --continue again",
        )
    return _pick(work, "--continue")


def _commits(
    work: Path, series: Series, tree: Path, wanted: Collection[str]
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """The patches as commits beside the work tree's history; gives those to pick, and what is left out of them."""
    for path, file in series.files.items():
        data = (tree / path).read_bytes() if (tree / path).exists() else None
        if sha256(data) != file.pristine:
            raise UsageProblem(
                f"{path} is not the pristine file that the series names",
                where=series.name,
                next_step=f"give the wheel of {series.package} {series.versions[0]} with --wheels DIR",
            )
    foreign = {
        file.path
        for patch in series.patches
        if patch.name not in wanted
        for file in patch.files
        if file.kind == "create"
    }
    head = _snapshot(work, tree, f"{series.package} {series.versions[0]}")
    chosen, left_out = [], {}
    for patch in series.patches:
        picked = patch.name in wanted
        files = [file for file in patch.files if not (picked and file.path in foreign)]
        if len(files) < len(patch.files):
            left_out[patch.name] = tuple(file.path for file in patch.files if file.path in foreign)
        if files:
            write_files(tree, files)
            head = _snapshot(work, tree, message_of(patch), head)
            chosen += [head] if picked else []
    git(work, "update-ref", f"refs/ddtree-patch/{series.name}", head)
    return chosen, left_out


def _snapshot(work: Path, tree: Path, message: str, parent: str = "") -> str:
    index = work / ".git" / "ddtree-patch-index"
    git(work, "add", "--all", "--force", ".", index=index, tree=tree)
    written = git(work, "write-tree", index=index).decode().strip()
    index.unlink()
    parents = ("-p", parent) if parent else ()
    return git(work, "commit-tree", written, *parents, "-F", "-", input=message.encode()).decode().strip()


def _pick(work: Path, *arguments: str) -> tuple[str, ...]:
    obsolete = []
    done = run(work, *PICK, "cherry-pick", *arguments)
    while done.returncode:
        if unmerged(work):
            raise _conflict(work)
        if not (work / ".git/CHERRY_PICK_HEAD").exists() or git(work, "status", "--porcelain").strip():
            raise UsageProblem(
                f"git cherry-pick failed: {done.stderr.decode(errors='replace').strip()}",
                where=str(work),
                next_step="git status there says more; git cherry-pick --abort takes the port back",
            )
        # Nothing is left of the patch: ours has it already.
        obsolete.append(_waiting(work)[0])
        done = run(work, *PICK, "cherry-pick", "--skip")
    return tuple(obsolete)


def _conflict(work: Path) -> PortConflict:
    name, purpose = _waiting(work)
    files = _open(work)
    count = sum(max(1, len(file.places)) for file in files)
    return PortConflict(
        f"the patch {name} does not merge by itself: {_counted(count, 'conflict')} in {_counted(len(files), 'file')}",
        where=str(work),
        next_step="resolve them, git add the files, then ddtree-patch fork port --continue "
        f"--work {work} (or git cherry-pick --skip, --abort)",
        detail="\n".join([f"{name}: {purpose}", *map(str, files)]),
    )


def _counted(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _waiting(work: Path) -> tuple[str, str]:
    """Name and message's body of the patch that is being picked."""
    message = git(work, "log", "-1", "--format=%B", "CHERRY_PICK_HEAD").decode().strip()
    name, _, rest = message.partition("\n")
    return name, rest.strip().partition("\n\n")[0]


def _open(work: Path) -> list[OpenConflict]:
    sides: dict[str, str] = {}
    for entry in git(work, "ls-files", "--unmerged", "-z").decode().split("\0")[:-1]:
        info, _, path = entry.partition("\t")
        sides[path] = sides.get(path, "") + info[-1]
    return [OpenConflict(path, KINDS[found], _places(work / path)) for path, found in sorted(sides.items())]


def _places(path: Path) -> tuple[tuple[int, str], ...]:
    """Where a conflict begins in the file, and the name of what is around it."""
    places, name = [], ""
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else (), 1):
        found = DEFINITION.match(line)
        if found:
            name = found[1].decode(errors="replace")
        if MARKER.match(line):
            places.append((number, name))
    return tuple(places)
