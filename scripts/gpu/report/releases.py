"""docs/gpu-releases.md, from docs/gpu/releases: what each release after 0.5.11 has shown on a GPU.

python3 -m scripts.gpu.report.releases
"""

import json

from scripts.gpu.cells import CELLS
from scripts.gpu.fleet import ROOT
from scripts.gpu.report.documents import table

FOLDER = ROOT / "docs/gpu/releases"
PAGE = ROOT / "docs/gpu-releases.md"
SERVERS = ("plain", "dflash", "tree 15", "tree 32")
GOAL = 1.25  # tree over stock DFLASH, tokens per second, batch 1 and 4
HEAD = """# Releases after 0.5.11, measured on a GPU

Written by `python3 -m scripts.gpu.report.releases` from `docs/gpu/releases/*.json`, which hold command, versions and
all figures. 0.5.11 has [a page of its own](gpu-results.md). Each release ran from its own wheel, patched by
`ddtree-patch apply`.
"""
TOKENS = """
The trained byte-level pair `tests/models/tiny-b16` (block 16) in the shape of Qwen3-8B: the texts and the acceptance of
the small pair at the cost of an 8B. Whole servers, one GPU, asked in turns; {prompt} prompt tokens, {tokens} generated;
medians of {rounds} rounds, least and most in brackets. All on triton attention. Bold: the most of a row.
"""


def load() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


def newest(experiment: str) -> dict:
    """The newest document of an experiment, of whatever release."""
    return max((one for one in load() if one["experiment"] == experiment), key=lambda one: one["date"])


def medians(document: dict) -> list[str]:
    """Tokens per second of a `tokens` document as a table: medians alone."""
    rows = []
    for batch, mode, by in _by_row(document):
        best = max(by, key=lambda server: by[server]["per_second"])
        cells = [f"{by[name]['per_second']:.0f}" for name in SERVERS]
        cells = [f"**{cell}**" if name == best else cell for name, cell in zip(SERVERS, cells, strict=True)]
        rows.append((batch, mode, *cells, *(f"{by[name]['over_dflash']:.2f}" for name in ("tree 15", "tree 32"))))
    head = ("batch", "sampling", "plain", "stock DFLASH", "DDTREE 15", "DDTREE 32", "15 / DFLASH", "32 / DFLASH")
    return table(head, rows)


def ratios(document: dict) -> dict[str, str]:
    """{"ratio_BUDGET_BATCH": "least to most of tree over stock DFLASH"}, tokens per second, over the ways to sample."""
    found: dict[str, list[float]] = {}
    for batch, _, by in _by_row(document):
        for server in ("tree 15", "tree 32"):
            found.setdefault(f"ratio_{server.split()[1]}_{batch}", []).append(by[server]["over_dflash"])
    return {name: f"{min(all_of):.2f} to {max(all_of):.2f}" for name, all_of in found.items()}


def spread(document: dict) -> float:
    """The largest distance between the rounds of one cell, as a share of its median."""
    rows = document["result"]["summary"]
    return max((row["most"] - row["least"]) / row["per_second"] for row in rows if row["server"] in SERVERS)


def _by_row(document: dict) -> list[tuple[int, str, dict]]:
    """[(batch, way to sample, {server: its figures})], in the order in which they were measured."""
    rows = document["result"]["summary"]
    by: dict[tuple[int, str], dict] = {}
    for row in rows:
        by.setdefault((row["batch"], row["mode"]), {})[row["server"]] = row
    return [(batch, mode, of_row) for (batch, mode), of_row in by.items()]


def measured(document: dict) -> str:
    host = document["host"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items() if name != "transformers")
    return f"{document['date'][:10]}, {'; '.join(host['gpus'])}, {versions}. `{document['command']}`"


def tokens(document: dict) -> list[str]:
    result = document["result"]
    rows = result["summary"]
    servers = ("plain", "dflash", "tree 32", "tree 15")
    by = {(row["batch"], row["mode"], row["server"]): row for row in rows}
    shown = []
    for batch, mode in dict.fromkeys((row["batch"], row["mode"]) for row in rows):
        some = {server: by[batch, mode, server] for server in servers}
        best = max(some, key=lambda server: some[server]["per_second"])
        cells = []
        for server, row in some.items():
            speed = f"{row['per_second']:.0f}"
            speed = f"**{speed}**" if server == best else speed
            spread = f"{row['least']:.0f} to {row['most']:.0f}"
            cells.append(f"{speed} ({spread}; {row['accept_length']:.2f}; {row['step_ms']:.1f} ms)")
        shown.append((batch, mode, *cells, f"{some['tree 32']['over_dflash']:.2f}"))
    small = [(by[b, m, "tree 32"], by[b, m, "dflash"]) for b, m in dict.fromkeys(row[:2] for row in shown) if b < 16]
    ratios = [f"{tree['accept_length'] / chain['accept_length']:.2f}" for tree, chain in small]
    longer = [tree["step_ms"] / chain["step_ms"] - 1 for tree, chain in small]
    met = sum(float(row[-1]) >= GOAL for row in shown if row[0] in (1, 4))
    of = sum(row[0] in (1, 4) for row in shown)
    head = ("batch", "sampling", "plain", "stock DFLASH", "DDTREE 32", "DDTREE 15", "32 / DFLASH")
    said = TOKENS.format(prompt=result["prompt_tokens"], tokens=result["tokens"], rounds=max(r["rounds"] for r in rows))
    goal = f"Goal at batch 1 and 4: {GOAL} times stock DFLASH. Met in {met} of {of} rows."
    given_up = [f"Not measured: {name.partition('-')[2]} (did not start)." for name in result["given up"]]
    return [
        f"## Tokens per second, {document['release']}",
        said,
        "In brackets also tokens a step and milliseconds a step. 32 / DFLASH: the median of the rounds' ratios.",
        "",
        *table(head, shown),
        "",
        " ".join([goal, *given_up]),
        "",
        f"What bounds it is acceptance: tree over chain, tokens a step, is {', '.join(ratios)} in these rows, and a "
        f"step of the tree takes {min(longer):.0%} to {max(longer):.0%} longer.",
        "",
        measured(document),
        "",
    ]


def exact(document: dict) -> list[str]:
    found = document["result"]
    rows = [row for name, step in found.items() if name.startswith("T ") for row in step]
    shown = []
    for row in rows:
        decided = (row.get("decided") or {}).get("p")
        where = "" if decided is None else f"{decided:.2g}"
        shown.append((row["server"], row["T"], row["cell"], row["n"], f"{row['chi2']:.0f}", f"{row['p']:.2g}", where))
    head = ("server", "T", "cell", "n a side", "chi-square", "p", "p where rounding does not decide")
    return [
        f"## Sampling is exact, {document['release']}",
        "",
        "The first three tokens against plain decoding's. tree: by the kernel; tree-follow: without it; dflash: the "
        "chain, patched; tree-loose accepts too much on purpose (threshold-acc 0.5) and has to be rejected. Where a "
        "token lies within two bfloat16 steps of a cut, plain decoding itself changes sides from run to run: the last "
        "column leaves those out.",
        "",
        *table(head, shown),
        "",
        measured(document),
        "",
    ]


def greedy(document: dict) -> list[str]:
    rows = [row for step in document["result"].values() if isinstance(step, list) for row in step]
    shown = [
        (row["server"], row["against"], row["batch"], f"{row['differing']} of {row['prompts']}", _margin(row))
        for row in rows
    ]
    head = ("server", "against", "batch", "texts that differ", "largest margin")
    return [
        f"## Greedy texts, {document['release']}",
        "",
        "Margin: nats between the two best tokens where two texts part; rounding flips up to 0.3.",
        "",
        *table(head, shown),
        "",
        measured(document),
        "",
    ]


def long_run(document: dict) -> list[str]:
    load = document["result"]["load"]
    head = ("server", "steps", "tokens", "taken back", "wrong answers", "KV in use afterwards", "memory growth")
    shown = [
        (
            row["server"],
            row["batch_steps"],
            row["tokens"],
            row["retractions"],
            row["wrong_count"],
            row["after"].get("num_used_tokens"),
            f"{row['memory_mib']['growth']:.0f} MiB",
        )
        for row in load["rows"]
    ]
    verdict = "passed" if document["result"]["passed"] else "failed"
    return [
        f"## Long and mixed, {document['release']}",
        "",
        f"Clients of all kinds, {load['batch_steps']:,} steps of batches: {verdict}.",
        "",
        *table(head, shown),
        "",
        measured(document),
        "",
    ]


def cells(documents: list[dict]) -> list[str]:
    shown = []
    for document in documents:
        result = document["result"]
        failed = [name for name, start in result["start"].items() if not isinstance(start, float)]
        if failed:
            last = result["start"][failed[0]].strip().split("\n")[-1]
            shown.append((document["release"], f"none started: `{last}`", "", *[""] * 4))
            continue
        tree = next(row for row in result["greedy"] if row["server"] == "tree")
        stock = next(row for row in result["greedy"] if row["server"] == "dflash-stock")
        ps = [f"{result[name][0]['p']:.2g}" if name in result else "not reached" for name in CELLS]
        texts = f"{tree['differing']} of {tree['prompts']}, {_margin(tree)}"
        shown.append((document["release"], texts, f"{stock['differing']}, {_margin(stock)}", *ps))
    names = [name for name in documents[0]["result"] if name.startswith("T ")]
    head = ("release", "tree and plain differ", "stock DFLASH and plain", *names)
    lines = ["## Does it serve? Greedy texts and four ways to sample", ""]
    lines += ["Of texts: how many differ and the largest margin. Of sampling: p of 10,000 samples a side.", ""]
    lines += [*table(head, shown), ""]
    return lines + [f"- {document['release']}: {measured(document)}" for document in documents] + [""]


def _margin(row: dict) -> str:
    return f"{max((parted['margin'] for parted in row['parted']), default=0):.3f}"


NOT_RUN = """## Not run

- 0.5.14, 0.5.15 and 0.5.15.post1 on a GPU; the last cells of 0.5.22 and 0.5.23 (the host's time was up).
- Tensor parallel 2 on GPUs with any release after 0.5.11: no second GPU was to be had. On a CPU two ranks of 0.5.17
  committed the same path in each of 298 steps, and texts and samples were those of one rank
  (`python3 -m scripts.gpu.run --release 0.5.17 --rehearsal tp2`).
- DFLASH and DDTREE beside flashinfer attention.
- The releases from 0.5.18 on pin a newer torch than the host has; they ran with sglang-kernel 0.4.5, and those from
  0.5.21 on with `SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python`, since their compiled radix tree cannot read that
  torch's tensors.
- Of 0.5.16 and 0.5.18, and of all but the last section of 0.5.17, the text that ran lacks one hunk of today's series:
  `is_ddtree` for algorithms of plugins.
"""


def main() -> None:
    documents = load()
    of = {name: [d for d in documents if d["experiment"] == name] for name in {d["experiment"] for d in documents}}
    lines = [HEAD]
    for name, section in (("tokens", tokens), ("exact", exact), ("greedy", greedy), ("long", long_run)):
        for document in of.get(name, []):
            lines += section(document)
    lines += cells(of["cells"])
    PAGE.write_text("\n".join([*lines, NOT_RUN]))


if __name__ == "__main__":
    main()
