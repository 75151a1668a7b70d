"""The catalogue of series, for `list`: what each is for, and where its text has been proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patcher.report.findings import Finding, Table
from patcher.series.model import Series
from patcher.series.support import Proof


@dataclass(frozen=True)
class Catalogue(Finding):
    series: Sequence[Series]

    def as_dict(self) -> dict[str, Any]:
        return {"series": [_described(series) for series in self.series]}

    def tables(self) -> Sequence[Table]:
        header = ("series", "versions", "family", "stages", "backends", "proven on CPU", "proven on GPU")
        return [Table(header, [_row(series) for series in self.series])]


def _row(series: Series) -> tuple[str, ...]:
    support, identity = series.support, _identity(series)
    return (
        series.name,
        ", ".join(series.versions),
        support.family or "-",
        ", ".join(stage.name for stage in series.stages),
        ", ".join(support.backends) or "-",
        _when(support.cpu, identity),
        _when(support.gpu, identity),
    )


def _described(series: Series) -> dict[str, Any]:
    support, identity = series.support, _identity(series)
    return {
        "name": series.name,
        "package": series.package,
        "versions": list(series.versions),
        "stages": [{"name": stage.name, "purpose": stage.purpose} for stage in series.stages],
        "patches": [{"name": patch.name, "stage": patch.stage, "purpose": patch.purpose} for patch in series.patches],
        "files": sorted(series.files),
        "ops": list(series.ops),
        "identity": identity,
        "family": support.family,
        "backends": list(support.backends),
        "proven": {"cpu": _proof(support.cpu, identity), "gpu": _proof(support.gpu, identity)},
    }


def _identity(series: Series) -> str:
    return series.identity(series.stages[-1].name)


def _proof(proof: Proof | None, identity: str) -> dict[str, Any] | None:
    """`current`: of the series as it is, not of an earlier text of it."""
    if proof is None:
        return None
    return {"date": proof.date.isoformat(), "current": proof.identity == identity, "shown_by": proof.shown_by}


def _when(proof: Proof | None, identity: str) -> str:
    if proof is None:
        return "-"
    return f"{proof.date}" if proof.identity == identity else f"{proof.date} (an earlier text)"
