"""Sections on what it costs: a step, and the release's top-p."""

import math
import statistics

from scripts.gpu.report import plots
from scripts.gpu.report.documents import Section, failed_steps, measured_on, opened, table

UNSURE = 0.01  # standard error of a ratio, so that a difference of 3 % can be told
UNDISTURBED = "alone on its GPU"  # the check that decides whether any time of a step is a verdict
ALONE, COMBINED = 1.03, 1.05  # a sampled step over the greedy step: T alone, and with top-k, top-p or min-p


def cost(document: dict, *earlier: dict) -> Section:
    """`earlier`: runs before this one, whose ratios are shown beside it, since hosts differ."""
    result = document["result"]
    shape, draft = result["shape"], result["draft"]
    section = opened(
        "cost",
        document,
        f"Target: {shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, vocabulary "
        f"{shape['vocab_size']:,}. Draft: {draft['num_hidden_layers']} layers, block {draft['block_size']}. Dummy "
        f"weights in bfloat16; DDTREE with budget {result['budget']}, topk {result['topk']}. Times are medians of "
        "whole steps, from the start of one to the start of the next, with the scheduler and without timers inside. In "
        "brackets: the ratio to the same server's greedy step, the median over rounds that take turns, ± its standard "
        "error. With dummy weights the target's rows are nearly flat, the hardest case for top-p; the peaked modes "
        "bias 60 tokens, so that rows look like a trained model's.",
    )
    section.lines += ["![time of a step](cost.svg)", ""]
    servers = [name for name in ("ddtree", "dflash", "dflash-stock") if "steps" in result.get(name, {})]
    section.missing += [
        f"cost of a step: {name}" for name in ("ddtree", "dflash", "dflash-stock") if name not in servers
    ]
    steps = {name: {(row["batch"], row["mode"]): row for row in result[name]["steps"]} for name in servers}
    plots.cost(steps)
    if "ddtree" in steps:
        shown = []
        for batch, mode in steps["ddtree"]:
            cells = []
            for name in servers:
                row = steps[name].get((batch, mode))
                ratio = "{:.3f} ± {:.3f}".format(*_over_greedy(steps[name], batch, mode)) if row else ""
                cells.append(f"{row['step_ms']:.2f} ({ratio})" if row else "")
            shown.append((batch, mode, *cells, sum(s[batch, mode]["n"] for s in steps.values() if (batch, mode) in s)))
        section.lines += table(("batch", "mode", *(f"{name}, ms" for name in servers), "n"), shown)
    for before in earlier:
        section.lines += [f"Before it, at {before['date']}. {measured_on(before)}", ""]
        section.lines += _ratios(before["result"])
    for name in servers:
        errors = [_over_greedy(steps[name], *key)[1] for key in steps[name] if not key[1].startswith("T=0")]
        section.rows.append(
            (
                f"{UNDISTURBED}: {name}",
                f"{len(errors)} modes and batch sizes",
                f"standard error of a ratio <= {UNSURE:.0%} in the median, or no time here is a verdict",
                f"median {statistics.median(errors):.1%}, at most {max(errors):.1%}",
                statistics.median(errors) <= UNSURE,
            )
        )
    for name in ("ddtree", "dflash"):
        found = steps.get(name, {})
        for mode in dict.fromkeys(mode for _, mode in found if mode.startswith("T=1")):
            ratios = {batch: _over_greedy(found, batch, mode)[0] for batch, m in found if m == mode}
            limit = ALONE if mode == "T=1" else COMBINED
            section.rows.append(
                (
                    f"sampled / greedy step: {name}, {mode}",
                    f"{found[next(iter(ratios)), mode]['n']} steps a batch size",
                    f"<= {limit}",
                    ", ".join(f"batch {b} {ratio:.3f}" for b, ratio in ratios.items()),
                    max(ratios.values()) <= limit,
                )
            )
    _kernels_time(section, result)
    patched, stock = steps.get("dflash", {}), steps.get("dflash-stock", {})
    for mode in ("T=1 top_k", "T=1 top_p", "T=1 top_p, peaked", "T=1 top_k top_p, peaked"):
        both = [batch for batch, m in stock if m == mode and (batch, m) in patched]
        added = {b: [_over_greedy(found, b, mode)[0] - 1 for found in (patched, stock)] for b in both}
        if added:
            section.rows.append(
                (
                    f"DFLASH, what {mode} adds to a greedy step",
                    "as above",
                    "less than in the release",
                    "; ".join(f"batch {b} {one:+.1%}, release {other:+.1%}" for b, (one, other) in added.items()),
                    all(one < other for one, other in added.values()),
                )
            )
    for name in servers:
        if stopped := result[name].get("stopped_answering"):
            section.lines += [
                f"{name} gave no answer within {stopped['seconds']:.0f} s to {stopped['batch']} requests of "
                f"{stopped['mode']}, after {stopped['answered']} windows; what was measured before is here.",
                "",
            ]
    _hanging(section, result.get("flat top_k top_p", {}))
    _parts(section, result, servers)
    _first_use(section, result, servers)
    section.found = _headline(steps.get("ddtree", {}))
    section.lines += [f"- failed: {line}" for line in failed_steps(result)]
    return section


def _headline(steps: dict) -> str:
    """What sampling adds to the tree's greedy step, whole steps, over all modes and batch sizes."""
    added = [_over_greedy(steps, batch, mode)[0] - 1 for batch, mode in steps if mode.startswith("T=1")]
    return f"{min(added):.1%} to {max(added):.1%} of a greedy step of the tree" if added else ""


def _kernels_time(section: Section, result: dict) -> None:
    """What sampling adds to the kernels of a step: a host that is late does not change it."""
    if "steps" not in result.get("ddtree", {}):
        return
    greedy = {row["batch"]: row["step_ms"] for row in result["ddtree"]["steps"] if row["mode"] == "T=0"}
    decide = {
        (row["mode"], row["batch"]): row["parts"]["decide"]["gpu_ms"]
        for row in result["ddtree"]["parts"]
        if row["parts"].get("decide", {}).get("gpu_ms") is not None
    }
    for mode in dict.fromkeys(mode for mode, _ in decide if mode.startswith("T=1")):
        base = "T=0, peaked" if mode.endswith("peaked") else "T=0"
        added = {batch: (decide[mode, batch] - decide[base, batch]) / greedy[batch] for m, batch in decide if m == mode}
        limit = (ALONE if mode == "T=1" else COMBINED) - 1
        section.rows.append(
            (
                f"kernels that {mode} adds to a greedy step: ddtree",
                "13 steps a batch size",
                f"<= {limit:.0%}",
                ", ".join(f"batch {batch} {share:.1%}" for batch, share in added.items()),
                max(added.values()) <= limit,
            )
        )


def _hanging(section: Section, served: dict) -> None:
    """Did the release answer top-k with top-p over flat rows, which was asked last?"""
    if "stopped" in served:
        section.lines += [
            f"Stock DFLASH answered {' and '.join(map(str, served['answered'])) or 'no'} requests with top_k and top_p "
            f"over flat rows, but not {served['stopped']}: no answer in {served['seconds']:.0f} s. Its scheduler "
            "stood at:",
            "",
            *("    " + line for line in served["where"] if line.startswith("File")),
            "",
        ]
    elif "answered" in served:
        section.lines += ["Stock DFLASH, asked last, answered top_k with top_p over flat rows at every batch size.", ""]


def renorm(document: dict) -> Section:
    result = document["result"]
    stopped = result["did not end"]
    section = opened(
        "renorm",
        document,
        f"`top_p_renorm_prob` of the release, alone, on {result['rows']} rows of {result['columns']} probabilities "
        f"with top_p {result['top_p']}, as top-k leaves them of normal logits with a given standard deviation, rounded "
        f"to bfloat16. It ended at {', '.join(f'{spread:g}' for spread in result['ended']) or 'none'}"
        + ("." if stopped is None else f"; at {stopped:g} it did not, in the {result['seconds']:.0f} s of its process.")
        + " Stock DFLASH calls it for requests with both top_k and top_p; the patched release does not.",
    )
    if stopped is not None:
        section.found = f"its kernel does not end on rows with a spread of {stopped:g}"
    return section


def _ratios(result: dict) -> list[str]:
    """Greedy steps in milliseconds, and what the ways to sample take over them."""
    found = {
        (name, row["batch"], row["mode"]): row
        for name, of_server in result.items()
        if isinstance(of_server, dict)
        for row in of_server.get("steps", [])
    }
    modes = dict.fromkeys(mode for _, _, mode in found if mode.startswith("T=1"))
    rows = []
    for name, batch in dict.fromkeys((name, batch) for name, batch, _ in found):
        steps = {(b, mode): row for (server, b, mode), row in found.items() if server == name}
        found_of = ((batch, mode) in steps and _over_greedy(steps, batch, mode) for mode in modes)
        ratios = ("{:.3f} ± {:.3f}".format(*ratio) if ratio else "" for ratio in found_of)
        rows.append((name, batch, f"{steps[batch, 'T=0']['step_ms']:.2f}", *ratios))
    return table(("server", "batch", "T=0, ms", *modes), rows)


def _over_greedy(steps: dict, batch: int, mode: str) -> tuple[float, float]:
    """Of the ratios to the greedy step of the same round and the same bias: the median over rounds, and its standard
    error, from the median absolute deviation, since a round that a host's other work fell into tells nothing."""
    greedy = steps[batch, "T=0, peaked" if mode.endswith("peaked") else "T=0"]["rounds_ms"]
    ratios = [a / b for a, b in zip(steps[batch, mode]["rounds_ms"], greedy, strict=False)]
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    return middle, 1.2533 * deviation / math.sqrt(len(ratios))


def _parts(section: Section, result: dict, servers: list[str]) -> None:
    section.lines += [
        "Parts of a step, medians in milliseconds: on the GPU from the first kernel to the last, waiting for the host "
        "included (CUDA events), and in brackets the host's own time. These are other steps than those above, since "
        "the events cost some microseconds. Parts nest: `draft candidates` holds `draft head` and `draft top-k`; "
        "`slots and mask` holds `slots` and `mask`; `decide` holds `target probabilities` and `walk`.",
        "",
    ]
    for name in servers:
        rows = [row for row in result[name]["parts"] if row["mode"] in ("T=0", "T=1", "T=1 top_k top_p")]
        parts = list(dict.fromkeys(part for row in rows for part in row["parts"]))
        header = (name, *(f"{row['batch']}, {row['mode']}" for row in rows))
        section.lines += table(header, [(part, *(_part(row["parts"].get(part)) for row in rows)) for part in parts])
        if name == "ddtree":
            for row in rows:
                found = row["parts"]
                if row["mode"] == "T=0" and {"build", "mask"} <= set(found) and found["build"]["gpu_ms"] is not None:
                    us = 1e3 * (found["build"]["gpu_ms"] + found["mask"]["gpu_ms"])
                    section.rows.append(
                        (
                            f"build + compile, batch {row['batch']}, budget {result['budget']}",
                            f"{row['n']} steps",
                            "<= 120 us for a batch up to 32 at budget 64",
                            f"{us:.0f} us",
                            us <= 120,
                        )
                    )
        syncs = result[name]["syncs_before_commit"]
        if name == "ddtree" and "dflash" in servers:
            places = sorted({place for found in syncs.values() for place in found})
            own = {place for found in result["dflash"]["syncs_before_commit"].values() for place in found}
            section.rows.append(
                (
                    "where the host waits for the GPU before the commit: ddtree",
                    f"{len(syncs)} modes",
                    "nowhere but where the chain's draft does, too",
                    ", ".join(place.rpartition("/")[2] for place in places) or "nowhere",
                    own.issuperset(places),
                )
            )
        if syncs:
            until = "before the commit" if name == "ddtree" else "in the whole step"
            section.lines += [f"{name}: where the host waits for the GPU {until}, times a step:", ""]
            section.lines += table(
                ("mode", "place", "times"), [(m, p, f"{n:.1f}") for m, found in syncs.items() for p, n in found.items()]
            )


def _part(found: dict | None) -> str:
    if found is None:
        return ""
    gpu = "" if found["gpu_ms"] is None else f"{found['gpu_ms']:.3f} "
    return f"{gpu}({found['host_ms']:.3f})"


def _first_use(section: Section, result: dict, servers: list[str]) -> None:
    firsts = [result[name]["first_use_s"] for name in servers]
    modes = list(firsts[0]) if servers else []
    section.lines += ["Seconds to the answer of a combination's first request after start, and of its second:", ""]
    rows = [
        (mode, *("{:.2f}, {:.2f}".format(*found[mode][:2]) if mode in found else "" for found in firsts))
        for mode in modes
    ]
    section.lines += table(("first use", *servers), rows)
    if "ddtree" in servers:
        stalls = {m: times[0] - min(times[1:]) for m, times in result["ddtree"]["first_use_s"].items()}
        worst = max(stalls, key=stalls.get)
        section.rows.append(
            (
                "no first-use stall",
                f"{len(stalls)} combinations",
                "< 1 s",
                f"{stalls[worst]:.2f} s ({worst})",
                stalls[worst] < 1,
            )
        )
