"""Somebody who may write in the package's directory puts links there while the agent is at work: nothing outside of the
package is written, removed or given away, and the next command finds a whole package again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from patcher.errors import DdtreePatchError
from tests.faults.agent import Striker
from tests.support.installations import Environment, Installation

POINTS = ("check", "journal", "write:1", "keep", "rename:1", "rename:2", "bytecode", "clean")
RARER = ("backup", "write:2", "write:3", "rename:3", "read-back", "stage", "decide", "receipt")


@pytest.fixture
def tree(tmp_path: Path) -> Installation:
    return Installation.tree(tmp_path / "site")


def look(folder: Path) -> dict[str, tuple]:
    """Every file of a directory: owner, mode, names, bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        found[str(path.relative_to(folder))] = (
            info.st_uid,
            info.st_gid,
            info.st_mode,
            info.st_nlink,
            path.read_bytes() if path.is_file() else None,
        )
    return found


def struck(tree: Installation, point: str, strike) -> None:
    """A commit that stands still at the point while `strike` is called, and then goes on; it may fail, typed."""
    tree.connection = Environment({"DDTREE_AGENT_STOP_AT": point})
    striker = Striker(tree.state / "lock", lambda pid: strike(), fatal=False)
    try:
        tree.commit("ddtree")
    except DdtreePatchError as error:
        assert "the agent failed" not in error.what, error.detail
    finally:
        tree.connection = Environment({})
        striker.end()
    assert striker.pid is not None, f"the agent never came to {point}"


@pytest.mark.parametrize("point", [*POINTS, *(pytest.param(point, marks=pytest.mark.long) for point in RARER)])
def test_a_directory_that_becomes_a_link_leads_nowhere(tree: Installation, tmp_path: Path, point: str):
    inside, victim, aside = tree.site / "sglang" / "srt", tmp_path / "victim", tmp_path / "aside"
    shutil.copytree(inside, victim)  # the same files: every hash fits there too
    before = look(victim)

    def swap() -> None:
        inside.rename(aside)
        inside.symlink_to(victim)

    struck(tree, point, swap)
    assert look(victim) == before
    inside.unlink()
    aside.rename(inside)
    tree.ask("recover")
    assert tree.is_stage("pristine") or tree.is_stage("ddtree")
    assert tree.leftovers() == [] and look(victim) == before


@pytest.mark.parametrize("point", ["write:1", "rename:1", "rename:2", "read-back"])
def test_a_file_that_becomes_a_link_is_not_written_through(tree: Installation, tmp_path: Path, point: str):
    file, victim = tree.site / "sglang/srt/args.py", tmp_path / "victim.py"
    shutil.copy(file, victim)
    before = victim.read_bytes(), victim.stat()

    def swap() -> None:
        file.unlink()
        file.symlink_to(victim)

    struck(tree, point, swap)
    tree.ask("recover")
    assert victim.read_bytes() == before[0] and victim.stat().st_mode == before[1].st_mode
    assert victim.stat().st_uid == before[1].st_uid


@pytest.mark.parametrize("where", [".ddtree-patch", ".ddtree-patch/sglang", ".ddtree-patch/sglang/backups"])
def test_state_that_is_a_link_is_refused_and_empties_nothing(tree: Installation, tmp_path: Path, where: str):
    victim = tmp_path / "victim"
    (victim / "sglang" / "backups").mkdir(parents=True)
    (victim / "precious").write_text("kept")
    before = look(victim)
    link = tree.site / where
    link.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    for folder in (tree.site / ".ddtree-patch", tree.state):
        if folder.is_dir() and not folder.is_symlink():
            folder.chmod(0o700)
    link.symlink_to(victim)
    pristine = tree.bytes_at()
    with pytest.raises(DdtreePatchError) as caught:
        tree.commit("ddtree")
    assert caught.value.exit_code == 4 and "the agent failed" not in caught.value.what
    assert look(victim) == before and tree.bytes_at() == pristine


def test_a_cache_of_bytecode_that_is_a_link_is_refused(tree: Installation, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "args.cpython-311.pyc").write_bytes(b"of another program")
    before = look(victim)
    (tree.site / "sglang/srt/__pycache__").symlink_to(victim)
    with pytest.raises(DdtreePatchError, match="is a link or a file"):
        tree.commit("ddtree")
    assert look(victim) == before and tree.is_stage("pristine")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another account")
@pytest.mark.parametrize("name", ["", "receipt.json"])
def test_state_of_another_account_is_refused(tree: Installation, name: str):
    tree.commit("ddtree")
    os.chown(tree.state / name, 12345, 12345)
    with pytest.raises(DdtreePatchError, match="not private"):
        tree.commit("pristine")
    assert tree.is_stage("ddtree")


@pytest.mark.parametrize(
    ("folder", "mode", "told"),
    [("sglang/srt", 0o777, True), (".", 0o777, True), ("sglang", 0o1777, False), ("sglang", 0o755, False)],
)
def test_directories_that_anyone_may_write_are_named(tree: Installation, folder: str, mode: int, told: bool):
    place = tree.site / folder
    place.chmod(mode)
    exposed = tree.ask("inspect", paths=["sglang/srt/args.py"])["exposed"]
    assert exposed == ([str(place.resolve())] if told else [])


def test_everything_kept_is_private(tree: Installation):
    os.umask(0)
    try:
        tree.commit("ddtree")
        tree.ask("state", put={"service": {"original": {}}})
    finally:
        os.umask(0o022)
    for path in (tree.state.parent, tree.state, *tree.state.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
