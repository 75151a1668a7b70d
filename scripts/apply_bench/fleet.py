"""Hosts on this machine: a copy of the unpacked wheel and an sshd each; what names them for every contestant."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from patcher.series.model import Series, sha256
from scripts.apply_bench.delay_line import DelayLines
from scripts.rig import target
from scripts.rig.sshd import Sshd

BLOCK = """\
Host {alias}
  HostName {address}
  Port {line}
  HostKeyAlias [{address}]:{port}
  User {user}
  IdentityFile {client_key}
  IdentitiesOnly yes
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  ServerAliveInterval 15
"""


class BenchProblem(Exception):
    """A run did not do what it is measured for, so there is no figure."""


class Fleet:
    """`count` hosts h1 .. with pristine trees.

    Attributes: names; trees: name -> its site-packages; pristine: path -> bytes (None: no such file) of every file that
    the series touches; finished: the same after the last stage.
    """

    def __init__(self, home: Path, count: int, series: Series) -> None:
        self.home, self.series = home, series
        self.names = tuple(f"h{number}" for number in range(1, count + 1))
        first = target.unpack_wheel(home / "trees" / self.names[0])
        self.trees = {name: home / "trees" / name for name in self.names}
        for name in self.names[1:]:
            shutil.copytree(first, self.trees[name])
        self.pristine = {path: _read(first / path) for path in series.files}
        stage = series.stages[-1].name
        self.finished = {path: series.render(path, data, stage) for path, data in self.pristine.items()}
        (record,) = first.glob("sglang-*.dist-info/RECORD")
        self._record, self._record_bytes = record.relative_to(first), record.read_bytes()
        self.sshds: dict[str, Sshd] = {}
        try:
            for name in self.names:
                self.sshds[name] = Sshd(home / "sshd" / name, alias=name)
        except BaseException:
            self.stop()
            raise
        self.hosts_toml = home / "hosts.toml"
        self.hosts_toml.write_text("".join(f'[hosts.{n}]\nsite_packages = "{self.trees[n]}"\n' for n in self.names))

    def ways(self, folder: Path, lines: DelayLines | None) -> Path:
        """Write an ssh_config in `folder` that leads to every host, over `lines` or straight; gives its path."""
        folder.mkdir()
        path = folder / "ssh_config"
        path.write_text(
            "".join(
                BLOCK.format_map({**vars(sshd), "line": lines.to(sshd.port) if lines else sshd.port})
                for sshd in self.sshds.values()
            )
        )
        return path

    def make_pristine(self) -> None:
        """Put every tree back as it came, and let the disk come to rest, so that no run pays for another's writes."""
        for tree in self.trees.values():
            for path, data in self.pristine.items():
                _write(tree / path, data)
            _write(tree / self._record, self._record_bytes)
            shutil.rmtree(tree / ".ddtree-patch", ignore_errors=True)
        os.sync()

    def check_finished(self, names: Sequence[str]) -> None:
        """Raise BenchProblem unless the trees of `names` have every file of the last stage."""
        for name in names:
            wrong = [path for path, data in self.finished.items() if _read(self.trees[name] / path) != data]
            if wrong:
                raise BenchProblem(f"{name} has not the files that it was to get: {', '.join(wrong)}")

    def stop(self) -> None:
        for sshd in self.sshds.values():
            sshd.stop()


def sizes(files: Mapping[str, bytes | None]) -> int:
    """Bytes of all files."""
    return sum(len(data or b"") for data in files.values())


def changed(fleet: Fleet) -> dict[str, bytes]:
    """The files that differ after the last stage, as they are then."""
    return {
        path: data
        for path, data in fleet.finished.items()
        if data is not None and sha256(data) != sha256(fleet.pristine[path])
    }


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _write(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    elif _read(path) != data:
        path.write_bytes(data)
