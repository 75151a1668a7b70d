"""The tests under inside/, which the patched target venv's own Python runs: one test here for each file there."""

from pathlib import Path

import pytest

from patcher import cli

FILES = sorted(path.name for path in (Path(__file__).parent / "inside").glob("test_*.py"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES)
def test_inside(file, inside):
    result = inside[file]
    assert not result.failures, "\n\n".join(f"==== {name}\n{text}" for name, text in result.failures.items())
    assert result.passed > 0


@pytest.mark.parametrize("stage", ["ddtree", "temperature"])
def test_identity_of_each_stage_is_the_one_in_the_catalogue(stage, series, wheel_tree):
    """The patched module computes it from its own files, without SGLang or torch."""
    assert cli.main(["apply", "--site-packages", str(wheel_tree), "--up-to", stage]) == 0
    path = wheel_tree / "sglang/srt/speculative/ddtree_identity.py"
    module = {"__file__": str(path), "__name__": "ddtree_identity"}
    exec(compile(path.read_bytes(), path, "exec"), module)
    assert module["PATCH_STAGE"] == stage
    assert module["PATCH_IDENTITY"] == series.identity(stage)
    assert module["PATCHED_FILES"] == tuple(sorted(name for name in series.files if series.sha256(name, stage)))
