"""Which cuts of top-k, top-p and min-p does rounding decide? For samples of the trained pair, in torch alone.

Logits in bfloat16 are multiples of a step (0.0625 from 8 to 16), and the same context gets other ones in a batch of
another shape. A token that lies within a step or two of a cut is then kept by one server and dropped by another, and
their samples differ by all of its mass, although both sample exactly what their logits say.

    python3 -m scripts.gpu.rounding        a line for each cell of the experiments `exact` and `cuts`
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from scripts.gpu.fleet import PAIR
from scripts.gpu.pair_model import Stack, causal_logits
from scripts.gpu.sampled import CELLS, CLEAR, PROMPT, TOKENS

STEPS = 2  # of bfloat16, between two computations of the same logit
LEAST_WEIGHT = 2.5e-4  # of a beginning that is followed: fewer than five of 20,000 samples come so far


@dataclass
class Undecided:
    """A token that may be kept or dropped: the ids before it, its id, its share of all samples, and how far its logit
    lies above the cut (nats, in float32)."""

    before: tuple[int, ...]
    token: int
    share: float
    above: float


def rows_after(target: Stack, prompt: list[int]) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """rows(ids after the prompt) -> logits float32 [V], each computed once."""
    return functools.cache(lambda before: causal_logits(target, [*prompt, *before]))


def undecided(rows: Callable, temperature: float, params: dict, tokens: int) -> list[Undecided]:
    """Of the first `tokens` tokens after the prompt of `rows`, those whose cut rounding may move, the largest share
    first."""
    found: list[Undecided] = []

    def walk(before: tuple[int, ...], weight: float) -> None:
        logits = rows(before)
        kept, at_cut = _cut(logits, temperature, params)
        step = 2.0 ** (math.floor(math.log2(float(logits.max()))) - 7)
        for token, above in at_cut.items():
            if abs(above) <= STEPS * step:
                alone = float((logits[token] / temperature - (logits / temperature)[list(kept)].logsumexp(0)).exp())
                share = kept.get(token, alone / (1 + alone))
                found.append(Undecided(before, token, weight * share, above))
        if len(before) + 1 < tokens:
            for token, share in kept.items():
                if weight * share > LEAST_WEIGHT:
                    walk((*before, token), weight * share)

    walk((), 1.0)
    return sorted(found, key=lambda one: -one.share)


def _cut(logits: torch.Tensor, temperature: float, params: dict) -> tuple[dict[int, float], dict[int, float]]:
    """({kept token: probability}, {token: how far its logit is above the highest cut}) of one row, float32 [V]."""
    probs, ids = (logits / temperature).softmax(-1).sort(descending=True, stable=True)
    values = logits[ids]
    above = torch.full_like(values, math.inf)
    if "min_p" in params:
        above = torch.minimum(above, values - values[0] - temperature * math.log(params["min_p"]))
    if "top_k" in params:  # the logit that has to be passed to be among the k, or to drop out of them
        k = params["top_k"]
        rival = torch.where(torch.arange(len(values)) < k, values[k], values[k - 1])
        above = torch.minimum(above, values - rival)
    if params.get("top_p", 1.0) < 1:
        # The mass before a token, in logits: what all better ones would have to move by.
        before = probs.cumsum(-1) - probs
        slope = (before * (1 - before)).clamp(min=1e-6) / temperature
        above = torch.minimum(above, torch.where(before > 0, (params["top_p"] - before) / slope, math.inf))
    keep = above >= 0
    kept = probs * keep / (probs * keep).sum()
    return (
        {int(i): float(p) for i, p, k in zip(ids, kept, keep, strict=True) if k},
        {int(i): float(a) for i, a in zip(ids, above, strict=True) if a < math.inf},
    )


def main() -> None:
    rows = rows_after(Stack(PAIR / "target", "model.", "cpu"), PROMPT)
    for temperature in (0.6, 1.0):
        for cell, params in (CELLS | {"min_p 0.15": CLEAR}).items():
            found = undecided(rows, temperature, params, TOKENS)
            total = sum(one.share for one in found)
            most = [
                (bytes(i - 4 for i in (*one.before, one.token)), f"{one.share:.5f}", f"{one.above:+.4f}")
                for one in found[:4]
            ]
            print(f"T {temperature}, {cell}: {total:.5f} of the samples", *most)


if __name__ == "__main__":
    main()
