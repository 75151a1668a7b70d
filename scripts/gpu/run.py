"""Run named experiments on a GPU host and write one JSON file each: scripts/gpu/README.md has the order of work.

    python3 -m scripts.gpu.run --environments DIR --release 0.5.17 --work DIR --out DIR op exact ...

DIR/RELEASE/stock is an environment with the release as it came, DIR/RELEASE/patched one with the series applied.
Experiments that are named together share their servers. CUDA_VISIBLE_DEVICES says which GPU they have.
"""

import argparse
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from scripts.gpu.fleet import Run

# Each is a module with `run(run: Run) -> dict`, which runs the experiment and returns its result; what it needs of
# fleet.SERVERS is in its SERVERS, servers of its own are started by its `launch(run)`; all of them are ready, or given
# up, before it is called. One with MEANWHILE runs while they start.
EXPERIMENTS = {
    "op": "scripts.gpu.op",
    "exact": "scripts.gpu.exact",
    "cuts": "scripts.gpu.cuts",
    "texts": "scripts.gpu.texts",
    "greedy": "scripts.gpu.greedy",
    "acceptance": "scripts.gpu.acceptance",
    "sweep": "scripts.gpu.sweep",
    "refusals": "scripts.gpu.refusals",
    "cost": "scripts.gpu.cost",
    "renorm": "scripts.gpu.renorm",
    "mla": "scripts.gpu.mla",
    "tokens": "scripts.gpu.tokens",
    "cells": "scripts.gpu.cells",
    "tp2": "scripts.gpu.tp2",
    "long": "scripts.gpu.long_run",
    "tool": "scripts.gpu.tool",
}


class OutOfTime(BaseException):
    """The deadline has come. No Exception, so that a step which fails does not swallow it."""


def _out_of_time(run: Run) -> None:
    run.stop_all()  # whoever waits for an answer has it at once: none
    raise OutOfTime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, required=True, help="see above")
    parser.add_argument("--release", required=True, help="version of SGLang")
    parser.add_argument("--work", type=Path, required=True, help="for logs and copies")
    parser.add_argument("--out", type=Path, required=True, help="for the JSON files")
    parser.add_argument("--replicas", type=int, default=2, help="servers of each kind that is asked most")
    parser.add_argument("--big-pair", type=Path, help="of `tokens`, if inflate_pair.py has written it already")
    parser.add_argument("--first-port", type=int, default=31000)
    parser.add_argument("--start-deadline", type=float, default=420, help="seconds that a server may take to start")
    parser.add_argument("--deadline", type=int, default=0, help="seconds after which all is ended; 0 is never")
    parser.add_argument("--rehearsal", action="store_true", help="on a CPU, few samples: does it run at all?")
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    modules = {name: import_module(EXPERIMENTS[name]) for name in args.experiments}
    run = Run(args)
    signal.signal(signal.SIGTERM, lambda *_: _out_of_time(run))
    signal.signal(signal.SIGALRM, lambda *_: _out_of_time(run))
    signal.alarm(args.deadline)
    try:
        run.launch_pair(server for module in modules.values() for server in getattr(module, "SERVERS", ()))
        for module in modules.values():
            if hasattr(module, "launch"):
                module.launch(run)
        waited = False
        for name, module in sorted(modules.items(), key=lambda item: not getattr(item[1], "MEANWHILE", False)):
            if not waited and not getattr(module, "MEANWHILE", False):
                run.wait_pair(args.start_deadline)
                waited = True
            print(name, flush=True)
            began = time.monotonic()
            try:
                run.write(name, module.run(run))
            except Exception:
                run.failed.append(name)
                traceback.print_exc()
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    except OutOfTime:
        run.failed.append("the time was up")
    finally:
        signal.alarm(0)
        run.write_logs()
        run.stop_all()
    if run.failed:
        print(f"failed: {'; '.join(run.failed)}", flush=True)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
