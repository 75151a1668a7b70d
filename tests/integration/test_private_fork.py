"""The stage that samples goes to a tree that has a DDTree of its own: the real wheel with made-up edits of a team."""

from __future__ import annotations

import ast
import hashlib
import shutil
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

import pytest

from patcher.series.catalogue import ROOT_VARIABLE, load_series
from scripts.rig import target
from tests.support.installations import hashes
from tests.unit.series.test_worktree import git

SPECULATIVE = "sglang/srt/speculative"
INFO, UTILS, WORKER = (f"{SPECULATIVE}/{name}.py" for name in ("dflash_info", "dflash_utils", "ddtree_worker"))
CALL = b"is_dflash_sampling_verify_available()"
PATCHES = ("--patch", "target-distribution", "--patch", "chain-sampling")


@pytest.fixture
def site(wheel_tree: Path) -> Path:
    """Their tree: a worker of their own, a helper in dflash_utils, an edit of the line that decides how to sample."""
    utils, info = ((wheel_tree / path).read_bytes() for path in (UTILS, INFO))
    assert info.count(CALL) == 1
    _write(
        wheel_tree,
        {
            WORKER: b'"""Our own tree worker."""\n\n\ndef verify(batch):\n    return batch\n',
            UTILS: utils + b"\n\ndef our_tree_mask(width):\n    return [True] * width\n",
            INFO: b"# ours\n" + info.replace(CALL, CALL + b" and self.our_width > 0"),
        },
    )
    return wheel_tree


def test_the_sampling_stage_onto_a_private_tree(site, tool, tmp_path, monkeypatch):
    theirs = Path(shutil.copytree(site, tmp_path / "theirs"))
    work, mine = tmp_path / "work", tmp_path / "own" / "acme-sglang"
    wheels = ("--wheels", target.wheel().parent)
    assert tool("fork", "init", "0.5.11", "--from-tree", theirs, "--work", work).code == 0
    said = tool("fork", "port", "--from", "sglang-0.5.11", *PATCHES, "--work", work, *wheels)
    assert said.code == 4, said.stderr
    # Their edit of the line is the one question; their worker and helper are none.
    assert f"{INFO}: both changed it" in said.stderr and UTILS not in said.stderr and WORKER not in said.stderr
    assert tool("fork", "export", "--work", work, "--series", mine).code == 4 and not mine.exists()
    _take_ours_where_both_changed(work / INFO)
    git(work, "add", "-A")
    said = tool("fork", "port", "--continue", "--work", work)
    assert said.code == 0 and said.stdout.count("Merged") == 2, said.stderr
    assert tool("fork", "export", "--work", work, "--series", mine).code == 0
    series = load_series(mine)
    assert series.states == ("pristine", "sampling") and WORKER not in series.files and INFO in series.files

    monkeypatch.setenv(ROOT_VARIABLE, str(mine.parent))
    start = hashes(site)
    done = tool("apply", "--site-packages", site, "--json")
    assert done.code == 0 and done.host["plan"]["stage_to"] == "sampling", done.stderr
    patched = (site / INFO).read_bytes()
    assert patched.startswith(b"# ours\n") and b"accept_chain" in patched and CALL not in patched
    for path in series.files:
        ast.parse((site / path).read_bytes())
    assert tool("revert", "--site-packages", site).code == 0
    assert hashes(site) == start


def _take_ours_where_both_changed(path: Path) -> None:
    """The series' side of each conflict, as a person would choose here."""
    kept, side = [], "both"
    for line in path.read_bytes().splitlines(keepends=True):
        if line.startswith((b"<<<<<<< ", b"||||||| ")):
            side = "theirs"
        elif line.startswith(b"=======") and side != "both":
            side = "ours"
        elif line.startswith(b">>>>>>> "):
            side = "both"
        elif side != "theirs":
            kept.append(line)
    path.write_bytes(b"".join(kept))


def _write(site: Path, files: Mapping[str, bytes]) -> None:
    """As a wheel of their own would install them: RECORD knows their hashes."""
    record = site / "sglang-0.5.11.dist-info/RECORD"
    rows = [row for row in record.read_text().splitlines() if row.partition(",")[0] not in files]
    for path, data in files.items():
        (site / path).write_bytes(data)
        digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    record.write_text("\n".join(rows) + "\n")
