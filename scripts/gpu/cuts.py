"""Sampling at cuts that rounding decides: plain decoding differs from itself there, and the tree from it.

A token within a step of bfloat16 of a cut (top-p, min-p) is kept at one shape of the batch and dropped at another, so
that samples of two servers differ although each is exact. Three things are shown, with the counts of the texts:

* bfloat16, a min-p whose cut is clear of every token that can come: DDTREE against plain decoding, both ways to decide;
* bfloat16, the cell where rounding decides: plain decoding against itself at another batch size, and the tree;
* float16, whose steps are an eighth as large: the same cell, and others.
"""

from scripts.gpu.exact import cell
from scripts.gpu.fleet import Run
from scripts.gpu.sampled import CELLS, CLEAR

SERVERS = ("plain", "plain-narrow", "tree", "tree-follow", "plain16", "plain-narrow16", "tree16", "tree-follow16")
T = 0.6


def run(run: Run) -> dict:
    samples = run.count(20_000, 200)
    in_float16 = ("plain16", "plain-narrow16", "tree16", "tree-follow16")
    steps = {
        "bfloat16, min_p 0.05": lambda: cell(
            run.ports("plain", "plain-narrow", "tree", "tree-follow"), T, CELLS["min_p 0.05"], "min_p 0.05", samples
        ),
        "bfloat16, min_p 0.15": lambda: cell(
            run.ports("plain", "tree", "tree-follow"), T, CLEAR, "min_p 0.15", samples
        ),
    } | {
        f"float16, {name}": lambda name=name: cell(run.ports(*in_float16), T, CELLS[name], name, samples)
        for name in ("min_p 0.05", "top_p 0.9", "top_k 20, top_p 0.9")
    }
    return run.steps("cuts", {}, steps)
