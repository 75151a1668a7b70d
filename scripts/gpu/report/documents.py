"""The JSON files of docs/gpu, and what the sections of the report are made of."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.gpu.report.pages import PAGES

DOCS = Path(__file__).resolve().parents[3] / "docs"


@dataclass
class Section:
    """What one experiment has to say: a page of its own, and a line in docs/gpu-results.md.

    Attributes:
        name: of the experiment, in PAGES; the page is docs/gpu/NAME.md.
        found: the result in one line.
        lines: the figures, as Markdown.
        rows: (what, n, threshold, found, passed) of each check.
        missing: what of the experiment was not run.
        remarks: written by hand into the JSON files: what disturbed the run, and why something failed.
        files: the JSON files that the page is made from.
    """

    name: str
    found: str = ""
    lines: list[str] = field(default_factory=list)
    rows: list[tuple[str, str, str, str, bool]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return PAGES[self.name].title

    @property
    def failed(self) -> list[tuple[str, str, str, str, bool]]:
        return [row for row in self.rows if not row[4]]


def by_experiment(folder: Path = DOCS / "gpu") -> dict[str, list[dict]]:
    """{experiment: its documents, the newest first, with the file's name as "file"}, without rehearsals."""
    found: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text()) | {"file": path.name}
        if not document.get("rehearsal"):
            found.setdefault(document["experiment"], []).append(document)
    for documents in found.values():
        documents.sort(key=lambda document: document["date"], reverse=True)
    return found


def measured_on(document: dict) -> str:
    """Date, GPUs, versions and command of one run, as a sentence."""
    host, versions = document["host"], document["host"]["versions"]
    where = ", ".join(sorted(set(host["gpus"]))) or f"CPU, {host['cores']} cores"
    count = f"{len(host['gpus'])} x " if len(host["gpus"]) > 1 else ""
    of = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"{document['date'][:10]}, {count}{where}, Python {host['python']}, {of}. `{document['command']}`"


def opened(name: str, document: dict, said: str) -> Section:
    """A section that begins with what was measured, and where."""
    return Section(name, lines=[said, "", measured_on(document), ""])


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
