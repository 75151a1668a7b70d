"""Write docs/gpu-results.md and its plots from the newest JSON file of each experiment in docs/gpu."""

from scripts.gpu.report import cost, kernels, others, sampling, speed
from scripts.gpu.report.documents import DOCS, Section, by_experiment, table, verdict

# What is said of an experiment of which there is no document.
NOT_RUN = {
    "op": "the op against the reference walk",
    "greedy": "greedy texts over 100 prompts and batches of 1, 4 and 16",
    "exact": "sampled distributions against plain decoding",
    "cuts": "sampling at cuts that rounding decides: float16 servers, plain decoding with itself",
    "texts": "whole 32-token texts",
    "sweep": "acceptance on servers, the chain among them",
    "acceptance": "acceptance over the whole grid of budgets and candidates",
    "cost": "the cost of a step on an 8B shape",
    "renorm": "where the release's top-p does not end",
    "tree-kernels": "tree and draft candidates alone",
    "target-probs": "the target distribution alone",
    "tp2": "tensor parallel 2",
    "mla": "an MLA + MoE target",
    "long": "long runs with requests joining and leaving, up to the context limit",
    "tool": "the whole tool (apply, restart, smoke suite, revert) on a GPU host",
    "refusals": "unsupported combinations on a GPU host",
}


def sections(documents: dict[str, list[dict]]) -> list[Section]:
    """Of the newest document of each experiment, as `by_experiment` gives them; exact sampling and the cost of a step
    from all."""
    found = {name: of_one[0] for name, of_one in documents.items()}
    made = []

    def add(section: Section, *names: str) -> None:
        section.remarks += [remark for name in names for remark in found.get(name, {}).get("remarks", [])]
        made.append(section)

    for name, write in (
        ("op", sampling.op),
        ("greedy", sampling.greedy),
        ("exact", lambda newest: sampling.exact(newest, *documents["exact"][1:])),
        ("texts", sampling.texts),
        ("cuts", sampling.cuts),
        ("sweep", speed.chain),
    ):
        if name in found:
            add(write(found[name]), name)
    if "acceptance" in found or "sweep" in found:
        add(speed.acceptance(found.get("acceptance"), found.get("sweep")), "acceptance")
    if "cost" in found:
        add(cost.cost(*documents["cost"]), "cost")
    for name, write in (
        ("tree-kernels", kernels.tree),
        ("target-probs", kernels.target_probs),
        ("renorm", cost.renorm),
    ):
        if name in found:
            add(write(found[name]), name)
    for name in others.TITLES:
        if name in found:
            add(others.section(name, found[name]), name)
    return made


def _summary(section: Section) -> tuple[str, str]:
    """(title, how many of its checks passed) of a section; why not all is said in its remarks."""
    passed = sum(row[4] for row in section.rows)
    said = "passed" if passed == len(section.rows) else f"{passed} of {len(section.rows)} checks"
    if not section.rows:
        said = "figures, without a check"
    if section.missing:
        said += ", incomplete"
    return section.title, said


def _about_speed(made: list[Section]) -> list[str]:
    """What the figures do not say of speed."""
    apart = [row[4] for section in made for row in section.rows if row[0].startswith(cost.UNDISTURBED)]
    lines = ["Acceptance (section 5) counts tokens a step: it is not speed, which the time of a step decides as well."]
    noisy = "Whole-step times (section 6) are not yet measured on a host that is quiet enough to judge them."
    return lines if apart and all(apart) else [*lines, noisy]


def main() -> None:
    documents = by_experiment()
    made = sections(documents)
    missing = [what for name, what in NOT_RUN.items() if name not in documents]
    missing += [what for section in made for what in section.missing]
    lines = [
        "# Measured on a GPU",
        "",
        "Written by `python3 -m scripts.gpu.report` from the newest JSON file of each experiment in `docs/gpu`; they "
        "hold "
        "date, versions, command and all figures. `scripts/gpu/README.md` says how to run them.",
        "",
        *_about_speed(made),
        "",
    ]
    lines += table(("", "verdict"), [_summary(section) for section in made])
    remarks = [f"- **{section.title}**: {remark}" for section in made for remark in section.remarks]
    lines += ["## Remarks", "", "What disturbed a run, and why something failed.", "", *remarks, ""] if remarks else []
    lines += ["## Every check", ""]
    rows = [(*row[:4], verdict(row[4])) for section in made for row in section.rows]
    lines += table(("what", "n", "threshold", "found", ""), rows)
    lines += ["## Not run", "", *(f"- {what}" for what in dict.fromkeys(missing)), ""] if missing else []
    for section in made:
        lines += [f"## {section.title}", "", *(["See [Remarks](#remarks).", ""] if section.remarks else [])]
        lines += section.lines
        if lines[-1]:
            lines.append("")
    (DOCS / "gpu-results.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
