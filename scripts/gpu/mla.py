"""A target of the DeepSeek-V3 / Kimi K2 family (MLA, MoE), tiny and random, with a draft: see make_mla_pair.py.

Greedy texts against plain decoding with the margins where they part, beside stock DFLASH's and beside the margins of
all steps; sampled texts against plain decoding by both ways to decide; a prompt whose generated text is cached.
"""

import statistics
import subprocess

from scripts.gpu.asking import ask, on_all, prompts, sample_many, tokens_of
from scripts.gpu.exact import two_sample
from scripts.gpu.fleet import ROOT, Run
from scripts.gpu.greedy import differences
from scripts.gpu.long_run import complaints
from scripts.gpu.releases import verify_steps
from scripts.gpu.server import generate

LIMITS = [
    *("--mem-fraction-static", "0.3", "--context-length", "2048", "--max-total-tokens", "32768"),
    *("--max-running-requests", "32", "--cuda-graph-max-bs", "32", "--sleep-on-idle"),
]
PROMPT = tokens_of(b"import os\nimport ")
NEAR_TIE = 0.3  # nats, what rounding may flip: logits of 16 to 32 are multiples of 0.125 in bfloat16
LEAST_P = 0.001
TREE = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "32", "--speculative-ddtree-topk", "8"]

SERVERS_OF_ITS_OWN = {
    "plain": ("stock", []),
    "dflash-stock": ("stock", ["--speculative-algorithm", "DFLASH"]),
    "tree": ("patched", TREE),
    "tree-follow": ("follow", TREE),
}


def launch(run: Run) -> None:
    pair = run.args.work.absolute() / "mla-pair"
    subprocess.run([run.python("patched"), "-m", "scripts.gpu.make_mla_pair", pair], cwd=ROOT, check=True, timeout=120)
    draft = ["--speculative-draft-model-path", str(pair / "draft")]
    for name, (venv, args) in SERVERS_OF_ITS_OWN.items():
        run.start(f"mla-{name}", run.python(venv), pair / "target", [*LIMITS, *args, *(draft if args else [])])


def run(run: Run) -> dict:
    servers = run.of(f"mla-{name}" for name in SERVERS_OF_ITS_OWN)
    asked = prompts(run.count(100, 4), 160)
    found = {
        "servers": {name: server.command()[1:] for name, server in servers.items()},
        "thresholds": {"margin where texts part": NEAR_TIE, "p": LEAST_P, "different texts of 16 at T 1": 15},
    }
    ports = {name: [server.port] for name, server in servers.items()}
    steps = {
        "margins": lambda: _margins(ports["plain"][0], asked[: run.count(24, 2)], run.count(96, 24)),
        "cached": lambda: _cached(ports, asked[: run.count(24, 2)]),
        "diverse": lambda: _diverse(ports),
        "exact": lambda: _exact(ports, run.count(20_000, 100), run.count(128, 25)),
        "greedy": lambda: _greedy(ports, asked, run.count(96, 24)),
        "logs": lambda: {name: complaints(server.log) for name, server in servers.items()},
    }
    return run.steps("mla", found, steps)


def _margins(plain_port: int, asked: list[list[int]], tokens: int) -> dict:
    """Of the two best tokens at every greedy step of plain decoding: how many near-ties are there to flip?"""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    margins = []
    for prompt in asked:
        (answer,) = generate(plain_port, prompt, params, return_logprob=True, top_logprobs_num=2)
        margins += [best[0] - second[0] for best, second in answer["meta_info"]["output_top_logprobs"]]
    return {
        "steps": len(margins),
        "median": statistics.median(margins),
        "share below the threshold": sum(m < NEAR_TIE for m in margins) / len(margins),
    }


def _greedy(ports: dict[str, list[int]], asked: list[list[int]], tokens: int) -> list[dict]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    rows = []
    for batch, some in ((16, asked), (4, asked), (1, asked[:24])):  # one after the other takes long
        answers = on_all(ports, lambda p, b=batch, q=some: ask(p, q, params, b))
        texts = {name: [a["output_ids"] for a in found] for name, found in answers.items()}
        for name in ports:
            if name == "plain":
                continue
            parted = differences(ports["plain"][0], some, texts[name], texts["plain"])
            steps = sum(verify_steps(a["meta_info"]) for a in answers[name])
            row = {"server": name, "against": "plain", "batch": batch, "prompts": len(some), "tokens": tokens}
            row |= {"accept_length": (len(some) * (tokens - 1)) / steps, **parted}
            rows.append(row | {"passed": all(p["margin"] < NEAR_TIE for p in parted["parted"])})
    return rows


def _cached(ports: dict[str, list[int]], asked: list[list[int]]) -> list[dict]:
    """A prompt and part of its own greedy text, asked again: what verify steps left in the cache must do."""
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    rows = []
    for name in ("tree", "tree-follow"):
        cold = [a["output_ids"] for a in ask(ports[name], asked, params, 1)]
        longer = [prompt + text[:40] for prompt, text in zip(asked, cold, strict=True)]
        warm = ask(ports[name], longer, params | {"max_new_tokens": 24}, 1)
        parted = differences(ports["plain"][0], longer, [a["output_ids"] for a in warm], [text[40:] for text in cold])
        hits = [a["meta_info"]["cached_tokens"] - len(p) for a, p in zip(warm, asked, strict=True)]
        row = {"server": name, "prompts": len(asked), "least generated tokens in the cache": min(hits), **parted}
        rows.append(row | {"passed": min(hits) >= 30 and all(p["margin"] < NEAR_TIE for p in parted["parted"])})
    return rows


def _diverse(ports: dict[str, list[int]]) -> list[dict]:
    """Whole texts of 16 requests at once; after the first token, which the prefill draws, stock DFLASH is greedy
    where it lacks the op."""
    rows = []
    for temperature in (0.6, 1.0):
        params = {"temperature": temperature, "max_new_tokens": 48, "ignore_eos": True}
        for name in ports:
            answers = generate(ports[name][0], [PROMPT] * 16, params)
            texts = {tuple(a["output_ids"][1:]) for a in answers}
            row = {"server": name, "T": temperature, "n": 16, "different": len(texts)}
            if name != "plain":
                row["accept_length"] = 16 * 47 / sum(verify_steps(a["meta_info"]) for a in answers)
            rows.append(row | {"passed": len(texts) >= 15})
    return rows


def _exact(ports: dict[str, list[int]], samples: int, batch: int) -> list[dict]:
    asked = {name: ports[name] for name in ("plain", "tree", "tree-follow")}
    rows = []
    for cell, more in (("T 1.0", {"temperature": 1.0}), ("T 0.6, top_k 20", {"temperature": 0.6, "top_k": 20})):
        params = {"max_new_tokens": 3, "ignore_eos": True} | more
        texts = on_all(asked, lambda p, q=params: sample_many(p, PROMPT, q, samples, batch))
        for name in ("tree", "tree-follow"):
            found = two_sample(texts[name], texts["plain"])
            row = {"server": name, "against": "plain", "cell": cell, "n": samples}
            rows.append(row | found | {"passed": found["p"] > LEAST_P / 4})  # four tests
    return rows
