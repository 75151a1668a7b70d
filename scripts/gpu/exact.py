"""Is sampling exact? The first three tokens after a prompt, every server against plain decoding.

Whole texts are compared, and next tokens where rounding does not decide (decided.py): near a cut plain decoding differs
from itself from run to run, as the shapes of its batches do.
"""

import collections
import functools

import numpy as np
from scipy import stats

from scripts.gpu import decided
from scripts.gpu.asking import on_all, sample_many
from scripts.gpu.fleet import PAIR, Run
from scripts.gpu.fleet import SERVERS as CATALOGUE
from scripts.gpu.sampled import CELLS, PROMPT, TOKENS

SERVERS = ("plain", "tree", "tree-follow", "dflash", "tree-loose")


def run(run: Run) -> dict:
    samples = run.count(20_000, 400)
    tree = ("tree", "tree-follow")
    steps = {
        f"T {t}, {name}": lambda t=t, name=name: cell(run.ports("plain", *tree), t, CELLS[name], name, samples)
        for t in (0.6, 1.0)
        for name in CELLS
    }
    both = {f"T {t}, mixed with greedy": lambda t=t: _mixed(run.ports("plain", *tree), t, samples) for t in (0.6, 1.0)}
    others = {
        "T 1.0, chain and loose": lambda: cell(run.ports("plain", "dflash", "tree-loose"), 1.0, {}, "plain", samples)
    }
    cold = list(steps.items())[:5]
    order = dict(cold) | {"T 0.6, mixed with greedy": both.pop("T 0.6, mixed with greedy")} | others | steps | both
    return run.steps("exact", {"servers": {name: CATALOGUE[name].args for name in SERVERS}}, order)


def cell(servers: dict, temperature: float, params: dict, name: str, samples: int) -> list[dict]:
    """Samples of all servers, a row for each but the first, which it is compared with.

    servers: {name: ports}. params: sampling parameters besides the temperature, which `name` is a name for.
    """
    asked = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True} | params
    texts = on_all(servers, lambda ports: sample_many(ports, PROMPT, asked, samples))
    first, *others = servers
    return [
        {"server": other, "against": first, "T": temperature, "cell": name, "n": samples}
        | two_sample(texts[other], texts[first])
        | {"decided": _where_decided(texts[other], texts[first], temperature, params)}
        for other in others
    ]


def _where_decided(one: list, other: list, temperature: float, params: dict) -> dict:
    """{"p", "chi2", "freedom", "beginnings", "doubtful": [[ids before, id, its share]]}: see decided.tables."""
    from scripts.gpu.rounding import undecided

    doubtful = undecided(_rows(), temperature, params, TOKENS)
    tables = decided.tables(one, other, {(token.before, token.token) for token in doubtful})
    found = [stats.chi2_contingency(table, correction=False) for table in tables]
    chi2, freedom = float(sum(one.statistic for one in found)), sum(one.dof for one in found)
    return {
        "p": float(stats.chi2.sf(chi2, freedom)) if found else 1.0,
        "chi2": chi2,
        "freedom": freedom,
        "beginnings": len(tables),
        "doubtful": [[token.before, token.token, token.share] for token in doubtful],
    }


@functools.cache
def _rows():
    """The target's rows after PROMPT, in float32 on this host's processor."""
    from scripts.gpu.pair_model import Stack
    from scripts.gpu.rounding import rows_after

    return rows_after(Stack(PAIR / "target", "model.", "cpu"), PROMPT)


def _mixed(servers: dict, temperature: float, samples: int) -> list[dict]:
    """Every second request of a batch is greedy: the sampled ones (`samples`) stay exact, the greedy ones greedy."""
    sampled = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}
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
    """Chi-square of homogeneity over the categories, rare ones pooled (decided.contingency).

    "furthest": the five categories that contribute most, each with its counts in `one` and in `other`.
    """
    a, b = collections.Counter(one), collections.Counter(other)
    kept, columns = decided.contingency(a, b)
    if len(columns) < 2:
        return {"categories": len(columns), "chi2": 0.0, "p": 1.0, "total_variation": 0.0, "furthest": []}
    table = np.array(columns, dtype=float).T
    chi2, p, _, _ = stats.chi2_contingency(table, correction=False)
    apart = sorted(kept, key=lambda key: -((a[key] - b[key]) ** 2) / (a[key] + b[key]))[:5]
    shares = table / table.sum(1, keepdims=True)
    return {
        "categories": len(columns),
        "chi2": float(chi2),
        "p": float(p),
        "total_variation": float(abs(shares[0] - shares[1]).sum() / 2),
        "furthest": [[key, a[key], b[key]] for key in apart],
    }
