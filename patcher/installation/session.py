"""One host while a command works on it: the installation found there, and what was read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from patcher.errors import SeriesProblem, UsageProblem
from patcher.hosts import HostSettings
from patcher.installation.find import Target, find_target
from patcher.report.findings import Finding
from patcher.report.outcome import WARNING, HostResult
from patcher.series.model import Series
from patcher.series.versions import choose
from patcher.ssh.connection import Connection
from patcher.wire.types import Inspection, Receipt


@dataclass(frozen=True)
class Installation(Finding):
    """What was found there. `recovered`: what became of a commit that was cut short before."""

    package: str
    version: str
    root: str
    editable: bool
    python: str | None
    prefix: str | None
    recovered: str

    def as_dict(self) -> dict[str, Any]:
        return {"installation": asdict(self)}


class Session:
    """`open` fills `target` and `inspection`; both are there for whatever comes after it."""

    def __init__(
        self, host: HostSettings, connection: Connection, result: HostResult, catalogue: Sequence[Series]
    ) -> None:
        self.host = host
        self.connection = connection
        self.result = result
        self.catalogue = catalogue
        self.target: Target
        self.inspection: Inspection
        self.committed: float | None = None  # when this run's commit was made, by the host's clock

    def open(self) -> None:
        """Find the installation and read every file that any series knows. Raises as find_target and the agent do."""
        with self.result.step("find the installation") as step:
            self.target = find_target(self.connection, self.host, package_of(self.catalogue))
            self.inspect()
            step.detail = f"{self.target.package} {self.version} in {self.inspection.root}"
            if self.inspection.exposed:
                step.state = WARNING
                step.detail += f"; anyone on the host may write in {', '.join(self.inspection.exposed)}"
            if self.inspection.recovered != "nothing":
                step.detail += f"; a commit that was cut short before was {self.inspection.recovered}"
        interpreter = self.inspection.interpreter
        self.result.keep(
            Installation(
                package=self.target.package,
                version=self.version,
                root=self.inspection.root,
                editable=self.inspection.editable,
                python=interpreter.version if interpreter else None,
                prefix=interpreter.prefix if interpreter else None,
                recovered=self.inspection.recovered,
            )
        )

    def inspect(self) -> None:
        """Read the files (again). A journal that was found is dealt with first, by the agent; the step says so."""
        paths = sorted({path for series in self.catalogue for path in series.files})
        self.inspection = self.target.inspect(paths)
        receipt = self.inspection.receipt
        series = next((one for one in self.catalogue if receipt and one.name == receipt.series), None)
        stage = series.stage_called(receipt.stage) if series and receipt else None
        if receipt and stage:
            self.inspection = msgspec.structs.replace(self.inspection, receipt=receipt.at_stage(stage))

    @property
    def version(self) -> str:
        return self.inspection.version

    @property
    def stale(self) -> bool:
        """Whether there is a receipt of files that are no longer installed: the package was replaced since."""
        return self.inspection.receipt_state == "stale"

    @property
    def receipt(self) -> Receipt | None:
        """The receipt, when it belongs to what is installed now."""
        return None if self.stale else self.inspection.receipt

    @property
    def for_plan(self) -> Inspection:
        """The inspection as plans may see it: a stale receipt vouches for nothing."""
        return msgspec.structs.replace(self.inspection, receipt=self.receipt)

    @property
    def samples(self) -> bool:
        """Whether a server of this installation is meant to sample: stock ones are, and the last stage of a series.

        The stages before the last are steps on the way, which refuse a temperature above 0.
        """
        last = {series.name: series.stages[-1].name for series in self.catalogue}
        return self.receipt is None or self.receipt.stage == last.get(self.receipt.series, self.receipt.stage)

    def series(self) -> Series:
        """The series for the installed version; raises UnsupportedVersion, which names the nearest one."""
        return choose(self.catalogue, self.target.package, self.version, self.inspection.editable)

    def sha256(self, path: str) -> str | None:
        """The sha256 of an installed file, None where there is none."""
        entry = self.inspection.files.get(path)
        return entry.sha256 if entry else None


def package_of(catalogue: Sequence[Series]) -> str:
    """The one package that the catalogue is about."""
    packages = sorted({series.package for series in catalogue})
    if not packages:
        raise SeriesProblem("there is no patch series", next_step="check $DDTREE_PATCH_SERIES_ROOT")
    if len(packages) > 1:
        raise SeriesProblem(
            f"the series are for several packages: {', '.join(packages)}",
            next_step="keep the series of one package under one root",
        )
    return packages[0]


def stage_named(series: Series, name: str) -> str:
    """The stage `name` (an old name will do), or the last one for an empty name.

    Raises UsageProblem, which names the stages.
    """
    names = [stage.name for stage in series.stages]
    stage = series.stage_called(name) if name else names[-1]
    if stage is None:
        raise UsageProblem(
            f"{series.name} has no stage {name!r}",
            where="--up-to",
            next_step=f"its stages are, in order: {', '.join(names)}",
        )
    return stage
