"""Is sampling exact? The first three tokens after a prompt, every server against plain decoding."""

import collections

import numpy as np
from scipy import stats

from scripts.gpu.asking import on_all, sample_many, tokens_of
from scripts.gpu.fleet import SERVERS as CATALOGUE
from scripts.gpu.fleet import Run

SERVERS = ("plain", "tree", "tree-follow", "dflash", "tree-loose")
PROMPT = tokens_of(b"import os\nimport ")  # many continuations: power against small biases
CELLS = {
    "plain": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20": {"top_k": 20},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 20, top_p 0.9": {"top_k": 20, "top_p": 0.9},
}


def run(run: Run) -> dict:
    samples = run.count(20_000, 400)
    tree = ("tree", "tree-follow")
    steps = {
        f"T {t}, {cell}": lambda t=t, cell=cell: _cell(run.ports("plain", *tree), t, CELLS[cell], cell, samples)
        for t in (0.6, 1.0)
        for cell in CELLS
    }
    both = {f"T {t}, mixed with greedy": lambda t=t: _mixed(run.ports("plain", *tree), t, samples) for t in (0.6, 1.0)}
    others = {
        "T 1.0, chain and loose": lambda: _cell(run.ports("plain", "dflash", "tree-loose"), 1.0, {}, "plain", samples)
    }
    cold = list(steps.items())[:5]
    order = dict(cold) | {"T 0.6, mixed with greedy": both.pop("T 0.6, mixed with greedy")} | others | steps | both
    return run.steps("exact", {"servers": {name: CATALOGUE[name].args for name in SERVERS}}, order)


def _cell(servers: dict, temperature: float, params: dict, cell: str, samples: int) -> list[dict]:
    asked = {"temperature": temperature, "max_new_tokens": 3, "ignore_eos": True} | params
    texts = on_all(servers, lambda ports: sample_many(ports, PROMPT, asked, samples))
    return [
        {"server": name, "against": "plain", "T": temperature, "cell": cell, "n": samples}
        | two_sample(texts[name], texts["plain"])
        for name in servers
        if name != "plain"
    ]


def _mixed(servers: dict, temperature: float, samples: int) -> list[dict]:
    """Every second request of a batch is greedy: the sampled ones (`samples`) stay exact, the greedy ones greedy."""
    sampled = {"temperature": temperature, "max_new_tokens": 3, "ignore_eos": True}
    mixed = [sampled, sampled | {"temperature": 0}] * 128
    texts = on_all(servers, lambda ports: sample_many(ports, PROMPT, mixed, samples * 2))
    greedy = {name: set(texts[name][1::2]) for name in servers}
    return [
        {
            "server": name,
            "against": "plain",
            "T": temperature,
            "cell": "mixed with greedy",
            "n": samples,
            "greedy_texts": len(greedy[name]),
            "greedy_equal": greedy[name] == greedy["plain"],
        }
        | two_sample(texts[name][::2], texts["plain"][::2])
        for name in servers
        if name != "plain"
    ]


def two_sample(one: list, other: list) -> dict:
    """Chi-square of homogeneity over the categories; those expected fewer than 5 times in a sample are pooled."""
    a, b = collections.Counter(one), collections.Counter(other)
    share = min(len(one), len(other)) / (len(one) + len(other))
    kept = [key for key in a | b if (a[key] + b[key]) * share >= 5]
    table = np.array([[a[key] for key in kept], [b[key] for key in kept]], dtype=float)
    rest = np.array([[len(one) - table[0].sum()], [len(other) - table[1].sum()]])
    if rest.sum() * share >= 5:
        table = np.hstack([table, rest])
    if table.shape[1] < 2:
        return {"categories": int(table.shape[1]), "chi2": 0.0, "p": 1.0, "total_variation": 0.0}
    chi2, p, _, _ = stats.chi2_contingency(table, correction=False)
    shares = table / table.sum(1, keepdims=True)
    return {
        "categories": int(table.shape[1]),
        "chi2": float(chi2),
        "p": float(p),
        "total_variation": float(abs(shares[0] - shares[1]).sum() / 2),
    }
