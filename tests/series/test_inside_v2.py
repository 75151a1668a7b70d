"""The tests under inside_v2/, which the Python of a patched venv of family v2 runs: one test for each file there."""

from pathlib import Path

import pytest
from conftest import run_inside

from patcher.series.catalogue import catalogue
from patcher.series.versions import choose
from scripts.rig.releases import named

RELEASE = named("0.5.17")
FOLDER = Path(__file__).parent / "inside_v2"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.fixture(scope="module")
def inside_v2(patched_venvs, tmp_path_factory):
    identity = choose(catalogue(), "sglang", RELEASE.version).identity("sampling")
    return run_inside(patched_venvs(RELEASE), FOLDER, FILES, identity, tmp_path_factory.mktemp("inside") / "report.xml")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES)
def test_inside(file, inside_v2):
    result = inside_v2[file]
    assert not result.failures, "\n\n".join(f"==== {name}\n{text}" for name, text in result.failures.items())
    assert result.passed > 0
