"""The installations that cells start from, and what each job leaves when nothing strikes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patcher.errors import DdtreePatchError
from patcher.plan.make import make_plan, make_revert_plan
from patcher.series.catalogue import load_series
from patcher.wire.replies import reply_as
from patcher.wire.types import Inspection
from tests.faults.cells import JOBS, KILLED_AT, Job
from tests.support.builders import make_series
from tests.support.installations import Installation

ARGS = "sglang/srt/args.py"


@dataclass(frozen=True)
class Said:
    """What a command ended with: the exit code that its typed error has (0 without), its words, and its reply."""

    exit: int
    what: str = ""
    commands: tuple[str, ...] = ()
    reply: Mapping[str, Any] = field(default_factory=dict)


def ask(installation: Installation, request: Mapping[str, Any], **environment: str) -> Said:
    """One request to the agent, as the command line makes it."""
    os.environ.update(environment)
    try:
        return Said(0, reply=installation.ask(**request))
    except DdtreePatchError as error:
        return Said(error.exit_code, error.what, tuple(getattr(error, "commands", ())))
    finally:
        for name in environment:
            del os.environ[name]


@dataclass
class Starts:
    """folder/NAME: the venv of each start; folder/series: the catalogue. All is by the name of a start or of a job.

    requests: what the agent is asked for. snapshots: of the starts. ends: of the jobs, when nothing strikes.
    """

    folder: Path
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    snapshots: dict[str, dict[str, Any]] = field(default_factory=dict)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)

    def make(self) -> None:
        (self.folder / "series").mkdir(parents=True)
        make_series(self.folder / "series/sglang-0.5.11")
        pristine = Installation.in_venv(self.folder / "pristine")
        unchecked = (
            "import py_compile as p, sys; p.compile(sys.argv[1], "
            "invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)"
        )
        subprocess.run([pristine.python, "-c", unchecked, str(pristine.site / ARGS)], check=True)
        self._go("pristine", "ddtree", self._request(pristine, "ddtree"))
        self._go("ddtree", "temperature", self._request(self.at("ddtree"), "temperature"))
        for name, job in JOBS.items():
            self.requests[name] = self._request(self.at(job.start), job.stages[1]) if job.commits else {"op": "inspect"}
        for name, point in KILLED_AT.items():
            self._go("pristine", name, self.requests["apply"], DDTREE_AGENT_DIE_AT=point)
        for name in ("pristine", "ddtree", "temperature"):
            self.snapshots[name] = self.at(name).snapshot(compiled=False)
        for name in KILLED_AT:
            self.snapshots[name] = self.snapshots["pristine"]
        for name, job in JOBS.items():
            if job.commits:
                self._go(job.start, "after", self.requests[name])
                self.ends[name] = self.at("after").snapshot(compiled=False)
                shutil.rmtree(self.folder / "after")
            else:
                self.ends[name] = self.ends["apply"]

    def at(self, name: str) -> Installation:
        return installation_in(self.folder / name)

    def old(self, job: Job) -> dict[str, Any]:
        return self.snapshots[job.start]

    def _request(self, installation: Installation, stage: str) -> dict[str, Any]:
        """The commit that brings the installation there, by the plan that the command line makes."""
        series = load_series(self.folder / "series/sglang-0.5.11")
        asked = {"op": "inspect", "paths": sorted(series.files)}
        found = reply_as(Inspection, asked, installation.ask(**asked), "host")
        plan = make_revert_plan(found, series) if stage == "pristine" else make_plan(series, stage, found)
        receipt = plan.receipt() and plan.receipt() | {"by": "tests"}
        return {
            "op": "commit",
            "actions": plan.request(),
            "receipt": receipt,
            "history": {"event": "apply", "to": stage},
            "imports": plan.modules(),
        }

    def _go(self, start: str, end: str, request: Mapping[str, Any], **environment: str) -> None:
        subprocess.run(["cp", "-a", self.folder / start, self.folder / end], check=True)
        said = ask(self.at(end), request, **environment)
        if said.exit != (3 if environment else 0):
            raise RuntimeError(f"from {start} to {end}: {said}")


def installation_in(venv: Path) -> Installation:
    return Installation(venv / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages", venv)


def only_files(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in snapshot.items() if value[1] not in ("directory", "compiled")}
