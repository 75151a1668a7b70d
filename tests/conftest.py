"""What the tests run against: the real SGLang wheel, a real sshd, a real SGLang server on the CPU.

Nothing here is skipped when it cannot be had: a machine without it fails with the reason (see scripts/rig).
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from scripts.rig import target
from scripts.rig.server import CpuServer
from scripts.rig.sshd import Sshd
from tests.support.command_line import Said, run_tool
from tests.support.stub_fleet import Fleet
from tests.support.stub_host import StubHost

# What begins the parameters of a test that is run for each release, or for each server of a release.
_RELEASE = re.compile(r"\[\d+\.\d+\.\d+(\.post\d+)?(-(overlap|serial)-page\d+)?")


class _ByFileAndRelease(LoadScopeScheduling):
    """One worker runs the tests of a file, or those of a file that are of one release."""

    def _split_scope(self, nodeid: str) -> str:
        release = _RELEASE.search(nodeid)
        return nodeid.partition("::")[0] + (release[0] if release else "")


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return _ByFileAndRelease(config, log)


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests see neither this user's hosts.toml nor his ddtree-patch environment."""
    cache = target.cache_dir()
    for name in [name for name in os.environ if name.startswith("DDTREE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DDTREE_PATCH_CACHE", str(cache))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Factory: `sshd(alias="demo", address=..., user=..., extra="sshd_config lines")` starts one; all are ended."""
    started: list[Sshd] = []

    def start(**settings) -> Sshd:
        started.append(Sshd(tmp_path / f"sshd-{len(started)}", **settings))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, shared by the session: to read and to copy, never to change."""
    return target.unpack_wheel(tmp_path_factory.mktemp("wheel") / "site-packages")


@pytest.fixture
def wheel_tree(unpacked_wheel: Path, tmp_path: Path) -> Path:
    """A fresh copy of the unpacked wheel: a tree for --site-packages that the test may change."""
    return Path(shutil.copytree(unpacked_wheel, tmp_path / "site-packages"))


@pytest.fixture(scope="session")
def target_venv() -> Path:
    """The cached CPU venv with SGLang: to run, never to change."""
    return target.target_venv()


@pytest.fixture
def target_copy(tmp_path: Path) -> Path:
    """A CPU venv of the test's own, whose SGLang may be patched."""
    return target.copy_target(tmp_path / "target")


@pytest.fixture
def cpu_server(tmp_path: Path) -> Iterator[Callable[..., CpuServer]]:
    """Factory: `cpu_server(venv, algorithm="DFLASH"|"DDTREE"|None, extra=[...])`, ready; all are ended."""
    started: list[CpuServer] = []

    def start(venv: Path, **settings) -> CpuServer:
        started.append(CpuServer(venv, tmp_path / f"server-{len(started)}.log", **settings))
        return started[-1].wait_ready()

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def tool(capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`tool("apply", "--local", ...)` runs the command line in this process and gives a Said."""
    return lambda *args: run_tool(capfd, *args)


@pytest.fixture
def stub_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHost]:
    """A stub installation with its series as the catalogue; every process that runs from it is ended."""
    home = tmp_path / "target"
    home.mkdir()
    host = StubHost(home)
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(host.series_root))
    monkeypatch.chdir(tmp_path)
    yield host
    host.stop()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Fleet]]:
    """Factory: `fleet(8)` starts so many hosts, which the tool finds by name; all are ended."""
    fleets: list[Fleet] = []

    def make(count: int) -> Fleet:
        made = Fleet(tmp_path, count)
        fleets.append(made)
        monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(made.series_root))
        monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(made.ssh_config))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        made.configure()
        return made

    yield make
    for made in fleets:
        made.stop()
