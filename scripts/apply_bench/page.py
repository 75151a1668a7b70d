"""Writes docs/bench-apply.md from the JSON of one or more runs of scripts/bench_apply.py on one machine.

python -m scripts.apply_bench.page docs/bench/apply*.json > docs/bench-apply.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOOL = "ddtree-patch"
HEAD = """\
# How long apply takes

Written by `python -m scripts.apply_bench.page {sources}`; not to be edited. {date}, {cores} cores
({cpu}), {versions}.

`ddtree-patch apply --no-restart --all-at-once` of the real series ({files} files, {kilobytes} kB, as patches
{patch_kilobytes} kB) onto copies of the real unpacked wheel, each behind a real sshd on loopback. With
`--site-packages` there is no interpreter and so no import check, as Ansible has none. The time is that of the whole
command, from the start of its Python to its end: logins, backups, journal, syntax check, fsyncs and reading back
included. A relay adds the round trip: half of it each way, and one and a half for a new connection, as TCP takes; it
does not model TCP's slow start. Ansible runs at its best: pipelining, forks = hosts, no facts, and connections that an
earlier play left open (ControlPersist), so it pays for no login. It writes in place, without journal, backup or sync,
and its outcome is compared with the same hashes.

Medians in seconds, n = number of runs, in turns; `x` is the ratio to ddtree-patch in the same run. The machine was
shared: `load` is the median load average before ddtree-patch's runs. Above the number of cores, trust the ratios, not
the absolute times. Hosts, relay, sshds and the command share the {cores} cores, so the rows of many hosts include the
processor time of all of them, which real hosts do not share.
"""


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:]]
    print(page({str(path): json.loads(path.read_text()) for path in paths}), end="")


def page(benches: dict[str, dict[str, Any]]) -> str:
    """The page as Markdown; benches: {where its JSON lies: a run}."""
    bench = next(iter(benches.values()))
    work, machine = bench["work"], bench["machine"]
    lines = [
        HEAD.format(
            sources=" ".join(benches),
            date=bench["date"],
            cores=machine["cores"],
            cpu=machine["cpu"],
            versions=", ".join(f"{name} {version}" for name, version in bench["versions"].items()),
            files=work["files"],
            kilobytes=round(work["bytes"] / 1000),
            patch_kilobytes=round(work["patch_bytes"] / 1000),
        )
    ]
    lines += _goals([one["results"] for one in benches.values()])
    for one in benches.values():
        lines += ["", f"## `{' '.join(one['command'])}`", "", *_table(one["results"]), "", *_steps(one["results"])]
    return "\n".join([*lines, ""])


def _table(results: list[dict[str, Any]]) -> list[str]:
    cells = {(r["added_round_trip_ms"], r["hosts"], r["contestant"]): r for r in results}
    others = list(dict.fromkeys(r["contestant"] for r in results if r["contestant"] != TOOL))
    names = [TOOL, *others]
    lines = [f"| round trip, ms | hosts | {' | '.join(names)} | load |", "|---" * (len(names) + 3) + "|"]
    for milliseconds, hosts, _ in [key for key in cells if key[2] == TOOL]:
        row = [cells.get((milliseconds, hosts, name)) for name in names]
        shown = " | ".join(_cell(one, row[0]) for one in row)
        lines.append(f"| {milliseconds} | {hosts} | {shown} | {row[0]['load']:.1f} |")
    return lines


def _cell(one: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if one is None:
        return ""
    ratio = "" if one is ours else f", {one['seconds'] / ours['seconds']:.1f} x"
    return f"{one['seconds']:.2f}{ratio} (n {len(one['all_seconds'])})"


def _steps(results: list[dict[str, Any]]) -> list[str]:
    """Where ddtree-patch's time goes, step by step."""
    lines = [
        "Of that, in ddtree-patch: `files` is the commit alone (the slowest host's), `processor` the command's",
        "own time on the operator's side, `turns` how often it spoke after the host had, over all hosts.",
        "",
        "| round trip, ms | hosts | find and read | plan | files | processor | programs a host | turns | kB up | "
        "kB down |",
        "|---" * 10 + "|",
    ]
    for r in results:
        if r["contestant"] != TOOL:
            continue
        steps = r["steps"]
        scales = {"turns": 1, "up": 1e3, "down": 1e3}
        line = [f"{r[key] / scale:.0f}" if key in r else "" for key, scale in scales.items()]
        lines.append(
            f"| {r['added_round_trip_ms']} | {r['hosts']} | {steps['find the installation']:.2f} | "
            f"{steps['plan']:.2f} | {steps['commit']:.2f} | {r['cpu_s']:.2f} | {r['programs']:.0f} | "
            f"{' | '.join(line)} |"
        )
    return lines


def _goals(runs: list[list[dict[str, Any]]]) -> list[str]:
    """Each goal, what was measured (of several figures the worst decides), and whether that meets it."""
    ratios: dict[str, list[float]] = {}
    many: dict[int, list[float]] = {}
    slow: list[float] = []
    for results in runs:  # ratios are those of one run
        seconds = {(r["added_round_trip_ms"], r["hosts"], r["contestant"]): r["seconds"] for r in results}
        ours = {key[:2]: value for key, value in seconds.items() if key[2] == TOOL}
        for (milliseconds, hosts, name), value in seconds.items():
            if (milliseconds, hosts) == (0, 1) and name != TOOL:
                ratios.setdefault(name, []).append(value / ours[0, 1])
        for (milliseconds, hosts), value in ours.items():
            if hosts == 32 and (milliseconds, 1) in ours:
                many.setdefault(milliseconds, []).append(value / ours[milliseconds, 1])
        if (200, 1) in ours:
            slow.append(ours[200, 1])
    goals = (
        (
            "Ansible takes 10 times as long on loopback, one host",
            ", ".join(f"{min(found):.1f} x ({name})" for name, found in ratios.items()),
            min(map(min, ratios.values()), default=0) >= 10,
        ),
        ("one host at 200 ms within 4 s", ", ".join(f"{one:.2f} s" for one in slow), max(slow, default=9) <= 4),
        (
            "32 hosts within twice the time of one",
            ", ".join(f"{max(found):.1f} x at {ms} ms" for ms, found in many.items()),
            max(map(max, many.values()), default=9) <= 2,
        ),
    )
    return [
        "| goal | measured | |",
        "|---|---|---|",
        *(f"| {goal} | {found or 'not measured'} | {_verdict(found, met)} |" for goal, found, met in goals),
    ]


def _verdict(found: str, met: bool) -> str:
    return ("met" if met else "**missed**") if found else "open"


if __name__ == "__main__":
    main()
