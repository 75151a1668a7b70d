"""Tokens per second of whole servers at an 8B shape, as a client sees them, with a trained pair's acceptance.

The pair is tests/models/tiny-b16 in the shape of Qwen3-8B (inflate_pair.py): what it says and what its draft guesses is
the tiny pair's, what a step costs is an 8B's. All servers have one GPU and are asked in turns, the same prompts each:
plain decoding, stock DFLASH on two attention backends, and trees. A round has prompts of its own.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripts.gpu.asking import long_text, prompts
from scripts.gpu.fleet import ROOT, Run
from scripts.gpu.greedy import differences
from scripts.gpu.inflate_pair import Inflation, Shape
from scripts.gpu.releases import verify_steps
from scripts.gpu.server import generate

TINY = ROOT / "tests" / "models" / "tiny-b16"
REHEARSED = Shape(hidden=320, layers=7, draft_layers=3, heads=6, kv_heads=3, ffn=700, vocab=400)


@dataclass(frozen=True)
class Cell:
    """What a round asks: `groups` requests of `batch` prompts of `prefix` tokens. Prompts of a group share all but
    their last SHORT tokens: a pool for 4 times 32,000 tokens would leave no room for the other servers."""

    prefix: int  # tokens
    batch: int
    groups: int
    modes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"prefix {self.prefix}, batch {self.batch}"


MODES = {
    "T 0": {"temperature": 0.0},
    "T 0.6, top_p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "T 1": {"temperature": 1.0},
}
SHORT = 128
ALL, TWO = tuple(MODES), ("T 0", "T 0.6, top_p 0.95")
CELLS = [
    Cell(SHORT, 1, 3, ALL),
    Cell(SHORT, 4, 1, ALL),
    Cell(SHORT, 16, 1, ALL),
    Cell(SHORT, 64, 1, TWO),
    Cell(SHORT, 128, 1, TWO),
    Cell(4000, 1, 1, TWO),
    Cell(4000, 4, 1, TWO),
    Cell(32000, 1, 1, TWO),
    Cell(32000, 4, 1, TWO),
]
ROUNDS = 3
TOKENS = 128
WIDEST = 128  # requests at once
COMMON = ["--mem-fraction-static", "0.92", "--sleep-on-idle"]
LIMITS = [
    *("--context-length", "36000", "--max-total-tokens", "45000", "--chunked-prefill-size", "4096"),
    *("--max-running-requests", str(WIDEST), "--cuda-graph-bs", "1", "2", "4", "8", "16", "32", "64", str(WIDEST)),
]
# A server that is only asked for short prompts and small batches.
SMALL = [
    *("--context-length", "36000", "--max-total-tokens", "16384", "--chunked-prefill-size", "4096"),
    *("--max-running-requests", "16", "--cuda-graph-bs", "1", "2", "4", "8", "16"),
]
DFLASH = ["--speculative-algorithm", "DFLASH"]
FLASHINFER = ["--attention-backend", "flashinfer"]
NARROW = ["--speculative-ddtree-budget", "1:31,9:7,33:3,65:0"]
TREE = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-topk", "8"]


@dataclass(frozen=True)
class Kind:
    """A server. `most`: the largest batch and the longest prefix, in tokens, that it is asked for."""

    venv: str
    args: list[str]
    most: tuple[int, int] = (WIDEST, 32000)


OWN = {
    "tokens-plain": Kind("stock", [*LIMITS, *FLASHINFER]),
    "tokens-dflash": Kind("stock", [*SMALL, *DFLASH], (16, 4000)),
    "tokens-dflash flashinfer": Kind("stock", [*LIMITS, *DFLASH, *FLASHINFER]),
    "tokens-tree": Kind("patched", [*LIMITS, *TREE, *FLASHINFER]),
    "tokens-tree narrow": Kind("patched", [*LIMITS, *TREE, *NARROW, *FLASHINFER]),
}
STOCK = ("plain", "dflash", "dflash flashinfer")  # what a tree has to beat


def launch(run: Run) -> None:
    pair = run.args.big_pair or run.args.work.absolute() / "big-pair"
    if not (pair / "draft" / "config.json").exists():
        Inflation(TINY, pair, REHEARSED if run.rehearsal else Shape()).write()
    draft = ["--speculative-draft-model-path", str(pair / "draft")]
    for name, kind in OWN.items():
        args = [word for word in kind.args if not (run.rehearsal and word in FLASHINFER)]
        more = draft if "--speculative-algorithm" in args else []
        run.start(name, run.python(kind.venv), pair / "target", [*COMMON, *args, *more])


def run(run: Run) -> dict:
    servers = run.of(name for name in OWN if name in run.servers)
    ports = {name: server.port for name, server in servers.items()}
    tokens, rounds = run.count(TOKENS, 16), run.count(ROUNDS, 2)
    cells = [Cell(48, 1, 1, TWO), Cell(96, 4, 1, TWO)] if run.rehearsal else CELLS
    asked = _prompts(cells, rounds)
    found = {
        "servers": {name: server.command()[1:] for name, server in servers.items()},
        "given up": {name: said for name, said in run.given_up.items() if name in OWN},
        "tokens": tokens,
    }
    texts: dict[str, dict[tuple, list[int]]] = {name: {} for name in ports}

    def measure(cell: Cell, number: int) -> list[dict]:
        order = [name for name in ports if _takes(OWN[f"tokens-{name}"], cell)]
        order = order[number % len(order) :] + order[: number % len(order)]
        rows = []
        for mode in cell.modes:
            for name in order:
                row, said = _ask(ports[name], asked[cell, number], MODES[mode], tokens)
                where = {"prefix": cell.prefix, "batch": cell.batch, "mode": mode, "round": number}
                rows.append({"server": name, **where, **row})
                if mode == "T 0":
                    for place, text in enumerate(said):
                        texts[name][cell, number, place] = text
        return rows

    steps = {"warm": lambda: _warm(ports, run.count(WIDEST, 4))}
    # Round by round, so that a run which is cut short has all cells.
    for number in range(rounds):
        for cell in cells:
            steps[f"{cell.name}, round {number}"] = lambda c=cell, n=number: measure(c, n)
    found = run.steps("tokens", found, steps)
    last = {"summary": lambda: summary(found), "greedy": lambda: _greedy(ports, asked, texts)}
    return run.steps("tokens", found, last)


def _takes(kind: Kind, cell: Cell) -> bool:
    return cell.batch <= kind.most[0] and cell.prefix <= kind.most[1]


def _prompts(cells: list[Cell], rounds: int) -> dict[tuple[Cell, int], list[list[list[int]]]]:
    """{(cell, round): groups of `batch` prompts of about `prefix` tokens}, no prompt twice."""
    needed = sum(cell.batch * cell.groups for cell in cells) * rounds
    every = iter(prompts(needed, 2 * SHORT))
    made = {}
    for number in range(rounds):
        for place, cell in enumerate(cells):
            groups = []
            for group in range(cell.groups):
                before = long_text(cell.prefix - SHORT, place + len(cells) * (group + 7 * number))
                groups.append([[*before, *next(every)[: min(SHORT, cell.prefix)]] for _ in range(cell.batch)])
            made[cell, number] = groups
    return made


def _warm(ports: dict[str, int], widest: int) -> dict[str, float]:
    """Seconds of the first requests, in which kernels are still compiled."""
    some = prompts(widest, SHORT)

    def warm(name: str) -> float:
        began = time.monotonic()
        most = min(widest, OWN[f"tokens-{name}"].most[0])
        for width in sorted({width for width in (1, 4, 16, 64, most) if width <= most}):
            for params in MODES.values():
                generate(ports[name], some[:width], params | {"max_new_tokens": 12, "ignore_eos": True})
        return time.monotonic() - began

    with ThreadPoolExecutor(len(ports)) as pool:
        return dict(zip(ports, pool.map(warm, ports), strict=True))


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
    """A row a prefix, batch, mode and server: medians over rounds, least and most tokens per second, and the median of
    each round's tokens per second over every stock server's of the same round."""
    rows = [row for step in found.values() if isinstance(step, list) for row in step]
    by: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        by.setdefault((row["prefix"], row["batch"], row["mode"], row["server"]), {})[row["round"]] = row

    def over(where: tuple, server: str, other: str) -> float | None:
        one, base = by[*where, server], by.get((*where, other), {})
        ratios = [one[r]["per_second"] / base[r]["per_second"] for r in one.keys() & base.keys()]
        return statistics.median(ratios) if ratios else None

    made = []
    for (*where, server), rounds in sorted(by.items()):
        speeds = [row["per_second"] for row in rounds.values()]
        made.append(
            {
                **dict(zip(("prefix", "batch", "mode"), where, strict=True)),
                "server": server,
                "rounds": len(speeds),
                "per_second": statistics.median(speeds),
                "least": min(speeds),
                "most": max(speeds),
                "accept_length": statistics.median(row["accept_length"] for row in rounds.values()),
                "step_ms": statistics.median(row["step_ms"] for row in rounds.values()),
                "over": {other: over(tuple(where), server, other) for other in STOCK if other != server},
            }
        )
    return made


def _greedy(ports: dict[str, int], asked: dict, texts: dict[str, dict[tuple, list[int]]]) -> list[dict]:
    """The texts at T 0 that were timed, each server's against plain decoding's."""
    rows = []
    for cell in dict.fromkeys(place[0] for place in texts["plain"]):
        places = [place for place in texts["plain"] if place[0] == cell]
        places = places[: len(places) if cell.prefix == SHORT else 4]  # where texts part, plain reads the prompt again
        some = [[p for group in asked[cell, number] for p in group][at] for _, number, at in places]
        base = [texts["plain"][place] for place in places]
        for name in ports:
            mine = [texts[name].get(place) for place in places]
            if name != "plain" and None not in mine:
                row = {"server": name, "against": "plain", "prefix": cell.prefix, "batch": cell.batch}
                rows.append(row | {"prompts": len(some)} | differences(ports["plain"], some, mine, base))
    return rows
