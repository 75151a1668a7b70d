"""A target venv that is patched by our own command, and the tests that its Python runs."""

import os
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from reference import Reference, collect
from serving import REFERENCE_EXTRA, Server, make_pair_with_tokenizer, running

from patcher import cli
from patcher.series.catalogue import catalogue
from patcher.series.model import Series
from patcher.series.versions import choose
from scripts.rig import server, target

INSIDE = Path(__file__).parent / "inside"
ROOT = Path(__file__).parents[2]
collect_ignore = ["inside", "inside_v2"]  # for the target venv's Python, which alone has torch and SGLang

_summaries: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _summaries:
        terminalreporter.section("run by the target venv's Python, inside the patched SGLang")
        for line in _summaries:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def series() -> Series:
    return choose(catalogue(ROOT / "patches"), "sglang", "0.5.11")


@pytest.fixture(scope="session")
def patched_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the target venv after `ddtree-patch apply`: to run, not to change."""
    venv = target.copy_target(tmp_path_factory.mktemp("patched") / "venv")
    target.add_pytest(venv)
    assert cli.main(["apply", "--local", "--venv", str(venv), "--no-restart"]) == 0
    return venv


@dataclass(frozen=True)
class Inside:
    """What the tests of one file under inside/ did. `failures`: test name -> traceback."""

    passed: int
    failures: dict[str, str]
    seconds: float


@pytest.fixture(scope="session")
def inside(
    request: pytest.FixtureRequest, patched_venv: Path, series: Series, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Inside]]:
    """{file: what its tests did}, from one run of all the files that this session asks for."""
    files = [item.callspec.params["file"] for item in request.session.items if "inside" in item.fixturenames]
    report = tmp_path_factory.mktemp("inside") / "report.xml"
    return run_inside(patched_venv, INSIDE, files, series.identity("sampling"), report)


def run_inside(venv: Path, folder: Path, files: list[str], identity: str, report: Path) -> dict[str, Inside]:
    """Run test files of `folder` by the Python of a patched target venv; identity: of the series that is in it."""
    told = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(INSIDE.parent)]), "SERIES_IDENTITY": identity}
    done = subprocess.run(
        [
            venv / "bin/python",
            "-m",
            "pytest",
            "-c",
            "pytest.ini",
            "--confcutdir",
            ".",
            f"--junitxml={report}",
            *dict.fromkeys(files),
        ],
        cwd=folder,
        env={**os.environ, **server.ENVIRONMENT, **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # 0: all passed, 1: some failed. Anything else is no answer: the run itself went wrong.
    assert done.returncode in (0, 1), done.stdout
    return _read(report)


def _read(report: Path) -> dict[str, Inside]:
    found: dict[str, list[ET.Element]] = {}
    for case in ET.parse(report).iter("testcase"):
        found.setdefault(f"{case.get('classname')}.py", []).append(case)
    results = {}
    for file, cases in found.items():
        problems = {case.get("name"): p for case in cases for p in case if p.tag in ("failure", "error", "skipped")}
        results[file] = Inside(
            passed=len(cases) - len(problems),
            failures={name: f"{p.get('message')}\n{p.text or ''}" for name, p in problems.items()},
            seconds=sum(float(case.get("time")) for case in cases),
        )
        _summaries.append(
            f"{file}: {results[file].passed} passed, {len(problems)} failed in {results[file].seconds:.0f} s"
        )
    return results


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair_with_tokenizer(tmp_path_factory.mktemp("pair") / "tiny-b8")


@pytest.fixture(scope="session")
def reference(patched_venv: Path, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What a server without speculation and one with DFLASH answer; both are ended before any other is started."""
    logs = tmp_path_factory.mktemp("reference")
    plain, dflash = (
        Server(patched_venv, logs / f"{algorithm}.log", algorithm=algorithm, models=pair, extra=REFERENCE_EXTRA)
        for algorithm in (None, "DFLASH")
    )
    with running(plain, dflash):
        return collect(plain, dflash)
