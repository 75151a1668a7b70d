"""Sections on what it brings: the chain, acceptance."""

import math

from scripts.gpu.report import plots
from scripts.gpu.report.documents import Section, measured_on, opened, rows_of, table, verdict

GOAL = 1.25  # tree / chain at budget 32, at every temperature
TEMPERATURES = (0.0, 0.6, 1.0)
BUDGETS, TOPKS = (7, 15, 31, 63), (1, 2, 4, 8)
SERVER_POINTS = {"chain": (7, 1), "b15k4": (15, 4), "tree": (32, 8), "b63k8": (63, 8)}


def _points(sweep: dict) -> dict[tuple[str, float], dict]:
    return {(row["server"], row["T"]): row for row in rows_of(sweep)}


def chain(sweep: dict) -> Section:
    points = _points(sweep)
    section = opened(
        "sweep",
        sweep,
        "DDTREE with topk 1 and budget 7, the pair's block less one, against DFLASH on the same prompts: tokens per "
        "verify step, all steps pooled, ± the standard error over prompts. [Greedy texts](greedy.md) compares the "
        "chain's text.",
    )
    shown = []
    for t in TEMPERATURES:
        if ("chain", t) not in points:
            section.missing.append(f"the chain at T = {t}")
            continue
        one, other = points["chain", t], points["dflash-stock", t]
        error = math.hypot(one["standard_error"], other["standard_error"])
        difference = one["accept_length"] - other["accept_length"]
        passed = abs(difference) <= 3 * error
        patched = points.get(("dflash", t))
        shown.append(
            (
                t,
                _length(other),
                _length(patched) if patched else "",
                _length(one),
                f"{difference:+.3f}",
                verdict(passed),
            )
        )
        section.rows.append(
            (
                f"chain = DFLASH, T {t}",
                f"{one['prompts']} x {one['tokens']} tokens, {one['steps']} steps",
                f"within {3 * error:.2f} (3 standard errors)",
                f"{difference:+.3f}",
                passed,
            )
        )
    off = max((abs(float(row[4])) for row in shown), default=0.0)
    section.found = f"within {off:.3f} tokens a step of DFLASH at every T"
    section.lines += table(("T", "DFLASH stock", "DFLASH patched", "chain", "chain - stock", ""), shown)
    return section


def _length(row: dict) -> str:
    return f"{row['accept_length']:.2f} ± {row['standard_error']:.2f}"


def acceptance(grid: dict | None, sweep: dict | None) -> Section:
    """`grid`: of the experiment acceptance; `sweep`: of servers."""
    section = Section("acceptance")
    points = _points(sweep) if sweep else {}
    by = {}
    if grid:
        result = grid["result"]
        served, trained = result["served_rope_theta"], result["trained_rope_theta"]
        by = _by_configuration(result["by_rope_theta"][served])
        _grid_tables(section, grid, by)
        _tried(section, by, result["by_rope_theta"][served]["ranks"])
        if trained != served:
            _other_base(section, by, _by_configuration(result["by_rope_theta"][trained]), served, trained)
    else:
        section.missing.append("acceptance over the whole grid of budgets and candidates")
    if sweep:
        shown = []
        for t in TEMPERATURES:
            for server, (budget, topk) in SERVER_POINTS.items():
                if (server, t) not in points:
                    continue
                row, base = points[server, t], points["dflash-stock", t]
                computed = by.get((t, budget, topk, 1.0))
                off = ""
                if computed:
                    error = math.hypot(row["standard_error"], computed["standard_error"])
                    off = f"{(row['accept_length'] - computed['accept_length']) / error:+.1f}"
                ratio = row["accept_length"] / base["accept_length"]
                shown.append(
                    (t, budget, topk, _length(row), _length(computed) if computed else "", off, f"{ratio:.2f}")
                )
                if server == "tree":
                    section.rows.append(
                        (
                            f"tree / chain at budget 32, T {t}",
                            f"{row['prompts']} x {row['tokens']} tokens, servers",
                            f">= {GOAL}",
                            f"{ratio:.2f}",
                            ratio >= GOAL,
                        )
                    )
        section.lines += [f"Servers. {measured_on(sweep)}", ""]
        section.lines += table(
            ("T", "budget", "topk", "on a server", "computed", "difference / standard error", "over stock DFLASH"),
            shown,
        )
    else:
        section.missing.append("acceptance on servers")
    ratios = [float(row[3]) for row in section.rows]
    section.found = f"tree over chain at budget 32: {min(ratios):.2f} to {max(ratios):.2f} times the tokens a step"
    return section


def _by_configuration(measured: dict) -> dict:
    return {(row["T"], row["budget"], row["topk"], row["draft_temperature"]): row for row in measured["rows"]}


def _other_base(section: Section, by: dict, as_trained: dict, served: str, trained: str) -> None:
    section.lines += [
        f"The release runs this draft with a rotary base of {float(served):,.0f}, though its checkpoint says "
        f"{float(trained):,.0f}: transformers 5 keeps `rope_theta` in `rope_parameters`, where SGLang's DFlash model "
        "does not look. What that costs, in tokens per step, and the ratio with the draft's own base:",
        "",
    ]
    rows = []
    for t in TEMPERATURES:
        chains, trees = (
            [found[t, *which, 1.0]["accept_length"] for found in (by, as_trained)] for which in ((7, 1), (32, 8))
        )
        rows.append((t, *(f"{x:.2f}" for x in (*chains, *trees)), f"{trees[1] / chains[1]:.2f}"))
    section.lines += table(
        ("T", "chain as served", "chain as trained", "tree 32, 8 as served", "as trained", "tree / chain as trained"),
        rows,
    )


def _grid_tables(section: Section, grid: dict, by: dict) -> None:
    result = grid["result"]
    section.lines += [
        f"The whole grid, computed. {measured_on(grid)}",
        "",
        f"{result['prompts']} prompts of Python source, {result['tokens']} tokens each, written by the target alone. "
        "The series' own `build_tree` builds a tree from the draft's logits at every place of those texts, and a step "
        "accepts the tree's path along the text (`scripts/gpu/tree_acceptance.py`). All configurations see the same "
        "texts. Topk 1 is DFLASH's chain, whatever the budget. Tokens per step, and over the chain:",
        "",
        "![acceptance by budget, topk and temperature](acceptance.svg)",
        "",
    ]
    plots.acceptance(by, TEMPERATURES, BUDGETS, TOPKS)
    shown = []
    for t in TEMPERATURES:
        base = by[t, 7, 1, 1.0]
        for budget in BUDGETS:
            lengths = [by[t, budget, topk, 1.0]["accept_length"] for topk in TOPKS]
            shown.append((t, budget, *(f"{x:.2f} ({x / base['accept_length']:.2f})" for x in lengths)))
        ratio = by[t, 32, 8, 1.0]["accept_length"] / base["accept_length"]
        section.rows.append(
            (
                f"tree / chain at budget 32, T {t}",
                f"{result['prompts']} x {result['tokens']} tokens, computed",
                f">= {GOAL}",
                f"{ratio:.2f}",
                ratio >= GOAL,
            )
        )
    section.lines += table(("T", "budget", *(f"topk {topk}" for topk in TOPKS)), shown)


def _tried(section: Section, by: dict, ranks: list[dict]) -> None:
    tried = sorted({key[3] for key in by if key[1:3] == (32, 8)})
    rows = [(t, *(f"{by[t, 32, 8, sharpened]['accept_length']:.3f}" for sharpened in tried)) for t in TEMPERATURES]
    section.lines += [
        "Draft temperatures other than 1 at budget 32, topk 8 (the trees' weights sharpened or flattened):",
        "",
    ]
    section.lines += table(("T", *(f"draft temperature {sharpened:g}" for sharpened in tried)), rows)
    section.lines += [
        "The rank of the target's token among the draft's candidates, by depth (share of all places):",
        "",
    ]
    rows = []
    for found in ranks:
        for depth, shares in enumerate(found["share"], 1):
            groups = (shares[0], shares[1], sum(shares[2:4]), sum(shares[4:8]), shares[8])
            rows.append((found["T"], depth, *(f"{share:.2f}" for share in groups)))
    section.lines += table(("T", "depth", "best", "second", "3 to 4", "5 to 8", "none of 8"), rows)
