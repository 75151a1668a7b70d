"""Run named experiments on a GPU host and write one JSON file each: scripts/gpu/README.md has the order of work.

    python3 -m scripts.gpu.run --venv VENV --stock STOCK_VENV --work DIR --out DIR op exact ...

VENV has the patched SGLang, STOCK_VENV the release as it came. Experiments that are named together share their servers.
"""

import argparse
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
    "tp2": "scripts.gpu.tp2",
    "long": "scripts.gpu.long_run",
    "tool": "scripts.gpu.tool",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True, help="environment with the patched SGLang")
    parser.add_argument("--stock", type=Path, required=True, help="environment with the release as it came")
    parser.add_argument("--work", type=Path, required=True, help="for logs and copies")
    parser.add_argument("--out", type=Path, required=True, help="for the JSON files")
    parser.add_argument("--replicas", type=int, default=2, help="servers of each kind that is asked most")
    parser.add_argument("--first-port", type=int, default=31000)
    parser.add_argument("--rehearsal", action="store_true", help="on a CPU, few samples: does it run at all?")
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    modules = {name: import_module(EXPERIMENTS[name]) for name in args.experiments}
    run = Run(args)
    try:
        run.launch_pair(server for module in modules.values() for server in getattr(module, "SERVERS", ()))
        for module in modules.values():
            if hasattr(module, "launch"):
                module.launch(run)
        waited = False
        for name, module in sorted(modules.items(), key=lambda item: not getattr(item[1], "MEANWHILE", False)):
            if not waited and not getattr(module, "MEANWHILE", False):
                run.wait_pair()
                waited = True
            print(name, flush=True)
            began = time.monotonic()
            try:
                run.write(name, module.run(run))
            except Exception:
                run.failed.append(name)
                traceback.print_exc()
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        run.stop_all()
    if run.failed:
        print(f"failed: {'; '.join(run.failed)}", flush=True)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
