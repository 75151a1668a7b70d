"""Long and mixed: clients of all kinds (see load.py) on several servers at once, and what is left when they have gone.

Every server is another shape of the same thing: room for all, a KV pool so small that requests are taken back, no
radix cache, the widest tree, and one without the sampling op. Steps of the batch are counted in the servers' logs.
"""

import http.client
import json
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from scripts.gpu.asking import ask, prompts
from scripts.gpu.fleet import PAIR, Run, tree
from scripts.gpu.greedy import differences
from scripts.gpu.load import Plan, Seen, run_load
from scripts.gpu.server import GpuServer, generate

SERVERS = ("plain",)
GRAPHS = 16  # --cuda-graph-max-bs: there are batches with a graph up to it, and without one above
AT_A_TIME = 24  # --max-running-requests
CONTEXT = 1024
LIMITS = [
    *("--mem-fraction-static", "0.3", "--context-length", str(CONTEXT), "--max-running-requests", str(AT_A_TIME)),
    *("--cuda-graph-max-bs", str(GRAPHS), "--decode-log-interval", "1", "--sleep-on-idle"),
]
ROOMY = ["--max-total-tokens", "32768"]
SHAPES = {
    "roomy": ("patched", [*ROOMY, *tree(32, 8)]),
    # Admission that thinks of prompts alone, so that there are batches which cannot all go on.
    "tight": ("patched", ["--max-total-tokens", "3072", "--schedule-conservativeness", "0", *tree(32, 8)]),
    "no-radix": ("patched", [*ROOMY, "--disable-radix-cache", *tree(15, 4)]),
    "wide": ("patched", [*ROOMY, *tree(63, 8)]),
    "follow": ("follow", [*ROOMY, *tree(32, 8)]),
}
WIDTHS = (1, 12, 3, 18, 2, 16, 4, 28, 5, 9, 7, 14, 6, 20, 8, 10, 11, 13, 15, 17)  # clients at a time
STEPS = 20_000  # of batches, over all servers
NEAR_TIE = 0.3  # nats, what rounding may flip: logits of 16 to 32 are multiples of 0.125 in bfloat16
GROWTH_MIB = 128  # of a server's processes together, from one third of the load to its end
COMPLAINTS = (
    "Traceback",
    "illegal memory",
    "CUDA error",
    "leak detected",
    "Leak Detected",
    "SIGQUIT",
    "not finite",
    "falling back to greedy",
    "device-side assert",
)
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}  # a leak ends the server


def launch(run: Run) -> None:
    for name in list(SHAPES)[: run.count(len(SHAPES), 2)]:
        venv, args = SHAPES[name]
        run.start(f"long-{name}", run.python(venv), PAIR / "target", [*LIMITS, *args], STRICT)


def run(run: Run) -> dict:
    servers = run.of(f"long-{name}" for name in list(SHAPES)[: run.count(len(SHAPES), 2)])
    plain = run.ports("plain")["plain"][0]
    asked = prompts(run.count(24, 6), 160)
    half = len(asked) // 2
    texts = [
        a["output_ids"] for a in ask([plain], asked, {"temperature": 0, "max_new_tokens": 240, "ignore_eos": True}, 8)
    ]
    found = {
        "servers": {name: server.command()[1:] for name, server in servers.items()},
        "thresholds": {"steps": run.count(STEPS, 200), "near_tie": NEAR_TIE, "growth_mib": GROWTH_MIB},
    }
    steps = {
        "cold and warm": lambda: _on_each(servers, lambda n, port: _cold_and_warm(n, port, plain, asked[:half])),
        "load": lambda: _load(run, servers, plain, asked, texts),
        "cold and warm, after": lambda: _on_each(servers, lambda n, port: _cold_and_warm(n, port, plain, asked[half:])),
    }
    found = run.steps("long", found, steps)
    found["complaints"] = {name: complaints(server.log) for name, server in servers.items()}
    found["passed"] = _passed(found)
    if not found["passed"]:
        run.failed.append("long: see its JSON")
    return found


def _passed(found: dict) -> bool:
    parts = [found[name] for name in ("cold and warm", "load", "cold and warm, after")]
    if any("failed" in part for part in parts):
        return False
    rows = [*parts[0], parts[1], *parts[2]]
    return all(row["passed"] for row in rows) and not any(found["complaints"].values())


def _on_each(servers: dict[str, GpuServer], action: Callable[[str, int], dict]) -> list[dict]:
    """action(name, port) of every server, all at once."""
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(lambda item: action(item[0], item[1].port), servers.items()))


def _cold_and_warm(name: str, port: int, plain: int, asked: list[list[int]]) -> dict:
    """Greedy texts with an empty cache, again, and of a prompt that holds a text's beginning, cached and not."""
    params = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}
    flush(port)
    cold = ask([port], asked, params, 1)
    warm = ask([port], asked, params, 1)
    longer = [prompt + a["output_ids"][:60] for prompt, a in zip(asked, cold, strict=True)]
    own_warm = ask([port], longer, params | {"max_new_tokens": 36}, 1)
    flush(port)
    own_cold = ask([port], longer, params | {"max_new_tokens": 36}, 1)

    def ids(answers: list[dict]) -> list[list[int]]:
        return [a["output_ids"] for a in answers]

    parted = differences(plain, asked, ids(cold), ids(warm))["parted"]
    parted += differences(plain, longer, ids(own_cold), ids(own_warm))["parted"]
    parted += differences(plain, longer, ids(own_warm), [text[60:] for text in ids(cold)])["parted"]
    hits = [a["meta_info"]["cached_tokens"] - len(prompt) for a, prompt in zip(own_warm, asked, strict=True)]
    cached = name == "no-radix" or min(hits) >= 50
    return {
        "server": name,
        "prompts": len(asked),
        "least generated tokens in the cache": min(hits),
        "parted": parted,
        "passed": cached and all(p["margin"] < NEAR_TIE for p in parted),
    }


def _load(run: Run, servers: dict[str, GpuServer], plain: int, asked: list, texts: list) -> dict:
    limits = {name: settled(server.port) for name, server in servers.items()}
    plans = {
        name: Plan(
            port=server.port,
            context=CONTEXT,
            prompts=asked,
            texts=texts,
            widths=WIDTHS[: run.count(len(WIDTHS), 4)],
            hold=run.count(30, 80) / 10,
            request_steps=run.count(50_000, 300),  # beyond reach: the deadline ends it
            deadline=run.count(165, 240),
            seed=number,
        )
        for number, (name, server) in enumerate(servers.items())
    }
    sizes = {name: [group_memory(server.process.pid)] for name, server in servers.items()}
    logged = {name: server.log.stat().st_size for name, server in servers.items()}
    with ProcessPoolExecutor(len(plans), multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(run_load, plan) for name, plan in plans.items()}
        while not all(future.done() for future in running.values()):
            time.sleep(2)
            for name, server in servers.items():
                sizes[name].append(group_memory(server.process.pid))
        seen = {name: future.result() for name, future in running.items()}
    rows = []
    for name, server in servers.items():
        graphs, batches = graph_sizes(server.log), steps_by_batch(server.log, logged[name])
        counted = {
            "server": name,
            "batch_steps": sum(batches.values()),
            "graph_sizes": graphs,
            "steps_by_batch": {str(bs): batches[bs] for bs in sorted(batches)},
            "steps_above_the_graphs": sum(n for bs, n in batches.items() if bs > max(graphs, default=0)),
        }
        row = _row(server, plain, seen[name], plans[name], limits[name], sizes[name])
        rows.append(counted | row)
    total = sum(row["batch_steps"] for row in rows)
    retracted = next(row["retractions"] for row in rows if row["server"] == "tight")
    graphs = {size for row in rows for size in row["graph_sizes"]}
    unseen = sorted(size for size in graphs if not any(row["steps_by_batch"].get(str(size)) for row in rows))
    above = sum(row["steps_above_the_graphs"] for row in rows)
    return {
        "rows": rows,
        "graph_sizes_without_a_step": unseen,
        "steps_above_the_graphs": above,
        "batch_steps": total,
        "request_steps": sum(row["request_steps"] for row in rows),
        "passed": total >= run.count(STEPS, 200)
        and retracted > 0
        and bool(graphs or run.rehearsal)
        and not unseen
        and above > 0
        and all(row["passed"] for row in rows),
    }


def _row(server: GpuServer, plain: int, seen: Seen, plan: Plan, before: dict, sizes: list[float]) -> dict:
    margins = [_margin(plain, plan, part) for part in sorted(seen.parted)]
    try:
        after = settled(server.port)
        healthy = _get(server.port, "/health")[0] == 200
        # All of the pool is free again: a prompt that needs most of the smallest is served without the cache.
        (whole,) = generate(server.port, [1] + plan.prompts[0][1:2] * (CONTEXT - 100), {"max_new_tokens": 90})
        fits = len(whole["output_ids"]) > 0
    except (OSError, RuntimeError, TimeoutError) as error:
        after, healthy, fits = {"failed": repr(error)}, False, False
    growth = sizes[-1] - sizes[len(sizes) // 3]
    return {
        "seconds": round(seen.seconds, 1),
        "request_steps": seen.request_steps,
        "tokens": seen.tokens,
        "asked": dict(seen.asked),
        "retractions": seen.retractions,
        "cached_hits": seen.cached_hits,
        "wrong": seen.wrong[:20],
        "wrong_count": len(seen.wrong),
        "greedy_parted": {"count": len(margins), "worst_margin": max(margins, default=0.0)},
        "before": before,
        "after": after,
        "healthy": healthy,
        "memory_mib": {"start": sizes[0], "third": sizes[len(sizes) // 3], "end": sizes[-1], "growth": growth},
        "passed": not seen.wrong
        and after == before
        and healthy
        and fits
        and growth < GROWTH_MIB
        and all(margin < NEAR_TIE for margin in margins),
    }


def _margin(plain: int, plan: Plan, part: tuple[int, int, int]) -> float:
    """What plain decoding thinks of its two best tokens where a greedy text parted from its own."""
    i, own, at = part
    context = plan.prompts[i] + plan.texts[i][: own + at]
    params = {"temperature": 0, "max_new_tokens": 1}
    (answer,) = generate(plain, context, params, return_logprob=True, top_logprobs_num=2)
    best, second = answer["meta_info"]["output_top_logprobs"][0]
    return float(best[0] - second[0])


# ---- what a server says of itself ------------------------------------------------------------------------------


def flush(port: int, patience: float = 60) -> None:
    """Empty the radix cache, which is refused while a request runs."""
    deadline = time.monotonic() + patience
    while _get(port, "/flush_cache", "POST")[0] != 200:
        if time.monotonic() > deadline:
            raise TimeoutError(f"port {port}: a request is still running after {patience:.0f} s")
        time.sleep(0.3)


def settled(port: int) -> dict:
    """Requests and KV tokens in use of an idle server with an empty cache; raises TimeoutError if it stays busy."""
    flush(port)
    status, body = _get(port, "/v1/loads")
    if status != 200:
        raise RuntimeError(f"/v1/loads answered {status}")
    (load,) = json.loads(body)["loads"]
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "max_running_requests")
    return {name: load[name] for name in names}


def graph_sizes(log: Path) -> list[int]:
    """Batch sizes that have a CUDA graph, by the server's log: of the target's runner, which is the first."""
    said = r"Capture (?:cuda graph bs |target [^\n]*bs=)\[([\d, ]+)\]"
    captured = re.search(said, log.read_text(errors="replace"))
    return [int(size) for size in captured[1].split(",")] if captured else []


def steps_by_batch(log: Path, since: int) -> Counter:
    """{batch size: decode steps} of a log that has every step, from byte `since` on."""
    text = log.read_bytes()[since:]
    return Counter(int(size) for size in re.findall(rb"Decode batch[^\n]*?#running-req: (\d+)", text))


def complaints(log: Path) -> list[str]:
    """Lines of trouble since the server was ready; what it says while it starts is judged by whether it started."""
    lines = log.read_text(errors="replace").partition("The server is fired up")[2].split("\n")
    return [line[:300] for line in lines if any(sign in line for sign in COMPLAINTS)][:20]


def group_memory(pgid: int) -> float:
    """MiB resident in the processes of a group."""
    pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # ended since the listing
            continue
        if int(fields[2]) == pgid:
            pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
