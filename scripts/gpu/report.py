"""Write docs/gpu-results.md from the JSON files in docs/gpu: python3 -m scripts.gpu.report"""

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOT_RUN = (
    "greedy texts on the GPU over 100 prompts and batches of 1, 4 and 16",
    "sampling at T = 0.6 and whole 32-token texts",
    "acceptance over budgets and candidates",
    "the cost of a step on an 8B shape",
    "tensor parallel 2",
    "an MLA + MoE target",
    "long runs with requests joining and leaving, up to the context limit",
    "the whole tool (apply, restart, smoke suite, revert) on a GPU host",
)


def main() -> None:
    op = _load("op-h200-2026-11-29")
    exact = _load("exact-h200-2026-11-29")
    lines = [
        "# Measured on a GPU",
        "",
        "Written by `python3 -m scripts.gpu.report` from the JSON files in `docs/gpu`, which hold date, "
        "versions and command.",
        "",
        "## The op against the reference walk",
        "",
        _on(op),
        "",
        "`tests/gpu/test_kernel_op.py`: 10,000 random trees, `predicts`, `accept_index` and "
        "`accept_token_num` equal bit for bit; "
        "the traps (coin 0, dirty scratch, NaN, last coin 1) behave as known: "
        + ("passed." if op["result"]["pytest_exit"] == 0 else "FAILED."),
        "",
        "A final coin of 1 gives the last token that has mass, not the last id of the vocabulary; that id "
        "comes only when nothing has mass.",
        "",
        "## Sampling is exact",
        "",
        _on(exact),
        "",
        "The trained pair of `tests/models`, CUDA graphs, triton attention, pytorch sampling backend. First "
        "three tokens after a prompt, "
        "each server against plain decoding on the stock release, two-sample chi-square over the texts (rare "
        "ones pooled). `tree` decides "
        "by the op, `tree-follow` by sample-and-follow; `tree-loose` runs with "
        "`--speculative-accept-threshold-acc 0.5` and must be rejected.",
        "",
    ]
    rows = [
        row
        for name, found in exact["result"].items()
        if isinstance(found, list)
        for row in found
        if name.startswith(("T ", "mixed"))
    ]
    tested = sum(row["server"] != "tree-loose" for row in rows)
    lines += [
        f"Threshold: p > {0.001 / tested:.1e} (0.001, Bonferroni over the {tested} tests).",
        "",
        "| server | T | cell | n | categories | chi2 | p | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        passed = row["p"] > 0.001 / tested and row.get("greedy_equal", True)
        verdict = (
            ("not rejected: FAILED" if passed else "rejected, as it must be")
            if row["server"] == "tree-loose"
            else ("passed" if passed else "FAILED")
        )
        extra = "; greedy rows greedy" if row.get("greedy_equal") else ""
        lines.append(
            f"| {row['server']} | {row['T']} | {row['cell']} | {row['n']} | {row['categories']} | {row['chi2']:.0f} "
            f"| {row['p']:.2g} | {verdict}{extra} |"
        )
    lines += [
        "",
        "## Acceptance",
        "",
        "Same servers, 64 prompts of Python source, 192 tokens each; tokens per verify step, all steps "
        "pooled (± the standard error over "
        "prompts). `chain` is DDTREE with topk 1 and budget 7, the pair's block less one; `tree` has budget "
        "32, topk 8.",
        "",
        "| T | DFLASH stock | DFLASH patched | chain | tree | tree / DFLASH stock |",
        "|---|---|---|---|---|---|",
    ]
    chain = exact["result"]["chain"]["rows"]
    for temperature in sorted({row["T"] for row in chain}):
        by = {row["server"]: row for row in chain if row["T"] == temperature}
        cells = [
            f"{by[n]['accept_length']:.2f} ± {by[n]['standard_error']:.2f}"
            for n in ("dflash-stock", "dflash", "chain", "tree")
        ]
        ratio = by["tree"]["accept_length"] / by["dflash-stock"]["accept_length"]
        lines.append(f"| {temperature} | " + " | ".join(cells) + f" | {ratio:.2f} |")
    lines += ["", "## Not run", "", *(f"- {what}" for what in NOT_RUN), ""]
    (DOCS / "gpu-results.md").write_text("\n".join(lines))


def _load(name: str) -> dict:
    return json.loads((DOCS / "gpu" / f"{name}.json").read_text())


def _on(document: dict) -> str:
    host, versions = document["host"], document["host"]["versions"]
    return (
        f"{document['date'][:10]}, {', '.join(host['gpus'])}, Python {host['python']}, torch {versions['torch']}, "
        f"SGLang 0.5.11, sglang-kernel 0.4.2. `{document['command']}`"
    )


if __name__ == "__main__":
    main()
