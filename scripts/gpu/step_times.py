"""Times of a server's verify steps, taken inside its scheduler process.

Imported by hook/sitecustomize.py where STEP_TIMES names a folder. Nothing in SGLang is edited: when one of the modules
in SEAMS is first imported, functions of it are wrapped. A decode step gives one JSON line in `FOLDER/steps-PID.jsonl`:

    {"at": monotonic s, "ms": in the worker, "bs": requests, "greedy": bool,
     "parts": {part: [calls, host ms, GPU ms or null]}, "syncs": [places]}

`parts` are taken while the file `FOLDER/parts` exists: the host's time inside the calls, and the time that passed on
the GPU between the calls' first and last kernel (CUDA events). They cost some microseconds each, so a whole step is
timed without them. `syncs` are taken while `FOLDER/syncs` exists: where, before the commit, the host waited for the
GPU. At SIGUSR2 the process writes where its threads are to `FOLDER/stacks-PID.txt`.
"""

import faulthandler
import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

FOLDER = Path(os.environ["STEP_TIMES"]) if "STEP_TIMES" in os.environ else None
FLUSH = 16  # steps; lines of the steps after the last flush are lost when the server ends
WHOLE = "forward_batch_generation"
SPEC = "sglang.srt.speculative."
# {module: {name, or Class.method: part}}. Parts may lie inside each other. A name that a release lacks is left out.
SEAMS = {
    "sglang.srt.model_executor.model_runner": {"ModelRunner.forward": "forward"},  # draft's or target's, by its runner
    SPEC + "dflash_info": {
        "DFlashVerifyInput.prepare_for_verify": "slots",
        "DFlashVerifyInput.verify": "decide and commit",
    },
    SPEC + "dflash_target_probs": {"build_target_probs": "target probabilities"},
    SPEC + "dflash_verify_op": {"walk_by_op": "walk"},
    SPEC + "dflash_worker": {
        "DFlashWorker._prepare_for_speculative_decoding": "draft, all",
        "DFlashWorker._greedy_sample_from_vocab_parallel_head": "draft candidates",
        "DFlashWorker._append_target_hidden_to_draft_kv": "append to draft KV",
    },
    SPEC + "ddtree_info": {
        "DDTreeVerifyInput.prepare_for_verify": "slots and mask",
        "DDTreeVerifyInput.verify": "decide and commit",
        "DDTreeVerifyInput._commit": "commit",
        "build_tree_mask": "mask",
    },
    SPEC + "ddtree_decide": {"decide": "decide"},
    SPEC + "ddtree_candidates": {"top_candidates": "draft top-k"},
    SPEC + "ddtree_worker": {
        "DDTreeWorker._prepare_tree_verify": "tree, all",
        "DDTreeWorker._draft_candidates": "draft candidates",
        "build_tree": "build",
    },
}


class Step:
    """The step under way, and the lines of those before it."""

    def __init__(self):
        self.parts: dict[str, list] | None = None  # {part: [[host s, first event, last event], ...]}
        self.lines: list[dict] = []
        self.catcher: warnings.catch_warnings | None = None
        self.caught: list = []

    def flush(self) -> None:
        with (FOLDER / f"steps-{os.getpid()}.jsonl").open("a") as out:
            for line in self.lines:
                out.write(json.dumps(_resolved(line)) + "\n")
        self.lines.clear()


STEP = Step()


def _resolved(line: dict) -> dict:
    parts = {}
    for name, calls in line.pop("parts").items():
        gpu = None
        if calls[0][1] is not None:
            for _, _, last in calls:
                last.synchronize()
            gpu = sum(first.elapsed_time(last) for _, first, last in calls)
        parts[name] = [len(calls), sum(host for host, _, _ in calls) * 1e3, gpu]
    return line | {"parts": parts}


def _event():
    import torch

    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_steps(method):
    """Wrap the worker's forward_batch_generation."""

    @functools.wraps(method)
    def whole(self, batch, *args, **kwargs):
        mode = getattr(batch, "forward_mode", None)
        if mode is None or mode.is_extend() or not mode.is_decode() or getattr(batch, "is_extend_in_batch", False):
            return method(self, batch, *args, **kwargs)
        requests, greedy = batch.batch_size(), batch.sampling_info.is_all_greedy
        if (FOLDER / "parts").exists():
            STEP.parts = {}
        if (FOLDER / "syncs").exists():
            _watch_syncs()
        began = time.monotonic()
        try:
            return method(self, batch, *args, **kwargs)
        finally:
            ended = time.monotonic()
            syncs = _end_syncs()
            STEP.lines.append(
                {
                    "at": began,
                    "ms": (ended - began) * 1e3,
                    "bs": requests,
                    "greedy": bool(greedy),
                    "parts": STEP.parts or {},
                    "syncs": syncs,
                }
            )
            STEP.parts = None
            if len(STEP.lines) >= FLUSH:
                STEP.flush()

    return whole


def time_part(function, part: str):
    @functools.wraps(function)
    def timed(*args, **kwargs):
        if part == "commit":
            _end_syncs(keep=True)
        if STEP.parts is None:
            return function(*args, **kwargs)
        name = part
        if part == "forward":
            name = "draft forward" if args[0].is_draft_worker else "verify forward"
        first, began = _event(), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            host = time.perf_counter() - began
            STEP.parts.setdefault(name, []).append([host, first, _event() if first else None])

    return timed


def time_head(method):
    """Inside _draft_candidates, the product with the head apart from what is done with its logits."""

    @functools.wraps(method)
    def with_head(*args, **kwargs):
        if STEP.parts is None:
            return method(*args, **kwargs)
        import torch

        matmul = torch.matmul
        torch.matmul = time_part(matmul, "draft head")
        try:
            return method(*args, **kwargs)
        finally:
            torch.matmul = matmul

    return with_head


# ---- where the host waits ------------------------------------------------------------------------------------


def _watch_syncs() -> None:
    import torch

    if torch.cuda.is_available():
        STEP.catcher = warnings.catch_warnings(record=True)
        STEP.caught = STEP.catcher.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")


def _end_syncs(keep: bool = False) -> list[str]:
    """Stop watching. Gives what was seen, unless it is to be kept for the end of the step."""
    import torch

    if STEP.catcher is not None:
        torch.cuda.set_sync_debug_mode("default")
        STEP.catcher.__exit__(None, None, None)
        STEP.catcher = None
    if keep:
        return []
    caught, STEP.caught = STEP.caught, []
    return [f"{w.filename.split('site-packages/')[-1]}:{w.lineno}" for w in caught if "synchron" in str(w.message)]


# ---- the import hook -----------------------------------------------------------------------------------------


def wrap(module) -> None:
    for path, part in SEAMS[module.__name__].items():
        owner, _, name = path.rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        if holder is None or name not in vars(holder):
            continue
        timed = time_part(vars(holder)[name], part)
        setattr(holder, name, time_head(timed) if part == "draft candidates" else timed)
    if module.__name__ == SPEC + "dflash_worker":
        setattr(module.DFlashWorker, WHOLE, time_steps(vars(module.DFlashWorker)[WHOLE]))


class _Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        wrap(module)

    def __getattr__(self, name):  # get_source and the like
        return getattr(self.inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in SEAMS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if FOLDER is not None:
    sys.meta_path.insert(0, _Finder())
    faulthandler.register(signal.SIGUSR2, file=(FOLDER / f"stacks-{os.getpid()}.txt").open("w"))
