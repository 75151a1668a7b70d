"""docs/gpu-releases.md, from docs/gpu/releases: what each release after 0.5.11 has shown on a GPU.

python3 -m scripts.gpu.report.releases
"""

import json

from scripts.gpu.cells import CELLS
from scripts.gpu.fleet import ROOT
from scripts.gpu.report.documents import table

FOLDER = ROOT / "docs/gpu/releases"
PAGE = ROOT / "docs/gpu-releases.md"
NAMES = {
    "plain": "plain",
    "dflash": "stock DFLASH, triton",
    "dflash flashinfer": "stock DFLASH",
    "tree": "DDTREE",
    "tree narrow": "DDTREE, narrower",
}
# Requests at a time from which on the default has the width of "tree narrow".
NARROW_FROM = 33
HEAD = """# Releases after 0.5.11, measured on a GPU

Written by `python3 -m scripts.gpu.report.releases` from `docs/gpu/releases/*.json`, which hold command, versions and
all figures. 0.5.11 has [a page of its own](gpu-results.md). Each release ran from its own wheel, patched by
`ddtree-patch apply`.
"""
TOKENS = """
The trained byte-level pair `tests/models/tiny-b16` (block 16) in the shape of Qwen3-8B: the texts and the acceptance of
the small pair at the cost of an 8B. Whole servers, one GPU, asked in turns; {tokens} tokens generated; medians of
{rounds} rounds, least and most in brackets, then tokens a step and milliseconds a step. All on flashinfer; DDTREE's own
attention verifies and drafts. DDTREE verifies 32 nodes up to 8 requests at a time, 16 up to 32, 8 up to 64, 4 beyond;
the narrower one 32, 8, 4 and the root alone. The default takes the wider up to 16 requests and the narrower from 33 on.
Bold: the most of a row. Last column: the default over the better of plain decoding and stock DFLASH, medians of rounds.
"""


def load() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


def newest(experiment: str) -> dict:
    """The newest document of an experiment, of whatever release."""
    return max((one for one in load() if one["experiment"] == experiment), key=lambda one: one["date"])


def medians(document: dict) -> list[str]:
    """Tokens per second of a `tokens` document as a table: medians alone, and the default's widths only."""
    rows = []
    for prefix, batch, mode, by in _by_row(document):
        some = {"plain": by["plain"], "dflash": by["dflash flashinfer"], "tree": default(by, batch)}
        best = max(some, key=lambda server: some[server]["per_second"])
        cells = [f"{row['per_second']:.0f}" for row in some.values()]
        cells = [f"**{cell}**" if name == best else cell for name, cell in zip(some, cells, strict=True)]
        steps = " / ".join(f"{row['step_ms']:.1f}" for row in some.values())
        rows.append((f"{prefix:,}", batch, mode, *cells, f"{over_best(some['tree']):.2f}", steps))
    head = ("prefix", "batch", "sampling", "plain", "stock DFLASH", "DDTREE", "over the better", "ms a step of each")
    return table(head, rows)


def default(by: dict, batch: int) -> dict:
    """Of a row's servers the one that has the default's width for so many requests."""
    return by["tree narrow" if batch >= NARROW_FROM else "tree"]


def over_best(row: dict) -> float:
    """Tokens per second over those of the best stock server: medians of the rounds' ratios."""
    return min(row["over"][other] for other in ("plain", "dflash flashinfer"))


def ratios(document: dict) -> dict[str, str]:
    """{"ratio_PREFIX_BATCH": "least to most of the default over the better stock server"} over the ways to sample."""
    found: dict[str, list[float]] = {}
    for prefix, batch, _, by in _by_row(document):
        found.setdefault(f"ratio_{prefix}_{batch}", []).append(over_best(default(by, batch)))
    return {name: f"{min(all_of):.2f} to {max(all_of):.2f}" for name, all_of in found.items()}


def spread(document: dict) -> float:
    """The largest distance between the rounds of one cell, as a share of its median."""
    return max((row["most"] - row["least"]) / row["per_second"] for row in document["result"]["summary"])


def _by_row(document: dict) -> list[tuple[int, int, str, dict]]:
    """[(prefix, batch, way to sample, {server: its figures})]."""
    by: dict[tuple[int, int, str], dict] = {}
    for row in document["result"]["summary"]:
        by.setdefault((row["prefix"], row["batch"], row["mode"]), {})[row["server"]] = row
    return [(*where, of_row) for where, of_row in by.items()]


def measured(document: dict) -> str:
    host = document["host"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items() if name != "transformers")
    return f"{document['date'][:10]}, {'; '.join(host['gpus'])}, {versions}. `{document['command']}`"


def tokens(document: dict) -> list[str]:
    result = document["result"]
    servers = [name for name in NAMES if any(row["server"] == name for row in result["summary"])]
    shown = []
    for prefix, batch, mode, by in _by_row(document):
        best = max(by, key=lambda server: by[server]["per_second"])
        cells = []
        for server in servers:
            row = by[server]
            speed = f"**{row['per_second']:.0f}**" if server == best else f"{row['per_second']:.0f}"
            spread = f"{row['least']:.0f} to {row['most']:.0f}"
            cells.append(f"{speed} ({spread}; {row['accept_length']:.2f}; {row['step_ms']:.1f} ms)")
        shown.append((f"{prefix:,}", batch, mode, *cells, f"{over_best(default(by, batch)):.2f}"))
    head = ("prefix", "batch", "sampling", *(NAMES[server] for server in servers), "over the better")
    return [
        f"## Tokens per second, {document['release']}",
        TOKENS.format(tokens=result["tokens"], rounds=max(row["rounds"] for row in result["summary"])),
        *table(head, shown),
        "",
        *(f"- {remark}" for remark in document.get("remarks", [])),
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
        stock = next(row for row in result["greedy"] if row["server"] == "dflash-stock")
        for tree in (row for row in result["greedy"] if row["server"].startswith("tree")):
            server = tree["server"]
            ps = [_p(result[name], server) if name in result else "not reached" for name in CELLS]
            texts = f"{tree['differing']} of {tree['prompts']}, {_margin(tree)}"
            release = document["release"] + (", default widths" if server == "tree-auto" else "")
            shown.append((release, texts, f"{stock['differing']}, {_margin(stock)}", *ps))
    names = [name for name in documents[0]["result"] if name.startswith("T ")]
    head = ("release", "tree and plain differ", "stock DFLASH and plain", *names)
    lines = ["## Does it serve? Greedy texts and four ways to sample", ""]
    lines += ["Of texts: how many differ and the largest margin. Of sampling: p of 10,000 samples a side.", ""]
    lines += [*table(head, shown), ""]
    return lines + [f"- {document['release']}: {measured(document)}" for document in documents] + [""]


def _p(rows: list[dict], server: str) -> str:
    return f"{next(row['p'] for row in rows if row['server'] == server):.2g}"


def _margin(row: dict) -> str:
    return f"{max((parted['margin'] for parted in row['parted']), default=0):.3f}"


NOT_RUN = """## Not run

- 0.5.14, 0.5.15 and 0.5.15.post1 on a GPU; the last cells of 0.5.22 and 0.5.23 (the host's time was up).
- Tensor parallel 2 on GPUs with any release after 0.5.11: no second GPU was to be had. On a CPU two ranks of 0.5.17
  committed the same path in each of 298 steps, and texts and samples were those of one rank
  (`python3 -m scripts.gpu.run --release 0.5.17 --rehearsal tp2`).
- With today's text of the series, which verifies and drafts by attention of its own: any release but 0.5.17 on a GPU,
  and of 0.5.17 more than the first two sections' cells and tokens per second. The other sections ran before it.
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
