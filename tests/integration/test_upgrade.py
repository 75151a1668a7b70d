"""What the first series for 0.5.11 left on a host is read, taken back, and replaced by today's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installations import hashes

ROOT = Path(__file__).parents[2]
FIRST = "b9f6308"  # the last commit with the series as it was: its own text of the algorithm, stages by their old names


@pytest.fixture(scope="module")
def first_tool(tmp_path_factory) -> Path:
    """The tool and the series of that commit."""
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{FIRST}^{{commit}}"], check=False).returncode:
        pytest.skip(f"this checkout has no history back to {FIRST}")
    folder = tmp_path_factory.mktemp("first")
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", FIRST, "patcher", "patches", "configs"], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


@pytest.fixture(params=["ddtree", "temperature"])
def old_tree(request, first_tool, wheel_tree, tmp_path, monkeypatch):
    """(the wheel's tree, patched by that tool up to a stage, and its hashes before)."""
    monkeypatch.chdir(tmp_path)
    before = hashes(wheel_tree)
    command = [sys.executable, "-m", "patcher", "apply", "--site-packages", wheel_tree, "--up-to", request.param]
    subprocess.run(command, cwd=first_tool, env={**os.environ, "PYTHONPATH": str(first_tool)}, check=True)
    assert hashes(wheel_tree) != before
    return wheel_tree, before


def test_revert(old_tree, tool):
    tree, before = old_tree
    assert tool("revert", "--site-packages", tree).code == 0
    assert hashes(tree) == before


def test_status_tells_the_stage_by_its_name_of_today(old_tree, tool):
    said = tool("status", "--site-packages", old_tree[0], "--json").host
    assert said["receipt"]["stage"] in ("greedy", "sampling") and said["receipt_state"] == "valid"
    assert said["state"] == "an earlier series" and {row["state"] for row in said["files"]} >= {"an earlier series"}
    assert tool("verify", "--site-packages", old_tree[0]).code == 0


def test_apply_replaces_it_and_revert_gives_back_the_wheel(old_tree, tool):
    tree, before = old_tree
    assert tool("apply", "--site-packages", tree).code == 0
    said = tool("status", "--site-packages", tree, "--json").host
    assert (said["state"], said["receipt"]["stage"]) == ("sampling", "sampling")
    assert tool("verify", "--site-packages", tree).code == 0
    assert tool("apply", "--site-packages", tree, "--json").host["plan"]["noop"]
    assert tool("revert", "--site-packages", tree).code == 0
    assert hashes(tree) == before
