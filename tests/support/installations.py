"""A small installed package in a venv of its own, and a real agent to change it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from patcher.ssh.connection import LocalConnection
from patcher.wire.call import call_agent
from tests.support.builders import DDTREE, PRISTINE, TEMPERATURE, make_package

STAGES: dict[str, Mapping[str, bytes | None]] = {
    "pristine": PRISTINE,
    "ddtree": {**PRISTINE, **DDTREE},
    "temperature": {**PRISTINE, **DDTREE, **TEMPERATURE},
}


def may_mount() -> bool:
    """Root may, but not in a container without the capability, nor in a chroot."""
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def sha(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


class Installation:
    """One installation of the small package. site: its site-packages. venv: its venv, None for a tree."""

    def __init__(self, site: Path, venv: Path | None = None):
        self.site, self.venv = site, venv
        self.connection = LocalConnection()
        self.python = str(venv / "bin" / "python") if venv else sys.executable

    @classmethod
    def tree(cls, site: Path) -> Installation:
        return cls(make_package(site))

    @classmethod
    def in_venv(cls, venv: Path) -> Installation:
        """In a new venv without pip, byte-compiled as pip does it."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        site = next(venv.glob("lib/python*/site-packages"))
        make_package(site)
        subprocess.run([str(venv / "bin" / "python"), "-m", "compileall", "-q", str(site)], check=True)
        return cls(site, venv)

    def copy(self, target: Path) -> Installation:
        if self.venv is None:
            return Installation(Path(shutil.copytree(self.site, target, symlinks=True)))
        shutil.copytree(self.venv, target, symlinks=True)
        return Installation(target / self.site.relative_to(self.venv), target)

    @property
    def state(self) -> Path:
        return (self.venv or self.site) / ".ddtree-patch" / "sglang"

    @property
    def record(self) -> Path:
        return next(self.site.glob("sglang-*.dist-info")) / "RECORD"

    def ask(self, op: str, *, die_at: str | None = None, **request: Any) -> dict[str, Any]:
        """One operation of the agent; die_at makes it kill itself there."""
        python = self.python
        where = None if self.venv else str(self.site)
        connection = self.connection
        if die_at:
            connection = Environment({"DDTREE_AGENT_DIE_AT": die_at})
        return call_agent(connection, python, {"op": op, "package": "sglang", "site_packages": where, **request})

    def commit(self, stage: str, **more: Any) -> dict[str, Any]:
        """Bring every file of the stages to STAGE, as a plan does; pristine takes the receipt away."""
        return self.ask("commit", **{**self.request(stage), **more})

    def request(self, stage: str) -> dict[str, Any]:
        actions = []
        for path, new in STAGES[stage].items():
            old = self.read(path)
            if old != new:
                actions.append(
                    {
                        "path": path,
                        "before": sha(old),
                        "after": sha(new),
                        "data": None if new is None else b64encode(new).decode(),
                        "backup": False,
                    }
                )
        files = {
            path: {"before": sha(PRISTINE[path]), "after": sha(new)}
            for path, new in STAGES[stage].items()
            if path in {**DDTREE, **TEMPERATURE}
        }
        receipt = None if stage == "pristine" else {"series": "small", "stage": stage, "files": files}
        return {"actions": actions, "receipt": receipt, "history": {"what": stage}}

    def read(self, path: str) -> bytes | None:
        file = self.site / path
        return file.read_bytes() if file.exists() else None

    def bytes_at(self) -> dict[str, bytes | None]:
        return {path: self.read(path) for path in PRISTINE}

    def is_stage(self, stage: str) -> bool:
        return self.bytes_at() == dict(STAGES[stage])

    def snapshot(self, *, compiled: bool = True) -> dict[str, Any]:
        """Every file and directory of site-packages: kind, mode and sha256 or target; without our state directory.

        compiled=False: of bytecode only which there is, since it holds the time of its source.
        """
        return dict(_walk(self.site, compiled))

    def leftovers(self) -> list[str]:
        """What no command may leave: lock, journal, half-written and kept-aside files."""
        found = [path for path in self.site.rglob("*") if path.name.endswith((".ddtree-new", ".ddtree-old"))]
        if self.state.exists():
            found += [
                path
                for path in self.state.rglob("*")
                if path.name in ("lock", "journal.json") or path.name.endswith(".ddtree-new")
            ]
        return [str(path) for path in found]


def _walk(site: Path, compiled: bool) -> Iterable[tuple[str, Any]]:
    for folder, directories, files in os.walk(site):
        directories[:] = [name for name in directories if name != ".ddtree-patch"]
        for name in (*directories, *files):
            path = Path(folder, name)
            info = path.lstat()
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_dir():
                content = "directory"
            elif not compiled and name.endswith(".pyc"):
                content = "compiled"
            else:
                content = sha(path.read_bytes())
            yield str(path.relative_to(site)), (oct(info.st_mode), content)


class Environment(LocalConnection):
    """This machine, with more environment variables for the programs that it runs."""

    def __init__(self, variables: Mapping[str, str]):
        super().__init__()
        self.variables = variables

    def _run(self, argv, input, timeout, on_stderr):
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        return super()._run(["env", *settings, *argv], input, timeout, on_stderr)


class Through(LocalConnection):
    """This machine, with a shell script around each program: it gets the program's argv as "$@"."""

    def __init__(self, script: str, *around: str):
        super().__init__()
        self.script, self.around = script, around

    def _run(self, argv, input, timeout, on_stderr):
        return super()._run([*self.around, "sh", "-c", self.script, "sh", *argv], input, timeout, on_stderr)


def hashes(root: Path) -> dict[str, str]:
    """sha256 of every file below root, by its path there."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }
