"""The commands on trees of files: all that can go wrong before a commit, and that nothing changes then."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.support.builders import PRISTINE, STAGES, files_after, make_package, make_series


def hashes(root: Path) -> dict[str, str]:
    """Every file below `root`, the state directory included."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def content(root: Path) -> dict[str, bytes | None]:
    return {path: (root / path).read_bytes() if (root / path).exists() else None for path in PRISTINE}


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A pristine tree, whose series is the catalogue."""
    (tmp_path / "series").mkdir()
    make_series(tmp_path / "series/sglang-0.5.11")
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(tmp_path / "series"))
    monkeypatch.chdir(tmp_path)
    return make_package(tmp_path / "site-packages")


def test_dry_run_is_what_apply_does_and_revert_gives_every_byte_back(tree, tool):
    start = hashes(tree)
    dry = tool("apply", "--site-packages", tree, "--dry-run", "--json")
    assert dry.code == 0 and hashes(tree) == start and not dry.host["changed"]
    done = tool("apply", "--site-packages", tree, "--json")
    assert done.code == 0 and done.host["changed"]
    assert done.host["plan"] == dry.host["plan"]
    assert content(tree) == files_after("temperature")
    assert any("restart" in line for line in done.host["not_done"]), "what was not done must be said"
    back = tool("revert", "--site-packages", tree, "--json")
    assert back.code == 0 and hashes(tree) == start


def test_apply_twice_is_a_no_op_that_says_so(tree, tool):
    tool("apply", "--site-packages", tree)
    once = hashes(tree)
    again = tool("apply", "--site-packages", tree, "--json")
    assert again.code == 0 and not again.host["changed"] and again.host["plan"]["noop"]
    assert "nothing to change" in again.host["summary"]
    assert hashes(tree) == once


def test_revert_twice_is_a_no_op_that_says_so(tree, tool):
    start = hashes(tree)
    back = tool("revert", "--site-packages", tree, "--json")
    assert back.code == 0 and "nothing to revert" in back.host["summary"] and hashes(tree) == start


def test_up_to_a_lower_stage_works_from_a_higher_one(tree, tool):
    start = hashes(tree)
    for stage in ("ddtree", "temperature", "ddtree"):
        assert tool("apply", "--site-packages", tree, "--up-to", stage).code == 0
        assert content(tree) == files_after(stage)
        assert tool("status", "--site-packages", tree, "--json").host["state"] == stage
        assert tool("verify", "--site-packages", tree).code == 0
    assert tool("revert", "--site-packages", tree).code == 0
    assert hashes(tree) == start


def test_what_was_applied_under_the_old_names_of_stages(tree, tool, tmp_path):
    start = hashes(tree)
    assert tool("apply", "--site-packages", tree, "--up-to", "ddtree").code == 0
    stages = {"greedy": STAGES["ddtree"], "sampling": STAGES["temperature"]}
    make_series(tmp_path / "series/sglang-0.5.11", stages=stages)
    status = tool("status", "--site-packages", tree, "--json").host
    assert (status["state"], status["receipt"]["stage"]) == ("greedy", "greedy")
    assert tool("verify", "--site-packages", tree, "--json").code == 0
    again = tool("apply", "--site-packages", tree, "--up-to", "ddtree", "--json").host
    assert again["plan"]["noop"] and again["plan"]["stage_to"] == "greedy"
    assert tool("apply", "--site-packages", tree, "--up-to", "temperature").code == 0
    assert content(tree) == files_after("temperature")
    assert tool("revert", "--site-packages", tree).code == 0
    assert hashes(tree) == start


def test_an_unknown_stage_is_refused_and_the_stages_are_named(tree, tool):
    said = tool("apply", "--site-packages", tree, "--up-to", "tempurature", "--json")
    assert said.code == 2 and "ddtree, temperature" in said.error["next"]


def test_status_says_what_is_installed(tree, tool):
    fresh = tool("status", "--site-packages", tree, "--json").host
    assert (fresh["state"], fresh["receipt_state"]) == ("pristine", "none")
    tool("apply", "--site-packages", tree)
    after = tool("status", "--site-packages", tree, "--json").host
    assert (after["state"], after["receipt_state"], after["receipt"]["stage"]) == (
        "temperature",
        "valid",
        "temperature",
    )
    (tree / "sglang/srt/info.py").write_bytes(b"edited\n")
    edited = tool("status", "--site-packages", tree, "--json").host
    assert edited["state"] == "drift"
    assert {f["path"]: f["state"] for f in edited["files"]}["sglang/srt/info.py"] == "unknown"


@pytest.mark.parametrize("stage", ["pristine", "ddtree", "temperature"])
def test_status_of_a_drifted_tree_says_of_the_other_files_what_they_are(tree, tool, stage):
    """sglang/srt/info.py is the same in the pristine package and at stage ddtree, args.py at both stages."""
    if stage != "pristine":
        tool("apply", "--site-packages", tree, "--up-to", stage)
    (tree / "sglang/srt/worker.py").write_bytes(b"edited\n")
    said = tool("status", "--site-packages", tree, "--json").host
    assert {f["path"]: f["state"] for f in said["files"]} == {
        f"sglang/srt/{name}.py": "unknown" if name == "worker" else stage
        for name in ("args", "ddtree", "info", "worker")
    }


def test_history_tells_what_was_done(tree, tool):
    tool("apply", "--site-packages", tree, "--up-to", "ddtree")
    tool("apply", "--site-packages", tree)
    lines = tool("history", "--site-packages", tree, "--json").host["lines"]
    assert [(line["what"], line["to"]) for line in lines] == [("apply", "ddtree"), ("apply", "temperature")]


def test_drift_names_file_and_line_and_changes_nothing(tree, tool):
    path = tree / "sglang/srt/args.py"
    path.write_bytes(path.read_bytes().replace(b"ARG_7 = 7\n", b"ARG_7 = 8\n"))
    start = hashes(tree)
    said = tool("apply", "--site-packages", tree, "--json")
    assert said.code == 4 and said.error["error"] == "Drift"
    assert "sglang/srt/args.py" in said.error["what"] and "line 8" in said.error["what"]
    assert hashes(tree) == start
    assert tool("doctor", "--site-packages", tree).code == 4
    assert tool("diff", "--site-packages", tree).code == 4


def test_half_patched_without_a_receipt_is_completed_and_can_be_reverted(tree, tool):
    start = content(tree)
    (tree / "sglang/srt/args.py").write_bytes(STAGES["ddtree"]["sglang/srt/args.py"])
    assert tool("status", "--site-packages", tree, "--json").host["state"] == "mixed"
    assert tool("apply", "--site-packages", tree).code == 0
    assert content(tree) == files_after("temperature")
    assert tool("revert", "--site-packages", tree).code == 0
    assert content(tree) == start


def test_verify_fails_on_an_edited_file_and_on_a_tree_that_is_not_patched(tree, tool):
    assert tool("verify", "--site-packages", tree).code == 4
    tool("apply", "--site-packages", tree)
    (tree / "sglang/srt/info.py").write_bytes(b"edited\n")
    said = tool("verify", "--site-packages", tree, "--json")
    assert said.code == 4 and "sglang/srt/info.py" in said.error["what"]


def test_a_new_version_of_the_series_replaces_the_old_one(tree, tool, tmp_path):
    start = hashes(tree)
    tool("apply", "--site-packages", tree)
    newer = {
        "ddtree": STAGES["ddtree"],
        "temperature": {**STAGES["temperature"], "sglang/srt/info.py": b"def verify():\n    return 'exact'\n"},
    }
    make_series(tmp_path / "newer/sglang-0.5.11", stages=newer)
    (tmp_path / "series").rename(tmp_path / "older")
    (tmp_path / "newer").rename(tmp_path / "series")
    said = tool("apply", "--site-packages", tree, "--json")
    assert said.code == 0 and said.host["changed"], said.stderr
    assert (tree / "sglang/srt/info.py").read_bytes() == b"def verify():\n    return 'exact'\n"
    assert tool("revert", "--site-packages", tree).code == 0
    assert hashes(tree) == start


def test_a_stale_receipt_is_said_and_the_files_count(tree, tool):
    tool("apply", "--site-packages", tree)
    make_package(tree)  # the package manager puts its own files back
    (tree / "sglang/srt/ddtree.py").unlink()
    assert tool("status", "--site-packages", tree, "--json").host["receipt_state"] == "stale"
    said = tool("apply", "--site-packages", tree, "--json")
    assert said.code == 0 and said.host["changed"]
    assert any("stale" in step["detail"] for step in said.host["steps"])
    assert tool("status", "--site-packages", tree, "--json").host["receipt_state"] == "valid"
    make_package(tree)
    (tree / "sglang/srt/ddtree.py").unlink()
    back = tool("revert", "--site-packages", tree, "--json")
    assert back.code == 0 and any("stale" in line for line in back.host["not_done"])
    assert content(tree) == files_after("pristine")


@pytest.mark.parametrize(
    ("version", "command"),
    [
        ("0.5.20", "fork port --from sglang-0.5.11 --to 0.5.20 "),
        ("0.5.11.post1", "fork port --from sglang-0.5.11 --to 0.5.11.post1 "),
        ("0.5.10", "fork port --from sglang-0.5.11 --to 0.5.10 "),
        ("0.5.11.dev3+g123", "fork init 0.5.11.dev3+g123 --from-tree "),
        ("0.5.11+acme", "fork init 0.5.11+acme --from-tree "),
    ],
)
def test_an_unsupported_release_is_named_with_the_nearest_series_and_its_port(tmp_path, tree, tool, version, command):
    other = make_package(tmp_path / "other", version=version)
    start = hashes(other)
    for said in (tool("doctor", "--site-packages", other, "--json"), tool("apply", "--site-packages", other, "--json")):
        assert said.code == 4 and said.error["error"] == "UnsupportedVersion"
        assert f" {version}, " in said.error["what"] and "sglang-0.5.11" in said.error["what"]
        assert f"ddtree-patch {command}" in said.error["next"]
    assert hashes(other) == start
    assert tool("status", "--site-packages", other, "--json").host["state"] == "unsupported"


def test_a_tree_without_the_package(tree, tool, tmp_path):
    (tmp_path / "empty").mkdir()
    said = tool("apply", "--site-packages", tmp_path / "empty", "--json")
    assert said.code == 4 and said.error["error"] == "NoInstallation"
    assert not list((tmp_path / "empty").iterdir())


def test_a_corrupt_patch_is_refused_before_any_host_is_asked(tree, tool, tmp_path):
    patch = next((tmp_path / "series/sglang-0.5.11").glob("0001-*.patch"))
    patch.write_bytes(patch.read_bytes().replace(b"@@ -", b"@@ -9", 1))
    start = hashes(tree)
    said = tool("apply", "--site-packages", tree, "--json")
    assert said.code == 4 and said.error["error"] == "SeriesProblem"
    assert said.json["hosts"] == [] and hashes(tree) == start


def test_diff_prints_a_diff_and_nothing_else(tree, tool):
    said = tool("diff", "--site-packages", tree)
    assert said.code == 0 and said.stdout.startswith("diff --git ") and "+ARG_20 = 'ddtree'" in said.stdout
    assert tool("diff", "--site-packages", tree, "--json").host["diff"] == said.stdout


def test_list_shows_the_series_and_what_is_installed(tree, tool):
    alone = tool("list", "--json").json
    assert alone["hosts"] == [] and alone["series"][0]["name"] == "sglang-0.5.11"
    there = tool("list", "--site-packages", tree, "--json")
    assert there.json["series"] == alone["series"] and "sglang 0.5.11" in there.host["summary"]


def test_doctor_changes_nothing_and_finds_nothing_wrong(tree, tool):
    start = hashes(tree)
    said = tool("doctor", "--site-packages", tree, "--json")
    assert said.code == 0 and {step["state"] for step in said.host["steps"]} == {"done"}
    assert hashes(tree) == start


def test_every_command_gives_one_json_document_of_the_same_shape(tree, tool):
    tool("apply", "--site-packages", tree)
    for command in (
        "list",
        "doctor",
        "diff",
        "apply",
        "verify",
        "status",
        "history",
        "restart",
        "smoke-test",
        "revert",
    ):
        said = tool(command, "--site-packages", tree, "--json")
        assert {"ok", "command", "tool", "exit_code", "hosts", "error"} <= set(json.loads(said.stdout)), command
        assert said.json["exit_code"] == said.code and said.json["ok"] is (said.code == 0), command
        assert said.json["command"] == command


@pytest.mark.parametrize("command", ["restart", "smoke-test"])
def test_a_tree_has_no_server(tree, tool, command):
    assert tool(command, "--site-packages", tree).code == 2
