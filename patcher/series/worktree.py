"""A git work tree of a pristine release and our changes to it, and the series that is exported from it.

The tag ``pristine`` marks the untouched release; each commit after it becomes one patch.  A commit's subject is the
patch's name, its body says in one line what it is for, and a trailer ``Stage: NAME`` says to which stage it belongs.
A second trailer ``Shared: core`` marks a patch that only adds files and is shared by several series.
git's own settings, of the user and of the machine, have no influence on what is written.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from patcher.errors import SeriesProblem, UsageProblem
from patcher.series import udiff, udiff_parse
from patcher.series.catalogue import CORE, SETTINGS, load_series, read_settings
from patcher.series.model import GREEDY_STAGE, SAMPLING_STAGE, Series
from patcher.series.write import PatchText, write_series

BASE = "pristine"
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


def download_wheel(package: str, version: str, directory: Path) -> Path:
    """Fetch the release's wheel with pip; raises UsageProblem with pip's words if there is none."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.11",
        "--implementation",
        "cp",
        "--platform",
        "manylinux_2_34_x86_64",
        "--platform",
        "manylinux2014_x86_64",
        "--dest",
        str(directory),
        f"{package}=={version}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UsageProblem(
            f"pip could not fetch {package} {version}",
            next_step="Check the version, or give the wheel with --wheel FILE.",
            detail=done.stderr,
        )
    return wheels[0]


def init(work: Path, wheel: Path, package: str, version: str, series_dir: Path) -> int:
    """Make the work tree ``work`` from the wheel and replay the series, if there is one; returns how many patches.

    Raises UsageProblem if ``work`` is not empty or the wheel is another one, Conflict if a patch does not fit.
    """
    if work.exists() and any(work.iterdir()):
        raise UsageProblem("the work tree's directory is not empty", where=str(work), next_step="Name another one.")
    work.mkdir(parents=True, exist_ok=True)
    _unpack(wheel, package, version, work)
    _git(work, "init", "--quiet", "--object-format=sha1", "--initial-branch=series")
    for key, value in (("core.autocrlf", "false"), ("core.filemode", "true"), ("core.symlinks", "true")):
        _git(work, "config", key, value)
    (work / ".git/info/exclude").write_text("__pycache__/\n*.pyc\n")
    _commit(work, f"{package} {version}, pristine")
    _git(work, "tag", BASE)
    if not (series_dir / SETTINGS).exists():
        return 0
    series = load_series(series_dir)
    for patch in series.patches:
        for file in patch.files:
            target = work / file.path
            new = udiff.apply(file, target.read_bytes() if target.exists() else None)
            if new is None:
                target.unlink()
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(new)
        _commit(work, PatchText(patch.name, patch.stage, patch.purpose, b"", patch.shared).message)
    return len(series.patches)


def export(work: Path, package: str, version: str, series_dir: Path, replace_core: bool = False) -> Series:
    """Write the commits after the tag as a series; ``replace_core`` as in write_series.

    Raises SeriesProblem for a commit that is no patch, UsageProblem for a work tree with changes not committed.
    """
    if _git(work, "status", "--porcelain").strip():
        raise UsageProblem("the work tree has changes not committed", where=str(work), next_step="Commit them.")
    hashes = _git(work, "rev-list", "--reverse", f"{BASE}..HEAD").decode().split()
    if not hashes:
        raise SeriesProblem("no commit after the pristine one", where=str(work), next_step="Commit a change first.")
    settings = read_settings(series_dir) if (series_dir / SETTINGS).exists() else {}
    stages = {stage["name"]: stage["purpose"] for stage in settings.get("stages", [])}
    stages |= {name: purpose for name, purpose in DEFAULT_STAGES.items() if name not in stages}
    commits = [_read_commit(work, commit, package, list(stages)) for commit in hashes]
    _check_order(commits, list(stages))
    pristine: dict[str, bytes | None] = {}
    for commit in commits:
        for path, (old, _) in commit.changed.items():
            pristine.setdefault(path, old)
    return write_series(
        series_dir,
        name=f"{package}-{version}",
        package=package,
        versions=settings.get("versions", [version]),
        ops=settings.get("ops", DEFAULT_OPS),
        stages=stages,
        patches=[commit.patch for commit in commits],
        pristine=pristine,
        replace_core=replace_core,
    )


def _unpack(wheel: Path, package: str, version: str, work: Path) -> None:
    """The package's files from the wheel, each checked against the wheel's own RECORD."""
    prefix = f"{package}/"
    record_name = f"{package}-{version}.dist-info/RECORD"
    with zipfile.ZipFile(wheel) as archive:
        if record_name not in archive.namelist():
            raise _bad_wheel(f"not the wheel of {package} {version}", wheel)
        rows = csv.reader(archive.read(record_name).decode().splitlines())
        recorded = {row[0]: row[1] for row in rows}
        for name in archive.namelist():
            if not name.startswith(prefix) or name.endswith("/"):
                continue
            data = archive.read(name)
            digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if recorded.get(name) != f"sha256={digest}":
                raise _bad_wheel(f"{name} is not what the wheel's RECORD says", wheel)
            target = work / name
            if not target.resolve().is_relative_to(work.resolve()):
                raise _bad_wheel(f"{name} leads out of the wheel", wheel)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def _bad_wheel(what: str, wheel: Path) -> UsageProblem:
    return UsageProblem(what, where=str(wheel), next_step="Fetch it anew, or give another with --wheel FILE.")


def _read_commit(work: Path, commit: str, package: str, stages: list[str]) -> Commit:
    message = _git(work, "log", "-1", "--format=%B", commit).decode()
    subject, _, rest = message.strip().partition("\n")
    where = f"commit {commit[:10]} ({subject})"
    if len(_git(work, "rev-list", "--parents", "-1", commit).split()) != 2:
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
    diff = _git(work, "diff-tree", "-r", "-p", *DIFF_OPTIONS, f"{commit}^", commit)
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
    raw = _git(work, "diff-tree", "-r", "-z", "-M", "--raw", "--no-abbrev", f"{commit}^", commit)
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
    return _git(work, "cat-file", "blob", blob) if blob.strip("0") else None


def _commit(work: Path, message: str) -> None:
    # --force: the release may hold files that its own .gitignore names.
    _git(work, "add", "--all", "--force", ".")
    who = ("-c", "user.name=ddtree-patch", "-c", "user.email=ddtree-patch@localhost")
    _git(work, *who, "commit", "--quiet", "--no-verify", "--allow-empty", "--file=-", input=message.encode())


def _git(work: Path, *arguments: str, input: bytes = b"") -> bytes:
    """Run git on the work tree without the user's and the machine's settings; raises UsageProblem with its words."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", "-C", str(work), *arguments], input=input, capture_output=True, env=environment, check=False
    )
    if done.returncode:
        raise UsageProblem(
            f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}",
            where=str(work),
            next_step="Make the work tree with --init.",
        )
    return done.stdout
