"""One run on a GPU host: its environments, the servers that its experiments share, and what they found, as JSON."""

import argparse
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from scripts.gpu.releases import has_overlap, server_environment
from scripts.gpu.server import GpuServer, ServerDied
from scripts.rig.server import ENVIRONMENT as CPU_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "tests" / "models" / "tiny-b8"
DRAFT = ["--speculative-draft-model-path", str(PAIR / "draft")]
DFLASH = ["--speculative-algorithm", "DFLASH", *DRAFT]
REQUESTS = 64  # at most in a batch
LOG_LINES = 60  # of a server, that a run brings back
# max-total-tokens bounds the KV pool; the fraction has to hold what all servers that start together take.
SMALL = [
    *("--mem-fraction-static", "0.5", "--context-length", "2048", "--max-total-tokens", "65536"),
    *("--max-running-requests", str(REQUESTS), "--cuda-graph-max-bs", str(REQUESTS), "--sleep-on-idle"),
]
FLOAT16 = ["--dtype", "float16"]  # the release's norms take no float32 on a GPU
NARROW = ["--max-running-requests", "16", "--cuda-graph-max-bs", "16"]  # batches of other shapes
# A rehearsal's servers: the same command lines on the CPU, as far as it can take them.
ON_CPU = ["--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.5"]
WITHOUT_OVERLAP = ["--disable-overlap-schedule"]  # of a rehearsal, where the release has no worker for it
SMALL_ON_CPU = ["--max-total-tokens", "8192", "--context-length", "1024", "--max-running-requests", "16"]


def tree(budget: int, topk: int) -> list[str]:
    """Arguments of a DDTREE server."""
    numbers = ["--speculative-ddtree-budget", str(budget), "--speculative-ddtree-topk", str(topk)]
    return ["--speculative-algorithm", "DDTREE", *numbers, *DRAFT]


@dataclass(frozen=True)
class Wanted:
    """A server of the trained pair. `venv`: "stock", "patched", or "follow" (patched, the sampling op hidden)."""

    venv: str
    args: list[str]


SERVERS = {
    "plain": Wanted("stock", []),
    "plain-narrow": Wanted("stock", NARROW),
    "dflash-stock": Wanted("stock", DFLASH),
    "dflash": Wanted("patched", DFLASH),
    "chain": Wanted("patched", tree(7, 1)),  # the pair's block is 8
    "tree": Wanted("patched", tree(32, 8)),
    "tree-auto": Wanted("patched", ["--speculative-algorithm", "DDTREE", *DRAFT]),  # widths by batch, from 0.5.14 on
    "tree-follow": Wanted("follow", tree(32, 8)),
    "tree-loose": Wanted("patched", [*tree(32, 8), "--speculative-accept-threshold-acc", "0.5"]),
    # With CUDA graphs the draft's input keeps its type; SGLang casts it to bfloat16 only without.
    "plain16": Wanted("stock", FLOAT16),
    "plain-narrow16": Wanted("stock", [*NARROW, *FLOAT16]),
    "tree16": Wanted("patched", [*tree(32, 8), *FLOAT16]),
    "tree-follow16": Wanted("follow", [*tree(32, 8), *FLOAT16]),
    "b15k4": Wanted("patched", tree(15, 4)),
    "b63k8": Wanted("patched", tree(63, 8)),
}


class Run:
    """Attributes: args (the command line's), release, rehearsal, servers {name: its replicas that run}, failed (steps),
    given_up {name: why a server did not start}."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.release: str = args.release
        self.rehearsal: bool = args.rehearsal
        self.servers: dict[str, list[GpuServer]] = {}
        self.next_port = args.first_port
        self.failed: list[str] = []  # steps that raised
        self.given_up: dict[str, str] = {}
        self.started: list[GpuServer] = []  # all that ever were, for the ends of their logs

    def python(self, venv: str) -> Path:
        """The interpreter of "stock", "patched" or "follow"."""
        folder = self.args.environments / self.release / venv
        if venv == "follow":
            folder = self.args.work / "follow"
            _hide_op(self.args.environments / self.release / "patched", folder)
        return folder.absolute() / "bin" / "python"

    def count(self, full: int, rehearsal: int) -> int:
        """How many of something: all that is needed, or what a CPU can do in a rehearsal."""
        return rehearsal if self.rehearsal else full

    @property
    def small(self) -> list[str]:
        """Limits of a server of the trained pair."""
        return [*SMALL, *SMALL_ON_CPU] if self.rehearsal else SMALL

    def start(
        self, name: str, python: Path, target: Path, args: list[str], env: dict[str, str] | None = None
    ) -> GpuServer:
        """Start one server and return at once; `stop_all` ends it."""
        self.next_port += 10
        env = server_environment(self.release) | (env or {})
        if self.rehearsal:
            env |= CPU_ENVIRONMENT
            args = [*args, *ON_CPU, *([] if has_overlap(self.release) else WITHOUT_OVERLAP)]
        replicas = self.servers.setdefault(name, [])
        log = self.args.work.absolute() / f"{name}-{len(replicas)}.log"
        server = GpuServer(name, python, self.next_port, log, target, self.release, args, env)
        replicas.append(server)
        self.started.append(server)
        return server.start()

    def launch_pair(self, names: Iterable[str]) -> None:
        """Start servers of SERVERS together, as far as they do not run yet; `wait_pair` waits for them."""
        for name in dict.fromkeys(names):
            if name not in self.servers:
                wanted = SERVERS[name]
                python = self.python(wanted.venv)
                for _ in range(self.args.replicas if name in ("plain", "tree", "tree-follow") else 1):
                    self.start(name, python, PAIR / "target", [*self.small, *wanted.args])

    def wait_pair(self, deadline: float = 420) -> None:
        """Until all servers are ready. One that is not by `deadline` (seconds from its start), or dies, is given up
        with the end of its log: an experiment that needs it will say that it is missing."""
        for name in list(self.servers):
            for server in self.servers[name]:
                try:
                    server.wait_ready(deadline)
                except (ServerDied, TimeoutError) as error:
                    print(f"  {name}: {error}", flush=True)
                    self.given_up[name] = str(error)
                    self.stop(name)
                    break
        after = [server.ready_after for replicas in self.servers.values() for server in replicas]
        if after:
            print(f"  {len(after)} servers, ready after {min(after):.0f} to {max(after):.0f} s", flush=True)

    def ports(self, *names: str) -> dict[str, list[int]]:
        """{name: ports of its replicas}; raises RuntimeError if one of them does not run."""
        missing = [name for name in names if name not in self.servers]
        if missing:
            raise RuntimeError(f"servers that did not start: {', '.join(missing)}")
        return {name: [server.port for server in self.servers[name]] for name in names}

    def of(self, names: Iterable[str]) -> dict[str, GpuServer]:
        """The first server of each name, by what follows the name's first hyphen; raises as `ports`."""
        names = list(names)
        self.ports(*names)
        return {name.partition("-")[2]: self.servers[name][0] for name in names}

    def stop(self, name: str) -> None:
        for server in self.servers.pop(name, []):
            server.stop()

    def stop_all(self) -> None:
        for name in list(self.servers):
            self.stop(name)

    def write_logs(self) -> None:
        """The ends of all servers' logs, for a host that is gone afterwards."""
        parts = [f"==== {server.log.stem}\n{server.log_tail(LOG_LINES)}" for server in self.started]
        (self.args.out / f"logs-{self.release}.txt").write_text("\n".join(parts) + "\n")

    def steps(self, experiment: str, found: dict, steps: dict[str, Callable[[], object]]) -> dict:
        """Run the steps, put what each gives into `found`, and write after each: what was measured before a failure
        stays worth having. A step that fails is recorded, and the next one runs."""
        for name, step in steps.items():
            began = time.monotonic()
            try:
                found[name] = step()
            except Exception:
                self.failed.append(f"{experiment}: {name}")
                found[name] = {"failed": traceback.format_exc()[-3000:]}
                traceback.print_exc()
            print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
            self.write(experiment, found)
        return found

    def write(self, name: str, found: dict) -> None:
        document = {
            "experiment": name,
            "release": self.release,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rehearsal": self.rehearsal,
            "host": host(self.python("patched")),
            "command": "python3 -m scripts.gpu.run " + " ".join(sys.argv[1:]),
            "result": found,
        }
        text = json.dumps(document, indent=1).replace(f"{ROOT}/", "")
        (self.args.out / f"{name}-{self.release}.json").write_text(text + "\n")


def _hide_op(venv: Path, follow: Path) -> None:
    """A copy of the patched environment whose SGLang finds no sampling op: it decides by sample-and-follow."""
    if follow.exists():
        return
    subprocess.run(["cp", "-a", venv, follow], check=True)
    module = next(follow.glob("lib/python3*/site-packages/sglang/srt/speculative/dflash_verify_op.py"))
    text = module.read_text()
    hidden = text.replace("VERIFY_OP = find_verify_op()", "VERIFY_OP = None")
    if hidden == text:
        raise RuntimeError("the op could not be hidden: where it is found was not found")
    module.unlink()  # the copy may share files with the original
    module.write_text(hidden)


@functools.cache
def host(python: Path) -> dict:
    """What an experiment ran on. `python`: the patched environment's interpreter."""
    gpus = ""
    if shutil.which("nvidia-smi"):
        gpus = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    code = (
        "import json, importlib.metadata as m\n"
        "names = 'torch', 'triton', 'sglang', 'sglang-kernel', 'flashinfer-python', 'transformers'\n"
        "have = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: have.get(n) for n in names}))"
    )
    return {
        "gpus": [line for line in gpus.strip().split("\n") if line],
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": json.loads(_output([str(python), "-c", code])),
        "client": {name: metadata.version(name) for name in ("scipy", "numpy")},
    }


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
