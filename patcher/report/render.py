"""An Outcome as text (rich), as one JSON document, or as JUnit XML.

Whatever comes from a host is printed as text, never as markup. Without a terminal the output is plain ASCII, so that
it survives any log collector.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patcher.errors import DdtreePatchError, RollbackFailed
from patcher.report.outcome import DONE, FAILED, SKIPPED, WARNING, HostResult, Outcome

_STYLES = {DONE: "green", FAILED: "bold red", WARNING: "yellow", SKIPPED: "dim"}
_PLAIN_WIDTH = 160


def console_for(stream: IO[str]) -> Console:
    """A console that writes to `stream`: colours on a terminal, wide plain text otherwise."""
    if stream.isatty():
        return Console(file=stream, highlight=False, markup=False)
    return Console(file=stream, highlight=False, markup=False, color_system=None, width=_PLAIN_WIDTH)


def to_json(outcome: Outcome) -> str:
    """One JSON document. ASCII only: lone surrogates of odd file names stay representable."""
    return json.dumps(outcome.as_dict(), indent=2)


def error_to_json(error: DdtreePatchError, command: str) -> str:
    """The JSON document of a command that failed before it had a result."""
    document = {"ok": False, "command": command, "exit_code": error.exit_code, "hosts": [], "error": error.as_dict()}
    return json.dumps(document, indent=2)


def print_outcome(outcome: Outcome, console: Console) -> None:
    """The result for a reader: per host its summary, findings and what was not done. Failures: see print_error."""
    if "series" in outcome.data:
        _print_rows(
            console,
            ("series", "versions", "family", "stages", "backends", "proven on CPU", "proven on GPU"),
            [
                (
                    s["name"],
                    ", ".join(s["versions"]),
                    s["family"] or "-",
                    ", ".join(stage["name"] for stage in s["stages"]),
                    ", ".join(s["backends"]) or "-",
                    _proven(s["proven"]["cpu"]),
                    _proven(s["proven"]["gpu"]),
                )
                for s in outcome.data["series"]
            ],
        )
    for host in outcome.hosts:
        _print_host(host, console, many=len(outcome.hosts) > 1)


def _proven(proof: Mapping[str, Any] | None) -> str:
    if proof is None:
        return "-"
    return proof["date"] if proof["current"] else f"{proof['date']} (an earlier text)"


def print_error(error: DdtreePatchError, console: Console, host: str = "") -> None:
    """What failed, where (on `host`, one of several), and what to do next; the commands of a failed rollback stand
    alone, ready to copy."""
    console.print(plain_text(f"error: {error.what}", "bold red", console))
    where = error.where if host in error.where else f"{host}: {error.where}"
    for label, value in (("where", where), ("next", error.next_step)):
        if value:
            console.print(plain_text(f"  {label}: {value}", "", console))
    if error.detail:
        console.print(plain_text(_indent(error.detail), "dim", console))
    if isinstance(error, RollbackFailed):
        needed = len(error.commands) - len(error.last_resort)
        for number, command in enumerate(error.commands):
            if number == needed:
                console.print("  only if the last of these fails, and on the host itself:")
            console.print(plain_text(f"    {command}", "bold", console), soft_wrap=True)


def to_junit(outcome: Outcome) -> bytes:
    """One test suite a host, one test case a check (a step, where the command has no checks)."""
    root = ET.Element("testsuites", name=f"ddtree-patch {outcome.command}")
    for host in outcome.hosts:
        cases = host.data.get("checks") or [
            {
                "name": s.name,
                "passed": s.state != FAILED,
                "skipped": s.state == SKIPPED,
                "detail": s.detail,
                "seconds": s.seconds,
            }
            for s in host.steps
        ]
        failed = sum(not case["passed"] for case in cases)
        broke = host.error is not None and not failed
        skipped = sum(bool(case.get("skipped")) for case in cases)
        label = _xml_safe(f"{outcome.command}.{host.host}")
        suite = ET.SubElement(
            root,
            "testsuite",
            name=_xml_safe(host.host),
            tests=str(len(cases) + broke),
            failures=str(failed),
            errors=str(int(broke)),
            skipped=str(skipped),
        )
        for case in cases:
            element = ET.SubElement(
                suite, "testcase", classname=label, name=_xml_safe(case["name"]), time=f"{case.get('seconds', 0.0):.3f}"
            )
            if case.get("skipped"):
                ET.SubElement(element, "skipped", message=_xml_safe(case["detail"]))
            elif not case["passed"]:
                ET.SubElement(element, "failure", message=_xml_safe(case["detail"]))
        if broke:
            element = ET.SubElement(suite, "testcase", classname=label, name=outcome.command)
            ET.SubElement(element, "error", message=_xml_safe(str(host.error)), type=type(host.error).__name__)
    written: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return written


def _print_host(host: HostResult, console: Console, many: bool) -> None:
    if many:
        console.rule(plain_text(host.host, "bold", console), characters="-", align="left")
    data = host.data
    if data.get("facts"):
        _print_rows(console, None, [(f"{name}:", value) for name, value in data["facts"].items()])
    if "diff" in data:
        _print_raw(data["diff"], console)
        return
    if data.get("plan"):
        _print_rows(
            console,
            ("file", "action", "before", "after"),
            [(a["path"], a["kind"], _short(a["before"]), _short(a["after"])) for a in data["plan"]["actions"]],
        )
    if data.get("files"):
        _print_rows(
            console, ("file", "state", "sha256"), [(f["path"], f["state"], _short(f["sha256"])) for f in data["files"]]
        )
    if data.get("temperatures"):
        _print_mappings(console, data["temperatures"])
    if data.get("checks"):
        _print_rows(console, ("check", "", "detail"), [(c["name"], _verdict(c), c["detail"]) for c in data["checks"]])
    if data.get("lines"):
        _print_mappings(console, data["lines"])
    if host.steps:
        _print_rows(
            console,
            None,
            [
                (step.name, plain_text(step.state, _STYLES[step.state], console), f"{step.seconds:.1f} s", step.detail)
                for step in host.steps
            ],
        )
    if host.summary:
        console.print(plain_text(host.summary, "bold" if host.ok else "bold red", console))
    for line in host.not_done:
        console.print(plain_text(f"not done: {line}", "yellow", console))


def _print_raw(diff: str, console: Console) -> None:
    """A diff byte for byte, so that it can be piped into a file; it is the whole result.

    On a terminal control characters are made visible: the old lines are the host's.
    """
    if console.is_terminal:
        console.print(
            plain_text(diff.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"), "", console),
            soft_wrap=True,
            end="",
        )
        return
    data = diff.encode("utf-8", "surrogateescape")
    console.file.flush()
    binary = getattr(console.file, "buffer", None)
    if binary is None:
        console.file.write(data.decode("utf-8", "backslashreplace"))
        return
    binary.write(data)
    binary.flush()


def _print_mappings(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows that share keys; the columns are the keys in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    _print_rows(console, columns, [[row.get(column, "") for column in columns] for row in rows])


def _print_rows(console: Console, header: Sequence[str] | None, rows: Iterable[Sequence[Any]]) -> None:
    table = Table(
        box=None,
        show_header=header is not None,
        header_style="bold" if console.is_terminal else "",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    rows = list(rows)
    for name in header or [""] * max((len(row) for row in rows), default=0):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else plain_text(_cell(cell), "", console) for cell in row))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def plain_text(value: str, style: str, console: Console) -> Text:
    """Text with control characters made visible; ASCII only where there is no terminal."""
    shown = "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    if not console.is_terminal:
        shown = shown.encode("ascii", "backslashreplace").decode()
    return Text(shown, style=style)


def _xml_safe(value: str) -> str:
    """XML 1.0 has no way to write control characters, not even escaped."""
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in value)


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "-"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip("\n").split("\n"))


def _verdict(check: Mapping[str, Any]) -> str:
    if check.get("skipped"):
        return "skipped"
    return "pass" if check["passed"] else "FAIL"
