"""The tests under inside/, which the patched target venv's own Python runs: one test here for each file there."""

import importlib
import sys
import types
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


@pytest.mark.parametrize("stage", ["greedy", "sampling"])
def test_identity_of_each_stage_is_the_one_in_the_catalogue(stage, series, wheel_tree, monkeypatch):
    """The patched modules compute it from their own files, without SGLang or torch."""
    assert cli.main(["apply", "--site-packages", str(wheel_tree), "--up-to", stage]) == 0
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        package = types.ModuleType(name)
        package.__path__ = [str(wheel_tree / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("ddtree_patched_files", "ddtree_identity"):
        monkeypatch.delitem(sys.modules, f"sglang.srt.speculative.{name}", raising=False)
    module = vars(importlib.import_module("sglang.srt.speculative.ddtree_identity"))
    assert module["PATCH_STAGE"] == stage
    assert module["PATCH_IDENTITY"] == series.identity(stage)
    assert module["PATCHED_FILES"] == tuple(sorted(name for name in series.files if series.sha256(name, stage)))
