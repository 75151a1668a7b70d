"""The state beside an installation is input: it speaks of the tree it lies in only, and only of what we may touch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from patcher.agent.record import record_lines
from patcher.errors import Conflict, HostUnreachable
from tests.support.installations import Installation, sha


def interrupted(tree: Installation) -> None:
    with pytest.raises(HostUnreachable):
        tree.commit("ddtree", **{"die_at": "rename:2"})


@pytest.mark.parametrize("moved", [False, True])
def test_a_copy_of_an_interrupted_tree_recovers_itself_only(tmp_path: Path, moved: bool):
    tree = Installation.tree(tmp_path / "here")
    pristine = tree.snapshot()
    interrupted(tree)
    mixed = tree.snapshot()
    copy = Installation(Path(shutil.copytree(tree.site, tmp_path / "there", symlinks=True)))
    if moved:
        shutil.rmtree(tree.site)
    copy.ask("recover")
    assert copy.snapshot() == pristine
    assert not copy.leftovers()
    if moved:
        assert not tree.site.exists()
    else:
        assert tree.snapshot() == mixed


@pytest.mark.parametrize("path", ["../outside.py", "/tmp/outside.py", "sglang/../../outside.py", "sglang"])
def test_a_journal_that_leads_out_of_the_package_is_refused(tmp_path: Path, path: str):
    tree = Installation.tree(tmp_path / "here")
    interrupted(tree)
    journal = tree.state / "journal.json"
    told = json.loads(journal.read_bytes())
    told["entries"][0]["path"] = path
    journal.write_text(json.dumps(told))
    before, around = tree.snapshot(), sorted(tmp_path.iterdir())
    with pytest.raises(Conflict, match="package"):
        tree.ask("recover")
    assert tree.snapshot() == before
    assert sorted(tmp_path.iterdir()) == around


@pytest.mark.parametrize("name", ["receipt.json", "."])
def test_state_that_others_can_write_is_refused(tmp_path: Path, name: str):
    tree = Installation.tree(tmp_path / "here")
    tree.commit("ddtree")
    os.chmod(tree.state / name, 0o777)
    with pytest.raises(Conflict, match="not private"):
        tree.ask("inspect", paths=[])


def test_damaged_state_is_named(tmp_path: Path):
    tree = Installation.tree(tmp_path / "here")
    tree.commit("ddtree")
    (tree.state / "receipt.json").write_bytes(b"{")
    with pytest.raises(Conflict, match="damaged") as caught:
        tree.ask("inspect", paths=[])
    assert caught.value.where.endswith("receipt.json")


def test_a_revert_never_writes_setuid(tmp_path: Path):
    tree = Installation.tree(tmp_path / "here")
    file = next(tree.site.glob("sglang/**/*.py"))
    tree.commit("ddtree")
    receipt = json.loads((tree.state / "receipt.json").read_bytes())
    for meta in receipt["host"]["meta"].values():
        meta["mode"] = 0o4755
    (tree.state / "receipt.json").write_text(json.dumps(receipt))
    tree.commit("pristine")
    assert not [path for path in tree.site.rglob("*") if path.is_file() and path.stat().st_mode & 0o7000], file


@pytest.mark.parametrize("name", ["receipt.json", "journal.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"files": 3, "host": 4}', b"\xff"])
def test_state_of_another_shape_is_named(tmp_path: Path, name: str, content: bytes):
    tree = Installation.tree(tmp_path / "here")
    tree.commit("ddtree")
    (tree.state / name).write_bytes(content)
    os.chmod(tree.state / name, 0o600)
    with pytest.raises(Conflict, match="damaged"):
        tree.ask("inspect", paths=[])


def test_record_is_true_after_a_revert_when_the_receipt_was_lost(tmp_path: Path):
    tree = Installation.tree(tmp_path / "here")
    tree.commit("ddtree")
    (tree.state / "receipt.json").unlink()
    tree.commit("temperature", receipt={**tree.request("temperature")["receipt"]})
    tree.commit("pristine")
    assert tree.is_stage("pristine")
    lines = record_lines(tree.record.read_bytes())
    for path, (_, told) in lines.items():
        assert ".ddtree-patch" not in path
        if told:
            assert told == sha((tree.site / path).read_bytes()), path


def test_lost_backups_are_told(tmp_path: Path):
    tree = Installation.tree(tmp_path / "here")
    tree.commit("ddtree")
    assert tree.ask("inspect", paths=[])["missing_backups"] == []
    shutil.rmtree(tree.state / "backups")
    assert tree.ask("inspect", paths=[])["missing_backups"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"7"])
def test_a_lock_of_another_shape_is_nobodys(tmp_path: Path, content: bytes):
    tree = Installation.tree(tmp_path / "here")
    tree.commit("ddtree")
    (tree.state / "lock").write_bytes(content)
    assert tree.ask("inspect", paths=[])["lock"] is None
    tree.commit("pristine")
    assert not tree.leftovers()
