"""The commits of a work tree become a series."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from patcher.errors import Conflict, SeriesProblem, UsageProblem
from patcher.series import udiff, udiff_parse
from patcher.series.catalogue import CORE
from patcher.series.git import git
from patcher.series.model import GREEDY_STAGE, SAMPLING_STAGE, Series
from patcher.series.settings import SETTINGS, read_settings
from patcher.series.worktree import BASE, base_of, is_picking, unmerged
from patcher.series.write import PatchText, write_series

PATCH_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
DEFAULT_STAGES = {
    GREEDY_STAGE: "adds DDTree speculative decoding with greedy verification to stock SGLang",
    SAMPLING_STAGE: "makes DDTree sample: exact verification at temperatures above 0",
}
DEFAULT_OPS = ("tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob")
DIFF_OPTIONS = (
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--full-index",
    "--unified=3",
    "--diff-algorithm=myers",
    "--no-indent-heuristic",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


@dataclass(frozen=True)
class Commit:
    """One commit; ``changed`` maps each path to its (old, new) bytes, None where absent."""

    patch: PatchText
    changed: dict[str, tuple[bytes | None, bytes | None]]


def export(work: Path, series_dir: Path, replace_core: bool = False) -> Series:
    """Write the commits after the tag as a series; ``replace_core`` as in write_series.

    Raises SeriesProblem for a commit that is no patch, Conflict while a port waits for someone to resolve its
    conflicts, UsageProblem for a work tree with changes not committed and for a series of another release.
    """
    base = base_of(work)
    if is_picking(work):
        raise Conflict(
            "a port has open conflicts: nothing is exported",
            where=", ".join(unmerged(work)) or str(work),
            next_step=f"resolve them, git add the files, then ddtree-patch fork port --continue --work {work}",
        )
    if git(work, "status", "--porcelain").strip():
        raise UsageProblem("the work tree has changes not committed", where=str(work), next_step="Commit them.")
    hashes = git(work, "rev-list", "--reverse", f"{BASE}..HEAD").decode().split()
    if not hashes:
        raise SeriesProblem("no commit after the pristine one", where=str(work), next_step="Commit a change first.")
    settings = read_settings(series_dir) if (series_dir / SETTINGS).exists() else None
    versions = settings.versions if settings else (base.version,)
    if base.version not in versions:
        raise UsageProblem(
            f"the work tree is of {base.version}, the series there of {', '.join(versions)}",
            where=str(series_dir),
            next_step="name another directory with --series DIR",
        )
    stages = {stage.name: stage.purpose for stage in settings.stages} if settings else {}
    stages |= {name: purpose for name, purpose in DEFAULT_STAGES.items() if name not in stages}
    commits = [_read_commit(work, commit, base.package, list(stages)) for commit in hashes]
    _check_order(commits, list(stages))
    pristine: dict[str, bytes | None] = {}
    for commit in commits:
        for path, (old, _) in commit.changed.items():
            pristine.setdefault(path, old)
    return write_series(
        series_dir,
        name=series_dir.name,
        package=base.package,
        versions=versions,
        ops=settings.ops if settings else DEFAULT_OPS,
        stages=stages,
        patches=[commit.patch for commit in commits],
        pristine=pristine,
        replace_core=replace_core,
    )


def _read_commit(work: Path, commit: str, package: str, stages: list[str]) -> Commit:
    message = git(work, "log", "-1", "--format=%B", commit).decode()
    subject, _, rest = message.strip().partition("\n")
    where = f"commit {commit[:10]} ({subject})"
    if len(git(work, "rev-list", "--parents", "-1", commit).split()) != 2:
        raise SeriesProblem("a merge is no patch", where=where, next_step="Make the history a line: git rebase.")
    if not PATCH_NAME.fullmatch(subject):
        raise SeriesProblem(
            "the subject is not a name of small letters, digits and dashes", where=where, next_step="Reword the commit."
        )
    found = re.findall(r"^Stage: *(\S+) *$", rest, re.MULTILINE)
    if len(found) != 1 or found[0] not in stages:
        raise SeriesProblem(
            f"the commit needs one trailer 'Stage: NAME', of {', '.join(stages)}",
            where=where,
            next_step="Reword the commit.",
        )
    shared = re.findall(r"^Shared: *(\S+) *$", rest, re.MULTILINE)
    if shared not in ([], [CORE]):
        raise SeriesProblem(f"the trailer can only be 'Shared: {CORE}'", where=where, next_step="Reword the commit.")
    body = re.sub(r"^[A-Z][A-Za-z-]+: .*$", "", rest, flags=re.MULTILINE).strip()
    purpose = " ".join(body.split("\n\n")[0].split())
    if not purpose:
        raise SeriesProblem("the body does not say what the patch is for", where=where, next_step="Reword the commit.")
    changed = _changes(work, commit, package, where)
    # "commit^ commit" and not "commit": the latter would print the commit's id in front of the diff.
    diff = git(work, "diff-tree", "-r", "-p", *DIFF_OPTIONS, f"{commit}^", commit)
    for patch in udiff_parse.parse(diff, where):
        old, new = changed[patch.path]
        if udiff.apply(patch, old) != new:
            raise SeriesProblem(f"the diff of {patch.path} does not produce the file", where=where)
    if shared and any(old is not None for old, _ in changed.values()):
        raise SeriesProblem(
            "a shared patch may only add files",
            where=where,
            next_step="Move the changes of the release's own files to a commit of their own.",
        )
    return Commit(PatchText(subject, found[0], purpose, diff, bool(shared)), changed)


def _changes(work: Path, commit: str, package: str, where: str) -> dict[str, tuple[bytes | None, bytes | None]]:
    raw = git(work, "diff-tree", "-r", "-z", "-M", "--raw", "--no-abbrev", f"{commit}^", commit)
    fields = iter(raw.decode().split("\0")[:-1])
    changed = {}
    for field in fields:
        old_mode, new_mode, old_blob, new_blob, status = field.removeprefix(":").split()
        path = next(fields)
        modes = {mode for mode in (old_mode, new_mode) if mode != "000000"}
        if status not in ("A", "D", "M") or len(modes) != 1 or (status != "M" and modes != {"100644"}):
            raise SeriesProblem(
                f"{path}: only plain text files may be added, changed or removed (git says {field})",
                where=where,
                next_step="Leave renames, links, modes and submodules out of the commit.",
            )
        if not path.startswith(f"{package}/"):
            raise SeriesProblem(f"{path} is outside of the package {package}", where=where, next_step="Leave it out.")
        changed[path] = (_blob(work, old_blob), _blob(work, new_blob))
        if any(data and b"\0" in data for data in changed[path]):
            raise SeriesProblem(f"{path} is a binary file", where=where, next_step="Leave it out of the commit.")
    if not changed:
        raise SeriesProblem("the commit changes nothing", where=where, next_step="Drop it.")
    return changed


def _check_order(commits: list[Commit], stages: list[str]) -> None:
    patches = [commit.patch for commit in commits]
    for before, after in pairwise(patches):
        if stages.index(after.stage) < stages.index(before.stage):
            raise SeriesProblem(
                f"{after.name} is of stage {after.stage}, but follows {before.name} of stage {before.stage}",
                where="series",
                next_step=f"Reorder the commits: {', then '.join(stages)}.",
            )
    names = [patch.name for patch in patches]
    if len(set(names)) != len(names):
        raise SeriesProblem("two commits have the same subject", where="series", next_step="Reword one of them.")


def _blob(work: Path, blob: str) -> bytes | None:
    return git(work, "cat-file", "blob", blob) if blob.strip("0") else None
