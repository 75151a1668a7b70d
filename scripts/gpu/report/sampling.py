"""Sections on what is emitted: the op, greedy texts, sampled texts."""

import re
import statistics

from scipy import stats

from scripts.gpu.report.documents import Section, failed_steps, opened, rows_of, table, verdict

LEAST_P = 0.001  # divided by the number of tests
NEAR_TIE = 0.3  # nats: logits of 16 to 32 are multiples of 0.125 in bfloat16
MUST_BE_REJECTED = "tree-loose"


def op(document: dict) -> Section:
    result = document["result"]
    covered = [line.removeprefix("covered: ") for line in result.get("covered", [])]
    trees = sum(int(re.match(r"\d+", line)[0]) for line in covered)
    section = opened(
        "op",
        document,
        "`tests/gpu` compares the op's `predicts`, `accept_index` and `accept_token_num` bit for bit with the "
        "reference walk that `verify` ships. The calls include coins of 0 and 1, children without mass, and an S below "
        "the tree's depth, where the walk stops at S nodes and draws the last token from the whole row. The known "
        "traps are there too: a coin of 0 accepts a child without mass, dirty scratch is subtracted from every token, "
        "a NaN row gives the last id of the vocabulary, and a final coin of 1 gives the last token that has mass.",
    )
    section.lines += [*(f"- {line}" for line in covered), ""]
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) tests/gpu/(\w+)\.py", result["output"], re.MULTILINE)
    for name, what, n in (
        ("test_kernel_op", "op = reference walk", f"{trees or 10_000:,} trees"),
        ("test_target_probs", "the target distribution's kernel = the sampler's rules", ""),
        ("test_tree_kernels", "the tree's kernels = torch, bit for bit", ""),
    ):
        of_file = [outcome for outcome, file in outcomes if file == name]
        good = of_file.count("PASSED")
        section.rows.append(
            (
                what,
                n,
                "every test",
                f"{good} of {len(of_file)} tests" if of_file else "not run",
                good == len(of_file) > 0,
            )
        )
    section.found = f"{trees or 10_000:,} trees equal, bit for bit"
    if not covered:
        section.missing.append("the op at N above 17 and vocabularies above 320")
    return section


def greedy(document: dict) -> Section:
    section = opened(
        "greedy",
        document,
        "Every server's texts at T 0 against plain decoding's, with CUDA graphs. The yardstick is stock DFLASH against "
        "plain decoding on the stock release: the shape of a batch alone flips near-ties in bfloat16, so plain "
        "decoding differs from itself between batches. The margin is the difference, in nats, between the two best "
        "tokens that plain decoding sees where two texts part.",
    )
    rows = rows_of(document)
    shown = []
    for row in rows:
        margins = [parted["margin"] for parted in row["parted"]]
        texts_of = f"{row['prompts']} x {row['tokens']}"
        where = ("", "", "")
        if margins:
            place = statistics.median(parted["at"] for parted in row["parted"])
            where = (f"{place:.0f}", f"{statistics.median(margins):.3f}", f"{max(margins):.3f}")
        shown.append((row["server"], row["against"], row["batch"], texts_of, row["differing"], *where))
    section.lines += table(
        ("server", "against", "batch", "prompts x tokens", "differ", "median place", "median margin", "largest margin"),
        shown,
    )
    by = {(row["server"], row["against"], row["batch"]): row for row in rows}
    for batch in (1, 4, 16):
        yardstick = by.get(("dflash-stock", "plain", batch))
        if yardstick is None:
            section.missing.append(f"greedy texts at batch {batch}")
            continue
        for server in ("tree", "chain"):
            row = by[server, "plain", batch]
            counts = [(r["differing"], r["prompts"] - r["differing"]) for r in (row, yardstick)]
            p = float(stats.fisher_exact(counts, alternative="greater").pvalue)
            largest = max((parted["margin"] for parted in row["parted"]), default=0.0)
            passed = p > 0.01 and largest < NEAR_TIE
            section.rows.append(
                (
                    f"greedy: {server}, batch {batch}",
                    f"{row['prompts']} x {row['tokens']}",
                    f"no more differ than of stock DFLASH (Fisher p > 0.01); margins < {NEAR_TIE}",
                    f"{row['differing']} against {yardstick['differing']}, p {p:.2g}, margin <= {largest:.3f}",
                    passed,
                )
            )
    of_tree, of_stock = (
        [r for (s, a, _), r in by.items() if (s, a) == (name, "plain")] for name in ("tree", "dflash-stock")
    )
    largest = max((parted["margin"] for row in of_tree for parted in row["parted"]), default=0.0)
    section.found = (
        f"of {of_tree[0]['prompts']} texts {_span(of_tree)} part from plain decoding's (of stock DFLASH's "
        f"{_span(of_stock)}), at near-ties: margin <= {largest:.3f} nats"
    )
    section.lines += [f"- failed: {line}" for line in failed_steps(document["result"])]
    return section


def _span(rows: list[dict]) -> str:
    counts = [row["differing"] for row in rows]
    return f"{min(counts)} to {max(counts)}"


def exact(document: dict, *earlier: dict) -> Section:
    """`earlier`: runs before this one. What this one lacks is taken from the newest that has it."""
    section = opened(
        "exact",
        document,
        "The trained pair of `tests/models`, with CUDA graphs, triton attention and the pytorch sampling backend. The "
        "first three tokens after a prompt, each server against plain decoding on the stock release: a two-sample "
        "chi-square over the texts, rare ones pooled. `tree` decides by the op, `tree-follow` by sample-and-follow. "
        "`tree-loose` runs with `--speculative-accept-threshold-acc 0.5`, which biases it, and must be rejected.",
    )
    section.lines += [
        "Plain decoding keeps a token within two bfloat16 steps of a cut in one run and drops it in the next, because "
        "the shapes of its batches differ. The target's logits alone say which tokens these are "
        "(`scripts/gpu/rounding.py`, float32). Cells that have such tokens are decided by the next tokens given those "
        "before, without the doubtful ones and what follows them (`scripts/gpu/decided.py`). Whole texts decide the "
        "other cells.",
        "",
    ]
    runs = [document, *earlier]
    rows: dict[tuple, dict] = {}
    for run in reversed(runs):
        rows |= {(row["server"], row["T"], row["cell"]): row | {"date": run["date"]} for row in rows_of(run)}
    tests = sum(row["server"] != MUST_BE_REJECTED for row in rows.values())
    least = LEAST_P / max(tests, 1)
    shown, passed_all, rejected, worst = [], True, None, 1.0
    for row in rows.values():
        doubtful, decided = _share_of_doubtful(row), row.get("decided")
        p = decided["p"] if doubtful else row["p"]
        passed = p > least and row.get("greedy_equal", True)
        if row["server"] == MUST_BE_REJECTED:
            rejected = not passed
            said = "rejected, as it must be" if rejected else "not rejected: FAILED"
        else:
            passed_all &= passed
            worst = min(worst, p)
            said = verdict(passed) + ("; greedy rows greedy" if row.get("greedy_equal") else "")
        if row["date"] != document["date"]:
            said += f"; of {row['date']}"
        shown.append(
            (
                row["server"],
                row["T"],
                row["cell"],
                row["n"],
                f"{row['p']:.2g}",
                f"{doubtful:.2%}" if doubtful else "",
                f"{decided['p']:.2g}" if decided else "",
                said,
            )
        )
    section.lines += [f"Threshold: p > {least:.1e} (0.001, Bonferroni over the {tests} tests).", ""]
    section.lines += table(
        ("server", "T", "cell", "n", "p, whole texts", "doubtful", "p, next tokens where decided", ""), shown
    )
    section.rows.append(
        (
            "sampling is exact, first 3 tokens",
            f"{tests} tests x {min((r['n'] for r in rows.values()), default=0):,}",
            f"p > {least:.1e}",
            f"least p {worst:.2g}",
            passed_all and bool(tests),
        )
    )
    section.found = f"{tests} comparisons, least p {worst:.2g}, threshold {least:.1e}"
    if rejected is not None:
        section.found += "; a biased sampler is " + ("rejected" if rejected else "NOT rejected")
        found = "rejected" if rejected else "not"
        section.rows.append(("the harness rejects threshold-acc 0.5", "", f"p <= {least:.1e}", found, rejected))
    have = {(float(row["T"]), row["cell"]) for row in rows.values() if row["server"] == "tree"}
    cells = ("plain", "top_p 0.9", "top_k 20", "min_p 0.05", "top_k 20, top_p 0.9", "mixed with greedy")
    section.missing += [f"sampling at T = {t}, {c}" for t in (0.6, 1.0) for c in cells if (t, c) not in have]
    section.lines += [f"- failed: {line}" for line in failed_steps(document["result"])]
    section.lines += _whole_texts(runs)
    return section


def _share_of_doubtful(row: dict) -> float:
    return sum(share for _, _, share in row.get("decided", {}).get("doubtful", []))


def _whole_texts(runs: list[dict]) -> list[str]:
    """Of every run, newest first: the p-values of whole texts, to see plain decoding change sides."""
    by_run = [{(row["T"], row["cell"], row["server"]): row["p"] for row in rows_of(run)} for run in runs]
    keys = sorted({key for found in by_run for key in found})
    lines = ["p-values of whole texts in all runs:", ""]
    rows = [(*key, *(f"{found[key]:.2g}" if key in found else "" for found in by_run)) for key in keys]
    return lines + table(("T", "cell", "server", *(run["date"][:16] for run in runs)), rows)


def texts(document: dict) -> Section:
    rows = rows_of(document)
    tested = [row for row in rows if row["server"] != MUST_BE_REJECTED]
    least = LEAST_P / max(3 * len(tested), 1)
    section = opened(
        "texts",
        document,
        "Can anything tell a server's texts from plain decoding's? Three tests try: a classifier on byte n-grams "
        "(5-fold), the length of the first line (chi-square), and the counts of all bigrams (permutations of whole "
        "texts). At least one of them must tell `tree-loose` apart. "
        f"Threshold: p > {least:.1e} (0.001, Bonferroni over the {3 * len(tested)} tests).",
    )
    shown = []
    for row in rows:
        ps = [row[test]["p"] for test in ("classifier", "first_line", "bigrams")]
        passed = min(ps) > least
        loose = row["server"] == MUST_BE_REJECTED
        # The exchanges cannot give less than one in their number.
        told = min(ps[:2]) <= least or row["bigrams"]["p"] < LEAST_P
        said = ("told apart, as it must be" if told else "not told apart: FAILED") if loose else verdict(passed)
        shown.append(
            (
                row["server"],
                row["T"],
                f"2 x {row['n']} x {row['tokens']}",
                f"{row['classifier']['accuracy']:.3f}",
                *(f"{p:.2g}" for p in ps),
                said,
            )
        )
        section.rows.append(
            (
                f"whole texts: {row['server']}, T {row['T']}",
                f"2 x {row['n']}",
                "told apart" if loose else f"p > {least:.1e}",
                f"least p {min(ps):.2g}",
                told if loose else passed,
            )
        )
    worst = min(min(row[test]["p"] for test in ("classifier", "first_line", "bigrams")) for row in tested)
    told = all(row[4] for row in section.rows if row[2] == "told apart")
    section.found = f"{3 * len(tested)} tests, least p {worst:.2g}, threshold {least:.1e}; a biased sampler is "
    section.found += "told apart" if told else "NOT told apart"
    section.missing += [f"whole texts at T = {t}" for t in (0.6, 1.0) if not any(row["T"] == t for row in rows)]
    section.lines += table(
        ("server", "T", "n x tokens", "accuracy", "p classifier", "p first line", "p bigrams", ""), shown
    )
    section.lines += [f"- failed: {line}" for line in failed_steps(document["result"])]
    return section


def cuts(document: dict) -> Section:
    rows = [
        {"type": name.split(",")[0]} | row
        for name, found in document["result"].items()
        if isinstance(found, list)
        for row in found
    ]
    decided = [row for row in rows if row["type"] == "float16" or row["cell"] == "min_p 0.15"]
    least = LEAST_P / max(len(decided), 1)
    section = opened(
        "cuts",
        document,
        "T 0.6. Samples must not differ in float16, nor in bfloat16 at a cut that no token is near: "
        f"p > {least:.1e} (0.001, Bonferroni). In bfloat16 with min_p 0.05 the token `m` after `i` is within two steps "
        "of the cut; plain decoding with at most 16 requests a batch against 64 shows what that alone does. The last "
        "but one column has the texts that differ most, with their counts on both sides.",
    )
    shown = []
    for row in rows:
        judged = row in decided
        furthest = "; ".join(
            f"{''.join(chr(i - 4) for i in text if i >= 4)!r} {one} and {other}"
            for text, one, other in row["furthest"][:3]
        )
        shown.append(
            (
                row["type"],
                row["cell"],
                row["server"],
                row["against"],
                row["n"],
                f"{row['chi2']:.0f}",
                f"{row['p']:.2g}",
                furthest,
                verdict(row["p"] > least) if judged else "shown",
            )
        )
        if judged:
            section.rows.append(
                (
                    f"sampling, {row['type']}, {row['cell']}: {row['server']}",
                    f"{row['n']:,}",
                    f"p > {least:.1e}",
                    f"{row['p']:.2g}",
                    row["p"] > least,
                )
            )
    section.found = (
        f"in float16, and in bfloat16 away from the cut, least p {min(row['p'] for row in decided):.2g}, "
        f"threshold {least:.1e}"
    )
    section.lines += table(("type", "cell", "server", "against", "n", "chi2", "p", "furthest apart", ""), shown)
    section.lines += [f"- failed: {line}" for line in failed_steps(document["result"])]
    return section
