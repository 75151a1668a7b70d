"""Runs the command line, in this process or in one of its own, and keeps what it said."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from patcher.cli import main

ROOT = Path(__file__).parents[2]


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


def run_tool(capfd: pytest.CaptureFixture[str], *args: object) -> Said:
    """In this process."""
    capfd.readouterr()
    code = main([str(arg) for arg in args])
    out, err = capfd.readouterr()
    return Said(code, out, err)


def start_tool(*args: object, around: Sequence[str] = (), env: Mapping[str, str] | None = None) -> subprocess.Popen:
    """As a program of its own, which leads a process group; `around`: a program in front, such as unshare."""
    return subprocess.Popen(
        [*around, sys.executable, "-m", "patcher", *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )


def said_by(program: subprocess.Popen) -> Said:
    """Wait for its end."""
    out, err = program.communicate(timeout=120)
    return Said(program.returncode, out, err)
