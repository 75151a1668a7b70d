"""The JSON files of docs/gpu, and what the sections of the report are made of."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"


@dataclass
class Section:
    """What one experiment has to say. `rows`: (what, n, threshold, found, passed) of the table at the top;
    `missing`: what of it was not run; `remarks`: of the document, written by hand where it was committed: what
    disturbed the run, and why something failed."""

    title: str
    lines: list[str] = field(default_factory=list)
    rows: list[tuple[str, str, str, str, bool]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def by_experiment(folder: Path = DOCS / "gpu") -> dict[str, list[dict]]:
    """{experiment: its documents, the newest first}; rehearsals are no measurements."""
    found: dict[str, list[dict]] = {}
    for document in (json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))):
        if not document.get("rehearsal"):
            found.setdefault(document["experiment"], []).append(document)
    for documents in found.values():
        documents.sort(key=lambda document: document["date"], reverse=True)
    return found


def measured_on(document: dict) -> str:
    host, versions = document["host"], document["host"]["versions"]
    where = ", ".join(sorted(set(host["gpus"]))) or f"CPU, {host['cores']} cores"
    count = f"{len(host['gpus'])} x " if len(host["gpus"]) > 1 else ""
    of = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"{document['date'][:10]}, {count}{where}, Python {host['python']}, {of}. `{document['command']}`"


def opened(title: str, document: dict, said: str) -> Section:
    """A section that begins with where it was measured and what was."""
    return Section(title, [measured_on(document), "", said, ""])


def rows_of(document: dict) -> list[dict]:
    """The rows of all steps that gave some."""
    return [row for found in document["result"].values() if isinstance(found, list) for row in found]


def failed_steps(result: dict) -> list[str]:
    """Steps that raised: their name and the exception's last line."""
    return [
        f"{name}: {found['failed'].strip().split(chr(10))[-1]}"
        for name, found in result.items()
        if isinstance(found, dict) and "failed" in found
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    return [*lines, ""]


def verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"
