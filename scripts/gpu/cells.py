"""Does a release serve DDTREE on this host? It starts, greedy texts, and four ways to sample, against plain decoding.

For releases whose other experiments are not run: less of `greedy` and of `exact`, in a few minutes. What keeps a server
from starting is in the result, as the end of its log.
"""

from scripts.gpu.asking import ask, on_all, prompts
from scripts.gpu.exact import cell
from scripts.gpu.fleet import SERVERS as CATALOGUE
from scripts.gpu.fleet import Run
from scripts.gpu.greedy import differences
from scripts.gpu.mla import NEAR_TIE

SERVERS = ("plain", "dflash-stock", "tree", "tree-auto")
BATCH = 8
# At T 0.6 a min-p that no token is near (rounding.py).
CELLS = {
    "T 1.0": (1.0, {}),
    "T 0.6, top_p 0.9": (0.6, {"top_p": 0.9}),
    "T 1.0, top_k 20": (1.0, {"top_k": 20}),
    "T 0.6, min_p 0.15": (0.6, {"min_p": 0.15}),
}


def run(run: Run) -> dict:
    found = {
        "servers": {name: CATALOGUE[name].args for name in SERVERS},
        "thresholds": {"margin where texts part": NEAR_TIE},
        "start": {name: run.given_up.get(name) or run.servers[name][0].ready_after for name in SERVERS},
    }
    samples = run.count(10_000, 200)
    steps = {"greedy": lambda: _greedy(run)} | {
        name: lambda name=name, t=t, more=more: cell(run.ports("plain", "tree", "tree-auto"), t, more, name, samples)
        for name, (t, more) in CELLS.items()
    }
    return run.steps("cells", found, steps)


def _greedy(run: Run) -> list[dict]:
    asked = prompts(run.count(48, 4))
    params = {"temperature": 0, "max_new_tokens": run.count(128, 16), "ignore_eos": True}
    servers = run.ports("plain", "tree", "tree-auto") | (
        {} if "dflash-stock" in run.given_up else run.ports("dflash-stock")
    )
    texts = on_all(servers, lambda ports: [a["output_ids"] for a in ask(ports, asked, params, BATCH)])
    plain = servers["plain"][0]
    rows = []
    for name in servers:
        if name != "plain":
            parted = differences(plain, asked, texts[name], texts["plain"])
            row = {"server": name, "against": "plain", "batch": BATCH, "prompts": len(asked), **parted}
            rows.append(row | {"passed": all(p["margin"] < NEAR_TIE for p in parted["parted"])})
    return rows
