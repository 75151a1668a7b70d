"""How long `ddtree-patch apply --no-restart` takes, beside Ansible that brings the same files, in one run.

    python -m scripts.bench_apply > docs/bench/apply.json && python -m scripts.apply_bench.page docs/bench/apply.json

Every host is a copy of the real unpacked SGLang wheel (--site-packages: no interpreter, so that both contestants do the
same work) with an sshd of its own on loopback, reached straight or over a line that takes time. Contestants take turns.
Seconds, medians; ratios are those of the medians of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paramiko

from patcher import __version__
from patcher.series.catalogue import catalogue
from patcher.series.versions import choose
from scripts.apply_bench.contestants import Ansible, Tool, ansible_venv, ansible_versions, write_finished
from scripts.apply_bench.delay_line import DelayLines
from scripts.apply_bench.fleet import Fleet, changed, sizes
from scripts.rig.releases import DEFAULT
from scripts.rig.target import cache_dir

PATIENCE_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--round-trips", type=int, nargs="+", default=[0, 50, 200], metavar="MS", help="added, in ms")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ansible", nargs="*", choices=["patch", "copy"], default=["patch", "copy"])
    options = parser.parse_args()
    venv = ansible_venv(cache_dir() / "ansible-for-bench") if options.ansible else None
    series = choose(catalogue(), "sglang", DEFAULT.version)  # of the wheel that the hosts are made of
    results = []
    with tempfile.TemporaryDirectory(prefix="bench-") as home:  # short: paths of control sockets are limited
        fleet = Fleet(Path(home), max(options.hosts), series)
        try:
            write_finished(fleet)
            for milliseconds in options.round_trips:
                results += measure(fleet, milliseconds, options, venv)
        finally:
            fleet.stop()
        files = {
            "series": series.name,
            "files": len(changed(fleet)),
            "bytes": sizes(changed(fleet)),
            "patch_bytes": sum((series.directory / patch.file).stat().st_size for patch in series.patches),
        }
    json.dump(
        {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": versions(venv),
            "command": ["python", "-m", "scripts.bench_apply", *sys.argv[1:]],
            "runs": options.runs,
            "work": files,
            "results": results,
        },
        sys.stdout,
        indent=1,
    )
    print()


def measure(
    fleet: Fleet, milliseconds: int, options: argparse.Namespace, venv: Path | None
) -> Iterator[dict[str, Any]]:
    """The results over lines of this added round trip, one for each number of hosts and each contestant.

    A contestant that has taken PATIENCE_S for a cell of the table gets no further run in it.
    """
    with lines_of(milliseconds) as lines:
        ssh_config = fleet.ways(fleet.home / f"{milliseconds}", lines)
        contestants = [Tool(fleet, ssh_config), Tool(fleet, ssh_config, canary=True)]
        contestants += [Ansible(venv, fleet, ssh_config, kind) for kind in options.ansible]
        for count in options.hosts:
            names = fleet.names[:count]
            taken: dict[str, list[dict[str, Any]]] = {}
            for contestant in contestants:
                contestant.warm_up(names)
            for _ in range(options.runs):
                for contestant in contestants:
                    before = taken.setdefault(contestant.name, [])
                    if (contestant.canary and count == 1) or sum(run["seconds"] for run in before) > PATIENCE_S:
                        continue
                    fleet.make_pristine()
                    load = os.getloadavg()[0]
                    if lines:
                        lines.counted()
                    one = contestant.run(names) | {"load": load, **(lines.counted() if lines else {})}
                    fleet.check_finished(names)
                    before.append(one)
                    print(
                        f"{milliseconds} ms, {count} hosts, {contestant.name}: {one['seconds']:.2f} s, load {load:.1f}",
                        file=sys.stderr,
                        flush=True,
                    )
            for name, runs in taken.items():
                if runs:
                    yield {"added_round_trip_ms": milliseconds, "hosts": count, "contestant": name, **summary(runs)}


@contextmanager
def lines_of(milliseconds: int) -> Iterator[DelayLines | None]:
    """Lines with that round trip; none at all for 0."""
    lines = DelayLines(milliseconds / 1000) if milliseconds else None
    try:
        yield lines
    finally:
        if lines:
            lines.close()


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs, and every run's seconds."""
    medians = {
        key: round(statistics.median(run[key] for run in runs), 3)
        for key in runs[0]
        if isinstance(runs[0][key], (int, float))
    }
    if "steps" in runs[0]:
        medians["steps"] = {
            name: round(statistics.median(run["steps"][name] for run in runs), 3) for name in runs[0]["steps"]
        }
    return {**medians, "all_seconds": [round(run["seconds"], 3) for run in runs]}


def machine() -> dict[str, Any]:
    cpu = next(
        (
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}


def versions(venv: Path | None) -> dict[str, str]:
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.strip()
    return {
        "ddtree-patch": __version__,
        "python": platform.python_version(),
        "paramiko": paramiko.__version__,
        "ssh": ssh,
        **(ansible_versions(venv) if venv else {}),
    }


if __name__ == "__main__":
    main()
