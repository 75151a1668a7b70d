"""Nothing lost: every job, struck before every step, by every cause. What the cells are and do: tests/faults."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from patcher import agent
from patcher.agent import steps
from patcher.agent.steps import STEPS, UNDO, UNDONE
from tests.faults.cells import FAULTS, JOBS, thin, uncovered, whole
from tests.faults.prepare import Starts, ask, installation_in
from tests.support.installations import may_mount

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/fault-matrix.md"
LISTED = (*STEPS, UNDO, UNDONE)
needs_mounts = pytest.mark.skipif(not may_mount(), reason="a mount namespace needs root with CAP_SYS_ADMIN")


def test_no_step_escapes_the_matrix():
    assert uncovered(whole()) == set()
    assert {cell.point.partition(":")[0] for cell in thin() if cell.fault == "SIGKILL"} == set(LISTED)
    assert {cell.fault for cell in thin()} == set(FAULTS)


def test_the_agent_marks_the_listed_steps_and_no_other():
    marked = set()
    for file in Path(agent.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "step":
                marked |= {
                    getattr(steps, word.id) if isinstance(word, ast.Name) else word.value
                    for word in ast.walk(call.args[0])
                    if isinstance(word, (ast.Name, ast.Constant)) and getattr(word, "id", "") in ("", "UNDO", "UNDONE")
                }
    assert marked - {"RECORD"} == set(LISTED)


def test_the_page_has_every_row():
    """Written anew after a change of the steps: see its head."""
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    expected = [point for job in JOBS for point in (*JOBS[job].points(), "end:1")]
    assert [row for row in rows if row.partition(":")[0] in (*LISTED, "end")] == expected
    assert "0 mixed states after the next command, 0 with a problem" in PAGE.read_text().replace("\n", " ")


def run_matrix(folder: Path, which: str, *more: str) -> dict[str, dict]:
    """The cells' results, by name; the table goes to stdout."""
    found = folder / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.run", which, "--json", str(found), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert found.exists(), done.stderr
    return {"{job} / {point} / {fault}".format(**result["cell"]): result for result in json.loads(found.read_bytes())}


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return run_matrix(tmp_path_factory.mktemp("matrix"), "--thin")


@needs_mounts
@pytest.mark.parametrize("cell", thin(), ids=str)
def test_thinned(thinned, cell):
    assert thinned[str(cell)]["problems"] == []
    assert thinned[str(cell)]["final"] in ("old", "new")


@needs_mounts
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_whole_matrix(tmp_path: Path):
    results = run_matrix(tmp_path, "--whole")
    assert len(results) == len(whole())
    assert {name: result["problems"] for name, result in results.items() if result["problems"]} == {}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    made = Starts(tmp_path_factory.mktemp("starts") / "starts")
    made.make()
    return made


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
def test_no_step_comes_more_often_than_the_matrix_knows(starts: Starts, tmp_path: Path, job: str):
    for step in LISTED:
        known = JOBS[job].times.get(step, 1) if step in JOBS[job].steps else 0
        venv = tmp_path / step
        subprocess.run(["cp", "-a", starts.folder / JOBS[job].start, venv], check=True)
        said = ask(installation_in(venv), starts.requests[job], DDTREE_AGENT_DIE_AT=f"{step}:{known + 1}")
        assert said.exit == 0, (step, said)
