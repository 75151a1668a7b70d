"""`make demo`: from a stock SGLang to one that samples exactly and back, on this machine, without a GPU.

Everything is real but small: the SGLang wheel in a venv, an sshd on loopback, the trained pair of tests/models. The
demo owns one scratch directory; whatever runs was started in it and is ended at the end, also after Ctrl-C.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.rig.problem import RigProblem
from scripts.rig.processes import end_group, groups_at_work_in
from scripts.rig.server import CpuServer
from scripts.rig.sshd import Sshd
from scripts.rig.target import copy_target, site_packages

HOSTS = """\
# One host, reached by the name that the demo's ssh_config knows.
[hosts.demo]
venv = "{venv}"

[hosts.demo.service]
kind = "process"
args = {{ "--speculative-algorithm" = "DDTREE", "--speculative-ddtree-budget" = "16" }}

[hosts.demo.endpoint]
port = {port}

[hosts.demo.ready]
deadline = 240

[hosts.demo.smoke]
suite = "tiny"

[hosts.demo.kernels]
require = false   # no GPU here: T > 0 is sampled in torch
"""

PROMPT = b"def parse_args(self, args=None):"
SMOKE_FAILED = 7  # exit code of ddtree-patch


class DemoFailed(Exception):
    """Something was not as it has to be; the message says what."""


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    demo = Demo(Path(tempfile.mkdtemp(prefix="ddtree-patch-demo-")))
    try:
        try:
            proven = demo.run()
        finally:
            demo.end()
    except (DemoFailed, RigProblem) as problem:
        print(f"\nThe demo failed: {problem}\nIts files are kept in {demo.scratch}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(demo.scratch)
        print("\nInterrupted; nothing is left running", file=sys.stderr)
        return 130
    shutil.rmtree(demo.scratch)
    print(f"\nProven here in {time.monotonic() - began:.0f} s, with nothing left running:")
    print("  " + "\n  ".join(proven))
    return 0


class Demo:
    def __init__(self, scratch: Path):
        self.scratch = scratch
        self.venv = scratch / "venv"
        self.sshd: Sshd | None = None
        self.hosts = scratch / "hosts.toml"
        self.environment: dict[str, str] = {}

    def run(self) -> list[str]:
        """The whole show. Returns the lines that say what was proven; raises DemoFailed or RigProblem."""
        say("A venv with stock SGLang 0.5.11, an sshd, and a stock DFLASH server on the CPU")
        copy_target(self.venv)
        before = tree_hashes(site_packages(self.venv))
        self.sshd = Sshd(self.scratch / "sshd", alias="demo")
        self.environment = {**os.environ, "DDTREE_PATCH_SSH_CONFIG": str(self.sshd.ssh_config)}
        working_directory = self.scratch / "run"
        working_directory.mkdir()
        server = CpuServer(self.venv, working_directory / "server.log").wait_ready()
        self.hosts.write_text(HOSTS.format(venv=self.venv, port=server.port))
        print(f"{len(before)} files in site-packages; the server is ready on port {server.port}")

        say("Stock SGLang answers 200 at temperature 1, and is greedy all the same")
        check(len(show_samples(server)) == 1, "the stock server sampled: this demo has nothing to show")
        self.tool("smoke-test", expect=SMOKE_FAILED)

        say("One command")
        self.tool("apply")
        say("What is there now")
        self.tool("verify")
        self.tool("smoke-test")
        self.tool("status")
        check(serves(server) == "DDTREE", "the server does not run DDTREE after apply")
        check(len(show_samples(server)) > 1, "the patched server gives one text for one prompt at temperature 1")
        check(tree_hashes(site_packages(self.venv)) != before, "apply changed no file")

        say("And back")
        self.tool("revert")
        self.tool("status")
        check(serves(server) == "DFLASH", "the server does not run DFLASH after revert")
        check_same(before, tree_hashes(site_packages(self.venv)))
        return [
            "stock SGLang 0.5.11 with DFLASH fails the smoke suite at temperature 1: the same text every time;",
            "`ddtree-patch apply --host demo`, over SSH, made it a DDTREE server that passes verify and the suite,",
            "and that gives different texts for one prompt at temperature 1;",
            "`ddtree-patch revert --host demo` brought DFLASH back, with all",
            f"{len(before)} files of site-packages byte-identical to the start (by the sha256 of each).",
        ]

    def tool(self, *arguments: str, expect: int = 0) -> None:
        """Run ddtree-patch against the demo host, its output shown. Raises DemoFailed on another exit code."""
        argv = ["ddtree-patch", *arguments, "--host", "demo"]
        print(f"\n$ {' '.join(argv)}", flush=True)
        program = Path(sys.executable).parent / argv[0]
        done = subprocess.run(
            [program, *argv[1:], "--config", self.hosts], env=self.environment, stdin=subprocess.DEVNULL, check=False
        )
        print(f"[exit code {done.returncode}]", flush=True)
        check(done.returncode == expect, f"{' '.join(argv)} ended with {done.returncode}, not {expect}")

    def end(self) -> None:
        """End everything that was started in the scratch directory. A second Ctrl-C does not stop this."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.sshd:
            self.sshd.stop()
        for group in groups_at_work_in(self.scratch):
            end_group(group)


def say(title: str) -> None:
    print(f"\n=== {title}", flush=True)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoFailed(otherwise)


def check_same(before: dict[str, str], after: dict[str, str]) -> None:
    different = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    check(not different, f"not as at the start: {', '.join(different[:10])}")


def show_samples(server: CpuServer) -> set[tuple[int, ...]]:
    """Ask one prompt five times at temperature 1 and print the texts.

    Returns the different continuations among the answers whose first token is the commonest one: the prefill samples
    that token even on a server that then is greedy.
    """
    answers = [
        tuple(server.generate(PROMPT, temperature=1, max_new_tokens=48, ignore_eos=True)["output_ids"])
        for _ in range(5)
    ]
    for answer in answers:
        print(f"  T=1  {bytes(max(token - 4, 0) for token in answer)!r}", flush=True)
    first_tokens = [answer[0] for answer in answers]
    commonest = max(first_tokens, key=first_tokens.count)
    return {answer for answer in answers if answer[0] == commonest}


def serves(server: CpuServer) -> str:
    """The speculative algorithm that the process on the server's port says it runs."""
    status, body = server.request("GET", "/server_info")
    check(status == 200, f"/server_info answered {status}")
    return json.loads(body)["speculative_algorithm"]


def tree_hashes(directory: Path) -> dict[str, str]:
    """sha256 of each file by its path below `directory`; the interpreter's own bytecode caches are left out."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


if __name__ == "__main__":
    sys.exit(main())
