"""The command line, run in this process against stub installations, and what it said."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from stub_host import StubHost

from patcher.cli import main


@dataclass
class Said:
    """What one run of the command line gave back."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict:
        return json.loads(self.stdout)

    @property
    def host(self) -> dict:
        (host,) = self.json["hosts"]
        return host

    @property
    def error(self) -> dict:
        return self.json["error"]


@pytest.fixture
def tool(capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`tool("apply", "--local", ...)` runs it and gives a Said."""

    def run(*args: object) -> Said:
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return run


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
