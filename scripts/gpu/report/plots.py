"""Plots of the report, as SVG files beside the JSON files. Needs matplotlib: pip install '.[report]'."""

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from scripts.gpu.report.documents import DOCS

# So that the same figures give the same file.
pyplot.rcParams["svg.hashsalt"] = "ddtree-patch"
pyplot.rcParams["svg.fonttype"] = "none"
pyplot.rcParams["font.size"] = 9


def _save(figure, name: str) -> None:
    figure.savefig(DOCS / "gpu" / name, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def acceptance(by: dict, temperatures, budgets, topks) -> None:
    """by: {(T, budget, topk, draft temperature): row}."""
    figure, axes = pyplot.subplots(1, len(temperatures), figsize=(9.5, 3), sharey=True)
    for axis, t in zip(axes, temperatures, strict=True):
        axis.axhline(by[t, 7, 1, 1.0]["accept_length"], color="grey", linestyle="--", label="chain (DFLASH)")
        for topk in topks[1:]:
            rows = [by[t, budget, topk, 1.0] for budget in budgets]
            axis.errorbar(
                budgets,
                [row["accept_length"] for row in rows],
                [row["standard_error"] for row in rows],
                marker="o",
                markersize=3,
                label=f"topk {topk}",
            )
        axis.set_title(f"T = {t:g}")
        axis.set_xlabel("budget")
        axis.set_xticks(budgets)
    axes[0].set_ylabel("tokens per verify step")
    axes[0].legend(fontsize=8)
    _save(figure, "acceptance.svg")


def cost(steps: dict[str, dict]) -> None:
    """steps: {server: {(batch, mode): row}}."""
    batches = sorted({batch for rows in steps.values() for batch, _ in rows})
    if not batches:
        return
    figure, axes = pyplot.subplots(len(batches), 1, figsize=(9.5, 2.2 * len(batches)), sharex=True, squeeze=False)
    for axis, batch in zip(axes[:, 0], batches, strict=True):
        modes = list(dict.fromkeys(mode for rows in steps.values() for b, mode in rows if b == batch))
        width = 0.8 / len(steps)
        for number, (name, rows) in enumerate(steps.items()):
            has = [place for place, mode in enumerate(modes) if (batch, mode) in rows]
            places = [place + (number - (len(steps) - 1) / 2) * width for place in has]
            axis.bar(places, [rows[batch, modes[place]]["step_ms"] for place in has], width, label=name)
        axis.set_ylabel(f"batch {batch}: ms")
        axis.set_xticks(range(len(modes)), [mode.replace(", ", "\n").replace("T=1 ", "T=1\n") for mode in modes])
        axis.tick_params(axis="x", labelsize=7)
    axes[0, 0].legend(fontsize=8, ncols=len(steps))
    _save(figure, "cost.svg")
