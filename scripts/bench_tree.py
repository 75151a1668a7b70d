"""What DDTREE's draft side costs on a GPU: the kernels beside the torch operations they replace, in one run.

    python -m scripts.bench_tree [--speculative DIR] > tree.json

Needs torch and triton; with --speculative DIR (the directory of ddtree_tree.py and ddtree_kernels.py) no SGLang.
Microseconds, medians of several runs: `gpu` from replays of a CUDA graph, so without gaps between launches; `host` how
long the caller is held; `whole` from the call to the end of the device's work.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from scripts.speculative import load

BATCHES = (1, 2, 4, 8, 16, 32)
VOCABULARY = 151_936
PREFIX = 1000  # tokens before the tree, of each request
REPEATS = 20  # calls in a graph, or between two looks at the clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speculative", type=Path, help="directory of the modules, on a host without SGLang")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--budget", type=int, default=64)
    options = parser.parse_args()
    kernels = [load(name, options.speculative) for name in ("ddtree_tree", "ddtree_kernels", "ddtree_top_kernels")]
    results = []
    for bs in BATCHES:
        for case in (tree_case, top_case):
            calls = case(bs, options, *kernels)
            results.append({"case": case.__name__, "bs": bs, **compare(calls, options.runs)})
            print(json.dumps(results[-1]), file=sys.stderr)
    json.dump(
        {
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
            "command": sys.argv,
            "depth": options.depth,
            "topk": options.topk,
            "budget": options.budget,
            "vocabulary": VOCABULARY,
            "prefix": PREFIX,
            "runs": options.runs,
            "results": results,
        },
        sys.stdout,
        indent=1,
    )


def tree_case(bs: int, options: argparse.Namespace, in_torch, kernels, _) -> dict[str, Callable]:
    """From candidates to the tree, its links and its mask."""
    scores = torch.randn(bs, options.depth, 1000, device="cuda") * 2
    logps, ids = scores.log_softmax(-1).topk(options.topk)
    roots = torch.arange(bs, device="cuda")
    prefixes = torch.full((bs,), PREFIX, device="cuda")

    def steps(module):
        tree = module.build_tree(roots, logps, ids, options.budget)
        return module.build_tree_mask(tree.ancestors, prefixes, PREFIX * bs)

    return {"torch": lambda: steps(in_torch), "kernels": lambda: steps(kernels)}


def top_case(bs: int, options: argparse.Namespace, in_torch, _, kernels) -> dict[str, Callable]:
    """From bfloat16 logits to the best tokens and the norm; `topk` is torch.topk alone, on float32."""
    logits = torch.randn(bs * options.depth, VOCABULARY, device="cuda").to(torch.bfloat16) * 2
    wide = logits.float()
    return {
        "torch": lambda: in_torch.top_candidates(logits, options.topk),
        "topk": lambda: wide.topk(options.topk, dim=-1),
        "kernels": lambda: kernels.top_candidates(logits, options.topk),
    }


def compare(calls: dict[str, Callable], runs: int) -> dict[str, dict[str, float]]:
    """{name: {"gpu", "host", "whole"}} in microseconds; the calls take turns."""
    graphs = {name: captured(call) for name, call in calls.items()}
    seen = {name: {"gpu": [], "host": [], "whole": []} for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            seen[name]["gpu"].append(gpu_time(graphs[name]))
            for kind, value in zip(("host", "whole"), host_times(call), strict=True):
                seen[name][kind].append(value)
    found = {
        name: {kind: round(statistics.median(values), 1) for kind, values in kinds.items()}
        for name, kinds in seen.items()
    }
    for name in calls.keys() - {"kernels"}:
        ratios = [one / other for one, other in zip(seen[name]["gpu"], seen["kernels"]["gpu"], strict=True)]
        found[name]["gpu_over_kernels"] = round(statistics.median(ratios), 2)
    return found


def captured(call: Callable) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills the allocator
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    return graph


def gpu_time(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / REPEATS


def host_times(call: Callable) -> tuple[float, float]:
    hosts, wholes = [], []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        hosts.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        wholes.append(time.perf_counter() - begin)
    return statistics.median(hosts) * 1e6, statistics.median(wholes) * 1e6


if __name__ == "__main__":
    main()
