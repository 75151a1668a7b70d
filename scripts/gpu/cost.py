"""What a step costs: an 8B shape with dummy weights, patched DDTREE and DFLASH beside stock DFLASH.

The servers start together, and one at a time is asked while the others sleep. Whole steps are timed from the start of
one to the start of the next, without any timer inside; the ways to sample take turns, round by round, so that their
ratios come from one stretch of time. With dummy weights nothing is accepted and the target's rows are nearly flat,
which is the hardest case for top-p; "peaked" modes bias 60 tokens, as a trained model's rows are.
"""

import itertools
import json
import os
import re
import signal
import statistics
import time
from pathlib import Path

from scripts.gpu.fleet import ROOT, Run
from scripts.gpu.releases import verify_steps
from scripts.gpu.server import generate

BLOCK, BUDGET, TOPK = 16, 32, 8
BATCHES = (1, 4, 16)
# One request each when a server is ready: how long does a combination of sampling parameters take the first time?
SAMPLING = {
    "T=0": {"temperature": 0},
    "T=1": {"temperature": 1},
    "T=1 top_k": {"temperature": 1, "top_k": 20},
    "T=1 top_p": {"temperature": 1, "top_p": 0.95},
    "T=1 top_k top_p": {"temperature": 1, "top_k": 20, "top_p": 0.95},
    "T=1 min_p": {"temperature": 1, "min_p": 0.05},
}
PEAKS = {"logit_bias": {str(1000 + 37 * i): 14.0 - 0.35 * i for i in range(60)}}
MODES = SAMPLING | {f"{name}, peaked": SAMPLING[name] | PEAKS for name in ("T=0", "T=1 top_p", "T=1 top_k top_p")}
# Stock DFLASH ignores min-p, and two of its servers stopped answering at 16 requests with top-k and top-p over flat
# rows, where its kernel need not end (renorm.py): that is tried last.
HANGING = "T=1 top_k top_p"
STOCK_MODES = [mode for mode in MODES if mode not in ("T=1 min_p", HANGING)]
STEPS, ROUNDS = 16, 10
WARM = 3  # steps at the begin of a window that do not count
HANGS = 60.0  # seconds for an answer of less than one
FIRST = 240.0  # the same where the release may compile: FlashInfer's sampling takes nvcc 77 to 92 s


def run(run: Run) -> dict:
    run.stop_all()  # what others started would share the GPU
    target, draft = write_shape(run.args.work.absolute() / "shape", tiny=run.rehearsal)
    common = [
        *("--load-format", "dummy", "--mem-fraction-static", "0.75", "--context-length", "2048"),
        *("--max-total-tokens", "32768", "--max-running-requests", "16", "--sleep-on-idle"),
        *("--cuda-graph-bs", *(str(batch) for batch in BATCHES)),
    ]
    spec = ["--speculative-draft-model-path", str(draft), "--speculative-algorithm"]
    numbers = ["--speculative-ddtree-budget", str(BUDGET), "--speculative-ddtree-topk", str(TOPK)]
    servers = {
        "ddtree": ("patched", [*spec, "DDTREE", *numbers]),
        "dflash": ("patched", [*spec, "DFLASH"]),
        "dflash-stock": ("stock", [*spec, "DFLASH"]),
    }
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    folders = {}
    for name, (venv, args) in servers.items():
        folders[name] = run.args.work.absolute() / f"steps-{name}"
        folders[name].mkdir()
        env = {"STEP_TIMES": str(folders[name]), "PYTHONPATH": f"{ROOT}/scripts/gpu/hook:{ROOT}"}
        if name == "dflash-stock" and len(gpus) > 1:
            env["CUDA_VISIBLE_DEVICES"] = gpus[1]
        run.start(name, run.python(venv), target, [*common, *args], env)
    for name in servers:
        run.servers[name][0].wait_ready(420)
        print(f"  {name}: ready after {run.servers[name][0].ready_after:.0f} s", flush=True)
    found = {
        "shape": json.loads((target / "config.json").read_text()),
        "draft": json.loads((draft / "config.json").read_text()),
        "servers": {name: [*common, *args] for name, (_, args) in servers.items()},
        "budget": BUDGET,
        "topk": TOPK,
    }
    measures = {
        name: lambda name=name: _measure(
            run, run.servers[name][0].port, folders[name], STOCK_MODES if name == "dflash-stock" else list(MODES)
        )
        for name in servers
    }
    measures["flat top_k top_p"] = lambda: _ends(run, folders["dflash-stock"])
    return run.steps("cost", found, measures)


def _prompts(batch: int, vocabulary: int) -> list[list[int]]:
    return [[(b * 7919 + i * 104_729) % vocabulary for i in range(64)] for b in range(batch)]


def _ends(run: Run, folder: Path) -> dict:
    """Does the release answer HANGING? {"answered": [batch sizes], and "stopped": batch size, "where": stack}."""
    answered = []
    port = run.servers["dflash-stock"][0].port
    for batch in BATCHES[: run.count(len(BATCHES), 2)]:
        params = MODES[HANGING] | {"max_new_tokens": STEPS, "ignore_eos": True}
        try:
            generate(port, _prompts(batch, 500 if run.rehearsal else 150_000), params, timeout=HANGS)
        except TimeoutError:
            where = _where(folder)
            run.stop("dflash-stock")
            return {"answered": answered, "stopped": batch, "seconds": HANGS, "where": where}
        answered.append(batch)
    return {"answered": answered}


def _where(folder: Path) -> list[str]:
    """What the scheduler of a server is doing: its threads' frames, the innermost first."""
    (pid,) = (int(path.stem.partition("-")[2]) for path in folder.glob("steps-*.jsonl"))
    os.kill(pid, signal.SIGUSR2)
    time.sleep(1)
    lines = (folder / f"stacks-{pid}.txt").read_text().splitlines()
    return [re.sub(r'".*/site-packages/', '"', line.strip()) for line in lines]


def _measure(run: Run, port: int, folder: Path, modes: list[str]) -> dict:
    vocabulary = 500 if run.rehearsal else 150_000
    steps, rounds = run.count(STEPS, 8), run.count(ROUNDS, 2)
    batches = BATCHES[: run.count(len(BATCHES), 2)]

    rate = dict.fromkeys(modes, 1.0)  # tokens a step

    def ask(mode: str, batch: int, wanted: int, timeout: float = HANGS) -> tuple[float, float]:
        """When it was asked and when it was answered; `wanted` steps, as far as the rate is known."""
        params = MODES[mode] | {"max_new_tokens": 1 + round(wanted * rate[mode]), "ignore_eos": True}
        if run.rehearsal and "logit_bias" in params:
            params |= {"logit_bias": {"5": 3.0}}
        began = time.monotonic()
        answers = generate(port, _prompts(batch, vocabulary), params, timeout)
        ended = time.monotonic()
        info = answers[0]["meta_info"]
        rate[mode] = max(1.0, (info["completion_tokens"] - 1) / verify_steps(info))
        return began, ended

    first = {}
    for mode in (mode for mode in SAMPLING if mode in modes):
        times = [ask(mode, 1, 3, FIRST) for _ in range(3)]
        first[mode] = [ended - began for began, ended in times]
    for mode in modes:
        ask(mode, 1, steps)  # for its rate
    # The ways to sample take turns, each round beginning with another one.
    plan = [
        (kind, number, batch, mode)
        for kind, turns in (("whole", rounds), ("parts", 1), ("syncs", 1))
        for number in range(turns)
        for batch in batches
        for mode in modes[number % len(modes) :] + modes[: number % len(modes)]
        if kind != "syncs" or (batch == 4 and "peaked" not in mode)
    ]
    windows = []
    stopped = None
    for kind, number, batch, mode in plan:
        for flag in ("parts", "syncs"):
            (folder / flag).touch() if kind == flag else (folder / flag).unlink(missing_ok=True)
        try:
            windows.append((kind, number, batch, mode, *ask(mode, batch, steps)))
        except TimeoutError:
            stopped = {"batch": batch, "mode": mode, "answered": len(windows), "seconds": HANGS}
            run.failed.append(f"cost: the server of {folder.name} gave no answer: {stopped}")
            stopped["where"] = _where(folder)
            break
    else:
        ask("T=0", 1, 64)  # so that the lines of all steps before are written
    lines = [json.loads(line) for path in folder.glob("steps-*.jsonl") for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: line["at"])
    return {"stopped_answering": stopped, "first_use_s": first, "tokens_a_step": rate, **_summary(windows, lines)}


def _summary(windows: list[tuple], lines: list[dict]) -> dict:
    """{"steps": [row a batch and mode], "parts": [the same], "syncs": {mode: {place: times a step}}}."""
    whole: dict[tuple, list[list[float]]] = {}
    worker: dict[tuple, list[float]] = {}
    parts: dict[tuple, dict[str, list]] = {}
    syncs: dict[str, dict[str, float]] = {}
    for kind, _, batch, mode, began, ended in windows:
        own = [line for line in lines if began <= line["at"] <= ended and line["bs"] == batch][WARM:]
        if kind == "whole":
            whole.setdefault((batch, mode), []).append([(b["at"] - a["at"]) * 1e3 for a, b in itertools.pairwise(own)])
            worker.setdefault((batch, mode), []).extend(line["ms"] for line in own)
        elif kind == "parts":
            for line in own:
                for name, (calls, host, gpu) in line["parts"].items():
                    parts.setdefault((batch, mode), {}).setdefault(name, []).append((calls, host, gpu))
        else:
            for place in (place for line in own for place in line["syncs"]):
                syncs.setdefault(mode, {}).setdefault(place, 0.0)
                syncs[mode][place] += 1 / len(own)
    return {
        "steps": [
            {
                "batch": batch,
                "mode": mode,
                "n": sum(len(times) for times in rounds),
                "step_ms": statistics.median(time for times in rounds for time in times),
                "rounds_ms": [statistics.median(times) for times in rounds if times],
                "scheduler_ms": statistics.median(t for ts in rounds for t in ts)
                - statistics.median(worker[batch, mode]),
            }
            for (batch, mode), rounds in whole.items()
            if any(rounds)
        ],
        "parts": [
            {
                "batch": batch,
                "mode": mode,
                "n": max(len(seen) for seen in by_name.values()),
                "parts": {
                    name: {
                        "calls": statistics.median(calls for calls, _, _ in seen),
                        "host_ms": statistics.median(host for _, host, _ in seen),
                        "gpu_ms": None if seen[0][2] is None else statistics.median(gpu for _, _, gpu in seen),
                    }
                    for name, seen in by_name.items()
                },
            }
            for (batch, mode), by_name in parts.items()
        ],
        "syncs_before_commit": syncs,
    }


def write_shape(folder: Path, tiny: bool) -> tuple[Path, Path]:
    """Configurations of Qwen3-8B and of a draft for it, without weights; `tiny` for a rehearsal."""
    target, draft = folder / "target", folder / "draft"
    layers, taken = (4, [0, 1, 2]) if tiny else (36, [1, 9, 17, 25, 33])
    base = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512 if tiny else 151_936,
        "hidden_size": 128 if tiny else 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 4 if tiny else 32,
        "num_key_value_heads": 2 if tiny else 8,
        "head_dim": 32 if tiny else 128,
        "intermediate_size": 128 if tiny else 12_288,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
    }
    changes = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": len(taken),
        "block_size": BLOCK,
        "num_target_layers": layers,
        "dflash_config": {"mask_token_id": 500 if tiny else 151_669, "target_layer_ids": taken},
    }
    for path, config in ((target, base), (draft, base | changes)):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))
    return target, draft
