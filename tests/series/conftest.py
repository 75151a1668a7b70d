"""A target venv that is patched by our own command, and the tests that its Python runs."""

import fcntl
import os
import pickle
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from reference import Reference, Stock, ask_stock, collect
from serving import REFERENCE_EXTRA, Server, make_pair_with_tokenizer, running

from patcher import cli
from patcher.series.catalogue import catalogue
from patcher.series.model import Series
from patcher.series.versions import choose
from scripts.rig import server, target
from scripts.rig.releases import DEFAULT, Release

T = TypeVar("T")
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
def patched_venvs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Release], Path]:
    """`patched_venvs(release)`: a copy of its target venv after `ddtree-patch apply`. To run, not to change."""

    def make(release: Release, folder: Path) -> Path:
        venv = target.copy_target(folder / "venv", release)
        target.add_pytest(venv)
        assert cli.main(["apply", "--local", "--venv", str(venv), "--no-restart"]) == 0
        return venv

    return lambda release: once_a_run(tmp_path_factory, f"patched-{release.version}", partial(make, release))


@pytest.fixture(scope="session")
def patched_venv(patched_venvs: Callable[[Release], Path]) -> Path:
    """0.5.11's."""
    return patched_venvs(DEFAULT)


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
    """What a server without speculation answers; it is ended before any other is started."""

    def make(folder: Path) -> Reference:
        plain = Server(patched_venv, folder / "plain.log", algorithm=None, models=pair, extra=REFERENCE_EXTRA)
        with running(plain):
            return collect(plain)

    return once_a_run(tmp_path_factory, "reference", make)


@pytest.fixture(scope="session")
def stock(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Release], Stock]:
    """`stock(release)`: what DFLASH of the unpatched release answers; its server is ended before another starts."""

    def make(release: Release, folder: Path) -> Stock:
        dflash = Server(target.target_venv(release), folder / "dflash.log", release=release, models=pair)
        with running(dflash):
            return ask_stock(dflash)

    return lambda release: once_a_run(tmp_path_factory, f"stock-{release.version}", partial(make, release))


def once_a_run(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """What `make(a new folder)` gives, made by the worker of pytest that asks first; the others wait for it."""
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    result = common / f"{name}.pickle"
    with open(common / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=common))
            result.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(result.read_bytes())
