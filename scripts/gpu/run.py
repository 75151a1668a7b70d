"""Run named experiments on a GPU host and write one JSON file each: scripts/gpu/README.md has the order of work.

    python3 -m scripts.gpu.run --venv VENV --stock STOCK_VENV --work DIR --out DIR op exact ...

VENV has the patched SGLang, STOCK_VENV the release as it came.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

from scripts.gpu import experiments
from scripts.gpu.server import GpuServer

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "tests" / "models" / "tiny-b8"
SMALL = ["--mem-fraction-static", "0.04", "--context-length", "2048", "--max-total-tokens", "65536"]
DRAFT = ["--speculative-draft-model-path", str(PAIR / "draft")]


def tree_args(budget: int, topk: int) -> list[str]:
    return [
        "--speculative-algorithm",
        "DDTREE",
        "--speculative-ddtree-budget",
        str(budget),
        "--speculative-ddtree-topk",
        str(topk),
        *DRAFT,
    ]


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.patched = args.venv / "bin" / "python"
        self.stock = args.stock / "bin" / "python"
        self.servers: dict[str, GpuServer] = {}
        self.next_port = 31000

    def server(self, name: str, python: Path, args: list[str], requests: int) -> GpuServer:
        self.next_port += 10
        limits = ["--max-running-requests", str(requests), "--cuda-graph-max-bs", str(requests)]
        server = GpuServer(
            name, python, self.next_port, self.args.work / f"{name}.log", PAIR / "target", [*SMALL, *limits, *args]
        )
        self.servers[name] = server
        return server.start()

    def start_all(self, wanted: dict[str, tuple[Path, list[str]]], requests: int, deadline: float) -> dict[str, int]:
        """Start servers together; gives their ports."""
        for name, (python, args) in wanted.items():
            self.server(name, python, args, requests)
        for name in wanted:
            self.servers[name].wait_ready(deadline)
            print(f"  {name}: ready after {self.servers[name].ready_after:.0f} s", flush=True)
        return {name: self.servers[name].port for name in wanted}

    def stop_all(self) -> None:
        for server in self.servers.values():
            server.stop()
        self.servers.clear()

    # ---- experiments ---------------------------------------------------------------------------------------

    def op(self) -> dict:
        result = subprocess.run(
            [
                str(self.patched),
                "-m",
                "pytest",
                "-q",
                "-m",
                "gpu",
                "tests/gpu/test_kernel_op.py",
                "-p",
                "no:cacheprovider",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return {"pytest_exit": result.returncode, "output": result.stdout[-2000:] + result.stderr[-1000:]}

    def exact(self) -> dict:
        """Sampled distributions and whole texts against plain decoding, by both ways to decide."""
        follow = self.args.work / "follow"
        if not follow.exists():
            shutil.copytree(self.args.venv, follow, symlinks=True)
            utils = next(follow.glob("lib/python3*/site-packages/sglang/srt/speculative/dflash_utils.py"))
            text = utils.read_text()
            hidden = text.replace(
                "_DFLASH_SAMPLING_VERIFY_AVAILABLE = True", "_DFLASH_SAMPLING_VERIFY_AVAILABLE = False"
            )
            if hidden == text:
                raise RuntimeError("the op could not be hidden: its flag was not found")
            utils.write_text(hidden)
        wanted = {
            "plain": (self.stock, []),
            "tree": (self.patched, tree_args(32, 8)),
            "tree-follow": (follow / "bin" / "python", tree_args(32, 8)),
            "dflash": (self.patched, ["--speculative-algorithm", "DFLASH", *DRAFT]),
            "tree-loose": (self.patched, [*tree_args(32, 8), "--speculative-accept-threshold-acc", "0.5"]),
            "dflash-stock": (self.stock, ["--speculative-algorithm", "DFLASH", *DRAFT]),
            "chain": (self.patched, tree_args(7, 1)),
        }
        ports = self.start_all(wanted, requests=64, deadline=300)

        def only(*names: str) -> dict[str, int]:
            return {name: ports[name] for name in ("plain", *names)}

        count = self.args.samples
        exact = [
            (
                f"T {t}, {cell}",
                lambda t=t, cell=cell: experiments.exact(only("tree", "tree-follow"), "plain", t, cell, count),
            )
            for t in (1.0, 0.6)
            for cell in experiments.CELLS
        ]
        speculative = {name: ports[name] for name in ("dflash-stock", "dflash", "chain", "tree")}
        return self.steps(
            "exact",
            wanted,
            dict(
                [
                    (
                        "T 1.0, plain, all",
                        lambda: experiments.exact(
                            only("tree", "tree-follow", "dflash", "tree-loose"), "plain", 1.0, "plain", count
                        ),
                    ),
                    ("mixed", lambda: experiments.exact_mixed(only("tree", "tree-follow"), "plain", count)),
                    *exact[1:5],
                    ("chain", lambda: experiments.acceptance(speculative)),
                    (
                        "greedy",
                        lambda: experiments.greedy(
                            only("dflash-stock", "dflash", "tree", "chain"), "plain", self.args.prompts
                        ),
                    ),
                    *exact[5:],
                    ("texts", lambda: experiments.texts(only("tree", "tree-follow", "tree-loose"), "plain")),
                ]
            ),
        )

    def steps(self, experiment: str, wanted: dict, steps: dict) -> dict:
        """Run the steps and write after each: what was measured before a failure stays worth having."""
        found: dict = {"servers": {name: args for name, (_, args) in wanted.items()}}
        for name, step in steps.items():
            began = time.monotonic()
            try:
                found[name] = step()
            except Exception:
                found[name] = {"failed": traceback.format_exc()[-3000:]}
                traceback.print_exc()
            print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
            self.write(experiment, found)
        return found

    def sweep(self) -> dict:
        """Acceptance of budgets and candidates against DFLASH."""
        wanted = {"dflash": (self.stock, ["--speculative-algorithm", "DFLASH", *DRAFT])}
        for budget in (7, 15, 31, 63):
            for topk in (1, 2, 4, 8):
                wanted[f"b{budget}k{topk}"] = (self.patched, tree_args(budget, topk))
        wanted["b32k8"] = (self.patched, tree_args(32, 8))
        ports = self.start_all(wanted, requests=4, deadline=300)
        return experiments.acceptance(ports)

    def write(self, name: str, found: dict) -> None:
        document = {
            "experiment": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": experiments.host(),
            "command": "python3 -m scripts.gpu.run " + " ".join(sys.argv[1:]),
            "result": found,
        }
        text = json.dumps(document, indent=1).replace(f"{ROOT}/", "")
        (self.args.out / f"{name}.json").write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("experiments", nargs="+", choices=["op", "exact", "sweep"])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name in args.experiments:
        run, began = Run(args), time.monotonic()
        print(name, flush=True)
        try:
            run.write(name, getattr(run, name)())
        except Exception:
            failures += 1
            traceback.print_exc()
        finally:
            run.stop_all()
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
