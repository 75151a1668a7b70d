"""Write docs/gpu-results.md, a page for each experiment in docs/gpu, and the plots, from the JSON files there."""

from collections import Counter
from pathlib import Path
from string import Template

from scripts.gpu.report import cost, kernels, others, releases, sampling, speed
from scripts.gpu.report.documents import DOCS, Section, by_experiment, measured_on, table, verdict
from scripts.gpu.report.pages import PAGES

RESULTS = Path(__file__).with_name("results.md")  # the page as it is written by hand, with $names for figures
EXACT = ("greedy", "exact", "texts", "cuts", "op", "sweep", "tp2", "mla")
TIMES = ("acceptance", "cost", "tree-kernels", "target-probs", "renorm")
SERVED = ("long", "refusals", "tool")


def sections(documents: dict[str, list[dict]]) -> dict[str, Section]:
    """{experiment: its section}, from documents as `by_experiment` gives them.

    Most read the newest document of an experiment; exact sampling and the cost of a step read all.
    """
    found = {name: of_one[0] for name, of_one in documents.items()}
    write = {
        "op": sampling.op,
        "greedy": sampling.greedy,
        "exact": lambda newest: sampling.exact(newest, *documents["exact"][1:]),
        "texts": sampling.texts,
        "cuts": sampling.cuts,
        "sweep": speed.chain,
        "acceptance": lambda grid: speed.acceptance(grid, found.get("sweep")),
        "cost": lambda newest: cost.cost(newest, *documents["cost"][1:]),
        "tree-kernels": kernels.tree,
        "target-probs": kernels.target_probs,
        "renorm": cost.renorm,
    } | {name: lambda document, name=name: others.section(name, document) for name in others.STEPS}
    made = {}
    for name in PAGES:
        if name in found:
            section = made[name] = write[name](found[name])
            section.remarks += found[name].get("remarks", [])
            section.files += [document["file"] for document in documents[name]]
    if "acceptance" in made and "sweep" in found:
        made["acceptance"].files.append(found["sweep"]["file"])
    return made


def page(section: Section, earlier: list[dict]) -> str:
    """The raw page of an experiment. earlier: documents before the newest, whose remarks it has too."""
    files = ", ".join(f"[{name}]({name})" for name in section.files)
    question = PAGES[section.name].question
    lines = [f"# {section.title}", "", f"{question} {section.found[:1].upper()}{section.found[1:]}.", ""]
    lines += [f"Written by `python3 -m scripts.gpu.report` from {files}. [All results](../gpu-results.md).", ""]
    if section.rows:
        lines += ["## Checks", ""]
        rows = [(*row[:4], verdict(row[4])) for row in section.rows]
        lines += table(("what", "n", "threshold", "found", ""), rows)
    if section.remarks:
        lines += ["## Remarks", "", *(f"- {remark}" for remark in section.remarks), ""]
    lines += ["## Figures", "", *section.lines]
    for document in earlier:
        if document.get("remarks"):
            lines += ["", f"## Remarks on the run of {document['date']}", ""]
            lines += [f"- {remark}" for remark in document["remarks"]]
    return "\n".join(lines).rstrip() + "\n"


def _answers(made: dict[str, Section], names: tuple[str, ...]) -> str:
    rows = []
    for name in names:
        if name in made:
            section = made[name]
            passed = len(section.rows) - len(section.failed)
            checks = f"{passed} of {len(section.rows)}" if section.rows else "-"
            rows.append((f"[{PAGES[name].question}](gpu/{name}.md)", section.found, checks))
    return "\n".join(table(("question", "found", "checks passed"), rows)).rstrip()


def _failed(made: dict[str, Section]) -> str:
    rows = [(section.name, *row) for section in made.values() for row in section.failed]
    return "\n".join(
        f"- [{name}](gpu/{name}.md): {what}: {found} (limit: {limit})." for name, what, _, limit, found, _ in rows
    )


def _not_run(made: dict[str, Section]) -> str:
    missing = [f"{page.title}: the whole experiment" for name, page in PAGES.items() if name not in made]
    missing += [what for section in made.values() for what in section.missing]
    return "".join(f"- {what}\n" for what in missing)


def _host(documents: dict[str, list[dict]]) -> str:
    """Host and versions of most runs, without the command."""
    said = [measured_on(document).partition(", ")[2].partition(" `")[0] for of in documents.values() for document in of]
    return Counter(said).most_common(1)[0][0]


def main() -> None:
    documents = by_experiment()
    made = sections(documents)
    for name, section in made.items():
        (DOCS / "gpu" / f"{name}.md").write_text(page(section, documents[name][1:]))
    dates = sorted(document["date"][:10] for of_one in documents.values() for document in of_one)
    tokens = releases.newest("tokens")
    text = Template(RESULTS.read_text()).substitute(
        tokens="\n".join(releases.medians(tokens)).rstrip(),
        tokens_release=tokens["release"],
        tokens_measured=releases.measured(tokens),
        exact=_answers(made, EXACT),
        times=_answers(made, TIMES),
        served=_answers(made, SERVED),
        failed=_failed(made),
        not_run=_not_run(made),
        host=_host(documents),
        first=dates[0],
        last=dates[-1],
        spread=f"{releases.spread(tokens):.0%}",
        **releases.ratios(tokens),
    )
    (DOCS / "gpu-results.md").write_text(text)


if __name__ == "__main__":
    main()
