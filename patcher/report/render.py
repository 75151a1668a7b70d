"""An Outcome as text (rich), or as one JSON document.

Whatever comes from a host is printed as text, never as markup. Without a terminal the output is plain ASCII, so that
it survives any log collector.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table as DrawnTable
from rich.text import Text

from patcher.errors import DdtreePatchError, RollbackFailed
from patcher.report.findings import Finding, Table
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


def print_outcome(outcome: Outcome, console: Console, detail: bool = False) -> None:
    """The result for a reader: a line a host, what was not done, and what was found. Failures: see print_error.

    `detail`: files and steps, too.
    """
    for table in _tables(outcome.findings, detail):
        _print_table(table, console)
    many = len(outcome.hosts) > 1
    for host in outcome.hosts:
        raw = next((raw for raw in (finding.raw() for finding in host.findings) if raw is not None), None)
        if raw is not None:
            if many:
                _print_name(host, console)
            _print_raw(raw, console)
        elif host.summary:
            name = f"{host.host}: " if many else ""
            console.print(plain_text(f"{name}{host.summary}", "bold" if host.ok else "bold red", console))
    for line in _left_undone(outcome.hosts):
        console.print(plain_text(f"not done: {line}", "yellow", console))
    for host in outcome.hosts:
        if all(finding.raw() is None for finding in host.findings):
            _print_details(host, console, detail, many)


def _left_undone(hosts: Sequence[HostResult]) -> list[str]:
    """What was not done, each line once; of several hosts, with those that it is about."""
    where: dict[str, list[str]] = {}
    for host in hosts:
        for line in host.not_done:
            where.setdefault(line, []).append(host.host)
    if len(hosts) == 1:
        return list(where)
    return [f"{line} ({'all hosts' if len(on) == len(hosts) else ', '.join(on)})" for line, on in where.items()]


def _print_details(host: HostResult, console: Console, detail: bool, many: bool) -> None:
    facts = [Table(None, [(f"{name}:", value) for name, value in host.facts.items()])] if host.facts else []
    tables = [*facts, *_tables(host.findings, detail), *([_steps(host, console)] if detail and host.steps else [])]
    if many and tables:
        _print_name(host, console)
    for table in tables:
        _print_table(table, console)


def _tables(findings: Iterable[Finding], detail: bool) -> list[Table]:
    return [table for one in findings for table in one.tables() if table.rows and (detail or not table.detail)]


def _steps(host: HostResult, console: Console) -> Table:
    """The steps; what the error or a line of `not done` says of one is not said again."""
    said = {*host.not_done, host.error.what if host.error else ""}
    rows = []
    for step in host.steps:
        detail = "" if step.detail in said or f"{step.name}: {step.detail}" in said else step.detail
        state = plain_text(step.state, _STYLES[step.state], console)
        rows.append((step.name, state, f"{step.seconds:.1f} s", detail))
    return Table(None, rows)


def _print_name(host: HostResult, console: Console) -> None:
    console.rule(plain_text(host.host, "bold", console), characters="-", align="left")


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


def _print_table(table: Table, console: Console) -> None:
    drawn = DrawnTable(
        box=None,
        show_header=table.header is not None,
        header_style="bold" if console.is_terminal else "",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for name in table.header or [""] * max((len(row) for row in table.rows), default=0):
        drawn.add_column(name, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else plain_text(_cell(cell), "", console) for cell in row))
    if console.is_terminal:
        console.print(drawn)
        return
    with console.capture() as captured:
        console.print(drawn)
    for line in captured.get().splitlines():  # without the blanks that fill the last column
        console.print(Text(line.rstrip()), soft_wrap=True)


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


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip("\n").split("\n"))
