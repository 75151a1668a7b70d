"""What the target distribution of a verify forward costs on a GPU: our kernel, the torch path, a plain argmax.

    python -m scripts.bench_target_probs --modules DIR [--vocab 151936] [--nodes 33] [--batch 1,4,16] [--runs 5]
                                         [--out FILE]

DIR holds dflash_target_probs.py and dflash_sampling_*.py of a patched sglang/srt/speculative; of SGLang nothing else is
needed, only torch and triton. Every figure is a median over runs, in microseconds: `gpu` between CUDA events with many
calls under way, `host` the wall clock of the calls alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import triton

from scripts import speculative

SETTINGS = {
    "T": {},
    "top_k 20": {"top_k": 20},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}
# Scale of normal logits, rounded to bfloat16 as a model's are; "smooth" is not rounded.
SHAPES = {"flat": 0.3, "peaked": 4.0, "smooth": 0.3}
TOP_K_ALL = 1 << 30
CALLS = 20  # under way between two events


def load(directory: Path) -> ModuleType:
    """dflash_target_probs of a patched SGLang, with a stand-in for what it asks of a running SGLang."""
    release = ModuleType("sglang.srt.speculative.dflash_release")
    release.from_first_rank = lambda tensor: tensor
    release.sampling_args = lambda: SimpleNamespace(backend="pytorch")
    sys.modules[release.__name__] = release
    return speculative.load("dflash_target_probs", directory)


def sampling_info(bs: int, device: str, *, temperature=0.8, top_k=TOP_K_ALL, top_p=1.0, min_p=0.0) -> SimpleNamespace:
    """The tensors of a SamplingBatchInfo of `bs` equal requests."""
    return SimpleNamespace(
        temperatures=torch.full((bs, 1), temperature, device=device),
        top_ks=torch.full((bs,), top_k, dtype=torch.int32, device=device),
        top_ps=torch.full((bs,), top_p, device=device),
        min_ps=torch.full((bs,), min_p, device=device),
    )


def plan_of(module: ModuleType, vocab: int, *, top_k=TOP_K_ALL, top_p=1.0, min_p=0.0):
    """The SamplingPlan of such requests."""
    width = top_k if top_k < vocab else vocab if top_p < 1 else 0
    return module.SamplingPlan(has_greedy=False, sort_width=width, has_min_p=min_p > 0, top_k_first=False)


def torch_path(module: ModuleType, logits: torch.Tensor, **arguments):
    """What build_target_probs does for tensors that are not on a GPU, done there."""
    return module._target_probs_by_torch(logits=logits, **arguments)


def measure(call, runs: int) -> dict[str, float]:
    """{"gpu": us, "host": us} of one call: medians over runs of CALLS calls."""
    for _ in range(3):
        call()
    gpu, host = [], []
    for _ in range(runs):
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # about 10 ms, so that the host is ahead
        first.record()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        host.append((time.perf_counter() - began) / CALLS * 1e6)
        last.record()
        torch.cuda.synchronize()
        gpu.append(first.elapsed_time(last) / CALLS * 1e3)
    return {"gpu": round(statistics.median(gpu), 1), "host": round(statistics.median(host), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--nodes", type=int, default=33)
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    module, device = load(options.modules), "cuda"
    rows = []
    for bs in map(int, options.batch.split(",")):
        for shape, scale in SHAPES.items():
            logits = torch.randn((bs * options.nodes, options.vocab), device=device).mul_(scale)
            if shape != "smooth":
                logits = logits.bfloat16().float()
            argmax = measure(lambda logits=logits: logits.argmax(-1), options.runs)
            for name, setting in SETTINGS.items():
                arguments = {
                    "sampling_info": sampling_info(bs, device, **setting),
                    "plan": plan_of(module, options.vocab, **setting),
                    "rows_per_request": options.nodes,
                }
                kernel = measure(
                    lambda logits=logits, a=arguments: module.build_target_probs(logits=logits, **a), options.runs
                )
                by_torch = measure(lambda logits=logits, a=arguments: torch_path(module, logits, **a), options.runs)
                rows.append(
                    {
                        "bs": bs,
                        "logits": shape,
                        "setting": name,
                        "kernel": kernel,
                        "torch": by_torch,
                        "argmax": argmax,
                        "gpu_above_argmax": round(kernel["gpu"] - argmax["gpu"], 1),
                        "torch_over_kernel": round(by_torch["gpu"] / kernel["gpu"], 2),
                    }
                )
                print(
                    f"bs {bs:2} {shape:6} {name:21} kernel {kernel['gpu']:7} us, torch {by_torch['gpu']:8} us, "
                    f"argmax {argmax['gpu']:6} us; host {kernel['host']} us",
                    flush=True,
                )
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "runs": options.runs,
        "calls_a_run": CALLS,
        "vocab": options.vocab,
        "nodes": options.nodes,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
