"""The shipped series on the real wheel: over a real sshd as over no connection at all, and back byte for byte."""

import pytest

from tests.support.installations import hashes


@pytest.mark.parametrize("way", ["local", "ssh"])
def test_apply_again_status_revert(wheel_tree, sshd, tool, monkeypatch, tmp_path, way):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(sshd(alias="demo").ssh_config))
    options = (*(("--host", "demo") if way == "ssh" else ()), "--site-packages", wheel_tree, "--json")
    start = hashes(wheel_tree)
    dry = tool("apply", *options, "--dry-run")
    assert dry.code == 0 and hashes(wheel_tree) == start, dry.stderr
    done = tool("apply", *options)
    assert done.code == 0 and done.host["plan"] == dry.host["plan"], done.stderr
    changed = {path for path, digest in hashes(wheel_tree).items() if start.get(path) != digest}
    assert {action["path"] for action in done.host["plan"]["actions"]} <= changed
    assert all(path.startswith(("sglang/srt/", ".ddtree-patch/")) or path.endswith("/RECORD") for path in changed)
    patched = hashes(wheel_tree)
    again = tool("apply", *options)
    assert again.code == 0 and again.host["plan"]["noop"] and hashes(wheel_tree) == patched
    assert tool("status", *options).host["state"] == "sampling"
    assert tool("verify", *options).code == 0
    assert tool("revert", *options).code == 0
    assert hashes(wheel_tree) == start


def test_one_changed_line_in_one_target_file(wheel_tree, tool, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    plan = tool("apply", "--site-packages", wheel_tree, "--dry-run", "--json").host["plan"]
    path = next(action["path"] for action in plan["actions"] if action["kind"] == "modify")
    lines = (wheel_tree / path).read_bytes().split(b"\n")
    lines[20] += b"  # changed by hand"
    (wheel_tree / path).write_bytes(b"\n".join(lines))
    start = hashes(wheel_tree)
    said = tool("apply", "--site-packages", wheel_tree, "--json")
    assert said.code == 4 and f"{path}, line 21" in said.error["what"]
    assert hashes(wheel_tree) == start


def test_up_to_greedy_and_on_to_sampling(wheel_tree, tool, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    start = hashes(wheel_tree)
    for stage in ("greedy", "sampling", "greedy"):
        assert tool("apply", "--site-packages", wheel_tree, "--up-to", stage).code == 0
        assert tool("status", "--site-packages", wheel_tree, "--json").host["state"] == stage
    assert tool("revert", "--site-packages", wheel_tree).code == 0
    assert hashes(wheel_tree) == start
