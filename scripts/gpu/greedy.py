"""Greedy texts at batches 1, 4 and 16: every server against plain decoding, and the margin where two texts part.

The yardstick is stock DFLASH against plain decoding, both on the stock release: the shape of a batch alone flips
near-ties in bfloat16.
"""

import itertools

from scripts.gpu.asking import ask, on_all, prompts
from scripts.gpu.fleet import Run
from scripts.gpu.server import generate

SERVERS = ("plain", "dflash-stock", "tree", "chain")
BATCHES = (16, 4, 1)  # the quickest first


def run(run: Run) -> dict:
    asked = prompts(run.count(100, 6))
    tokens = run.count(256, 24)
    texts: dict[int, dict[str, list]] = {}

    def measure(batch: int) -> list[dict]:
        servers = run.ports(*SERVERS)
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found = on_all(servers, lambda ports: [a["output_ids"] for a in ask(ports, asked, params, batch)])
        texts[batch] = found
        return [
            {"server": a, "against": b, "batch": batch, "prompts": len(asked), "tokens": tokens}
            | differences(servers["plain"][0], asked, found[a], found[b])
            for b, a in itertools.combinations(SERVERS, 2)
        ]

    def plain_with_itself() -> list[dict]:
        port = run.ports("plain")["plain"][0]
        return [
            {"server": "plain", "against": "plain", "batch": f"{a} and {b}", "prompts": len(asked), "tokens": tokens}
            | differences(port, asked, texts[a]["plain"], texts[b]["plain"])
            for a, b in itertools.combinations(BATCHES, 2)
        ]

    steps = {f"batch {batch}": lambda batch=batch: measure(batch) for batch in BATCHES}
    return run.steps("greedy", {}, steps | {"plain with itself": plain_with_itself})


def differences(plain_port: int, asked: list[list[int]], one: list[list[int]], other: list[list[int]]) -> dict:
    """How many texts differ, where they part, and the margin there: of the two best tokens that plain decoding sees
    there, the difference of log-probabilities."""
    parted = []
    for prompt, a, b in zip(asked, one, other, strict=True):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            params = {"temperature": 0, "max_new_tokens": 1}
            (answer,) = generate(plain_port, prompt + a[:at], params, return_logprob=True, top_logprobs_num=2)
            best, second = answer["meta_info"]["output_top_logprobs"][0]
            parted.append({"at": at, "margin": float(best[0] - second[0])})
    return {"differing": len(parted), "parted": parted}
