"""Tokens per second of whole servers at an 8B shape, as a client sees them, with a trained pair's acceptance.

The pair is tests/models/tiny-b16 in the shape of Qwen3-8B (inflate_pair.py): what it says and what its draft guesses is
the tiny pair's, what a step costs is an 8B's. All servers have one GPU and are asked in turns, the same prompts each:
plain decoding, stock DFLASH on triton and on flashinfer, and trees of two budgets. A round has prompts of its own.
"""

import statistics
import time

from scripts.gpu.asking import prompts
from scripts.gpu.fleet import ROOT, Run
from scripts.gpu.greedy import differences
from scripts.gpu.inflate_pair import Inflation, Shape
from scripts.gpu.releases import verify_steps
from scripts.gpu.server import generate

TINY = ROOT / "tests" / "models" / "tiny-b16"
REHEARSED = Shape(hidden=320, layers=7, draft_layers=3, heads=6, kv_heads=3, ffn=700, vocab=400)
LIMITS = [
    *("--mem-fraction-static", "0.92", "--context-length", "2048", "--max-total-tokens", "16384"),
    *("--max-running-requests", "16", "--sleep-on-idle", "--cuda-graph-bs", "1", "2", "4", "8", "16"),
]
DFLASH = ["--speculative-algorithm", "DFLASH"]
FLASHINFER = ["--attention-backend", "flashinfer"]


def _tree(budget: int) -> list[str]:
    numbers = ["--speculative-ddtree-budget", str(budget), "--speculative-ddtree-topk", "8"]
    return ["--speculative-algorithm", "DDTREE", *numbers]


OWN = {
    "tokens-plain": ("stock", []),
    "tokens-dflash": ("stock", DFLASH),
    "tokens-dflash flashinfer": ("stock", [*DFLASH, *FLASHINFER]),
    "tokens-tree 32": ("patched", _tree(32)),
    "tokens-tree 15": ("patched", _tree(15)),
}
MODES = {
    "T 0": {"temperature": 0.0},
    "T 0.6, top_p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "T 1": {"temperature": 1.0},
}
BATCHES = {1: 4, 4: 2, 16: 1}  # requests at once: how many such groups a round has
ROUNDS = 3
PROMPT = 128  # tokens
TOKENS = 192


def launch(run: Run) -> None:
    pair = run.args.big_pair or run.args.work.absolute() / "big-pair"
    if not (pair / "draft" / "config.json").exists():
        Inflation(TINY, pair, REHEARSED if run.rehearsal else Shape()).write()
    draft = ["--speculative-draft-model-path", str(pair / "draft")]
    for name, (venv, args) in OWN.items():
        if not (run.rehearsal and args[-2:] == FLASHINFER):
            more = [*args, *(draft if DFLASH[0] in args else [])]
            run.start(name, run.python(venv), pair / "target", [*LIMITS, *more])


def run(run: Run) -> dict:
    servers = run.of(name for name in OWN if name in run.servers)
    ports = {name: server.port for name, server in servers.items()}
    tokens, rounds = run.count(TOKENS, 16), run.count(ROUNDS, 2)
    groups = {batch: run.count(count, 1) for batch, count in BATCHES.items()}
    asked = _prompts(groups, rounds, run.count(PROMPT, 48))
    found = {
        "servers": {name: server.command()[1:] for name, server in servers.items()},
        "given up": {name: said for name, said in run.given_up.items() if name in OWN},
        "tokens": tokens,
        "prompt_tokens": run.count(PROMPT, 48),
    }
    texts: dict[str, dict[tuple, list[int]]] = {name: {} for name in ports}

    def measure(batch: int, number: int) -> list[dict]:
        order = list(ports)
        order = order[number % len(order) :] + order[: number % len(order)]
        rows = []
        for mode, params in MODES.items():
            for name in order:
                row, said = _ask(ports[name], asked[batch, number], params, tokens)
                rows.append({"server": name, "batch": batch, "mode": mode, "round": number, **row})
                if mode == "T 0":
                    for place, text in enumerate(said):
                        texts[name][batch, number, place] = text
        return rows

    steps = {"warm": lambda: _warm(ports, asked[16, 0][0])}
    # Round by round, so that a run which is cut short has all batches.
    for number in range(rounds):
        for batch in BATCHES:
            steps[f"batch {batch}, round {number}"] = lambda b=batch, n=number: measure(b, n)
    found = run.steps("tokens", found, steps)
    last = {"summary": lambda: summary(found), "greedy": lambda: _greedy(ports, asked, texts)}
    return run.steps("tokens", found, last)


def _prompts(groups: dict[int, int], rounds: int, length: int) -> dict[tuple[int, int], list[list[list[int]]]]:
    """{(batch, round): groups of `batch` prompts of `length` tokens}, no prompt twice."""
    needed = sum(batch * count for batch, count in groups.items()) * rounds
    every = iter(prompts(needed, 2 * length))
    return {
        (batch, number): [[next(every)[:length] for _ in range(batch)] for _ in range(count)]
        for number in range(rounds)
        for batch, count in groups.items()
    }


def _warm(ports: dict[str, int], group: list[list[int]]) -> dict[str, float]:
    """Seconds of the first requests, in which kernels are still compiled."""
    found = {}
    for name, port in ports.items():
        began = time.monotonic()
        for some in (group[:1], group[:4], group):
            for params in MODES.values():
                generate(port, some, params | {"max_new_tokens": 12, "ignore_eos": True})
        found[name] = time.monotonic() - began
    return found


def _ask(port: int, groups: list[list[list[int]]], params: dict, tokens: int) -> tuple[dict, list[list[int]]]:
    """One mode of one round: groups one after the other, each in one request.

    Gives tokens, seconds, tokens a second, tokens a verify step, and milliseconds a step of the batch: the time without
    that of a first token, over the steps of the request that took most.
    """
    ignore = {"ignore_eos": True}
    total, seconds, in_steps, batch_steps, request_steps, texts = 0, 0.0, 0.0, 0, 0, []
    for group in groups:
        generate(port, group, params | {"max_new_tokens": 1} | ignore)  # the prompt is cached from here on
        began = time.monotonic()
        generate(port, group, params | {"max_new_tokens": 1} | ignore)
        first = time.monotonic() - began
        began = time.monotonic()
        answers = generate(port, group, params | {"max_new_tokens": tokens} | ignore)
        spent = time.monotonic() - began
        texts += [answer["output_ids"] for answer in answers]
        counts = [verify_steps(answer["meta_info"]) for answer in answers]
        total += sum(len(answer["output_ids"]) for answer in answers)
        seconds, in_steps = seconds + spent, in_steps + spent - first
        batch_steps += max(counts) or tokens - 1
        request_steps += sum(counts) or len(group) * (tokens - 1)
    row = {
        "tokens": total,
        "seconds": seconds,
        "per_second": total / seconds,
        "accept_length": (total - len(texts)) / request_steps,
        "step_ms": in_steps / batch_steps * 1e3,
    }
    return row, texts


def summary(found: dict) -> list[dict]:
    """A row a batch, mode and server: medians over rounds, least and most tokens per second, and the median of each
    round's tokens per second over stock DFLASH's and over plain decoding's of the same round."""
    rows = [row for step in found.values() if isinstance(step, list) for row in step]
    by: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        by.setdefault((row["batch"], row["mode"], row["server"]), {})[row["round"]] = row

    def over(batch: int, mode: str, server: str, other: str) -> float | None:
        one, base = by[batch, mode, server], by.get((batch, mode, other), {})
        ratios = [one[r]["per_second"] / base[r]["per_second"] for r in one.keys() & base.keys()]
        return statistics.median(ratios) if ratios else None

    made = []
    for (batch, mode, server), rounds in sorted(by.items()):
        speeds = [row["per_second"] for row in rounds.values()]
        made.append(
            {
                "batch": batch,
                "mode": mode,
                "server": server,
                "rounds": len(speeds),
                "per_second": statistics.median(speeds),
                "least": min(speeds),
                "most": max(speeds),
                "accept_length": statistics.median(row["accept_length"] for row in rounds.values()),
                "step_ms": statistics.median(row["step_ms"] for row in rounds.values()),
                "over_dflash": over(batch, mode, server, "dflash"),
                "over_plain": over(batch, mode, server, "plain"),
            }
        )
    return made


def _greedy(ports: dict[str, int], asked: dict, texts: dict[str, dict[tuple, list[int]]]) -> list[dict]:
    """The texts at T 0 that were timed, each server's against plain decoding's."""
    rows = []
    for batch in BATCHES:
        places = [place for place in texts["plain"] if place[0] == batch]
        flat = {key: [p for group in asked[key] for p in group] for key in {place[:2] for place in places}}
        some = [flat[place[:2]][place[2]] for place in places]
        base = [texts["plain"][place] for place in places]
        for name in ports:
            if name != "plain":
                mine = [texts[name][place] for place in places]
                row = {"server": name, "against": "plain", "batch": batch, "prompts": len(some)}
                rows.append(row | differences(ports["plain"], some, mine, base))
    return rows
