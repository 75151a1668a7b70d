"""The tool itself on a GPU host: apply, verify, smoke test and revert on an environment and a server of its own.

A stock DFLASH server runs; `apply` patches its environment, starts it again as DDTREE, probes the real op and runs the
smoke suite; `revert` gives back files and server. Every command has a time limit, and the ends of all logs are shown
when one does not do what it has to.
"""

import hashlib
import http.client
import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from scripts.gpu.fleet import DFLASH, ON_CPU, PAIR, ROOT, WITHOUT_OVERLAP, Run
from scripts.gpu.server import GpuServer
from scripts.rig.processes import end_group, groups_at_work_in
from scripts.rig.server import ENVIRONMENT as CPU_ENVIRONMENT

HOSTS = """\
[hosts.local]
local = true
venv = "{venv}"

[hosts.local.service]
kind = "process"
args = {{ "--speculative-algorithm" = "DDTREE", "--speculative-ddtree-budget" = 32 }}

[hosts.local.endpoint]
port = {port}

[hosts.local.ready]
deadline = {ready}

[hosts.local.smoke]
suite = "tiny"

[hosts.local.kernels]
require = {require}
"""
READY = 240  # seconds from a start to the first answers, with nothing compiled before
# Seconds that a command may take; less than a roll back would, which is not waited for.
LIMITS = {"apply": READY + 90, "verify": 90, "smoke-test": 90, "status": 30, "revert": READY + 30}
SLOWER = 4  # a rehearsal's machine


class ToolFailed(Exception):
    """A command did not do what it has to; what is known was printed."""


def run(run: Run) -> dict:
    tool = _Tool(run)
    steps = {
        "stock server": tool.start,
        "apply": lambda: tool.command("apply"),
        "serves after apply": lambda: tool.serves("DDTREE"),
        "verify": lambda: tool.command("verify"),
        "smoke-test": lambda: tool.command("smoke-test"),
        "status": lambda: tool.command("status"),
        "revert": lambda: tool.command("revert"),
        "serves after revert": lambda: tool.serves("DFLASH"),
        "files": tool.files_as_before,
    }
    try:
        return run.steps("tool", {"limits in seconds": LIMITS}, steps)
    finally:
        tool.end()


class _Tool:
    def __init__(self, run: Run):
        self.rehearsal = run.rehearsal
        self.slower = run.count(1, SLOWER)
        self.folder = run.args.work.absolute() / "tool"
        self.folder.mkdir()
        self.venv = self.folder / "venv"
        subprocess.run(["cp", "-a", run.python("stock").parents[1], self.venv], check=True)
        # One that has what the tool needs: on a host without a network that was brought for the servers' environments.
        self.client = sys.executable if importlib.util.find_spec("paramiko") else run.python("patched")
        run.next_port += 10
        args = [*run.small, *DFLASH, *([*ON_CPU, *WITHOUT_OVERLAP] if run.rehearsal else [])]
        env = dict(CPU_ENVIRONMENT) if run.rehearsal else {}
        python = self.venv / "bin" / "python"
        log = self.folder / "stock.log"
        self.server = GpuServer("tool", python, run.next_port, log, PAIR / "target", run.release, args, env)
        self.before = _sums(self.venv)
        self.alive = False  # whether there is a server that commands can be tried on

    def start(self) -> dict:
        self.server.start().wait_ready(READY * self.slower)
        # The tool ends it, and must not wait for a zombie of ours.
        threading.Thread(target=self.server.process.wait, daemon=True).start()
        ready, require = READY * self.slower, str(not self.rehearsal).lower()
        hosts = HOSTS.format(venv=self.venv, port=self.server.port, ready=ready, require=require)
        (self.folder / "hosts.toml").write_text(hosts)
        self.alive = True
        return {"seconds": round(self.server.ready_after, 1)}

    def command(self, name: str) -> dict:
        """Run ddtree-patch; gives its JSON and its seconds. Raises ToolFailed on any exit code but 0, and if it takes
        too long."""
        if not self.alive:
            raise ToolFailed(f"{name} was not tried, since there is no server to try it on")
        limit = LIMITS[name] * self.slower
        errors = self.folder / f"{name}.err"
        began = time.monotonic()
        argv = [self.client, "-m", "patcher", name, "--local", "--config", self.folder / "hosts.toml", "--json"]
        with errors.open("wb") as stderr:
            command = subprocess.Popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        try:
            out, _ = command.communicate(timeout=limit)
            code = command.returncode
        except subprocess.TimeoutExpired:
            end_group(command.pid)
            out, code = command.communicate()[0], f"none after {limit} s"
        seconds = round(time.monotonic() - began, 1)
        print(f"  tool: {name}: exit code {code} after {seconds} s", flush=True)
        if code != 0:
            self.alive = name != "apply"  # what was not applied is not verified either
            self._show_logs(errors)
            try:
                error = json.loads(out)["error"]
            except ValueError:  # it was ended before it wrote one
                error = {}
            raise ToolFailed(f"{name}: exit code {code}: {error.get('what')}; next: {error.get('next')}"[:600])
        return {"exit": code, "seconds": seconds, "output": json.loads(out)}

    def serves(self, algorithm: str) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            connection.request("GET", "/server_info")
            served = json.loads(connection.getresponse().read())["speculative_algorithm"]
        finally:
            connection.close()
        if served != algorithm:
            raise ToolFailed(f"the server runs {served}, not {algorithm}")
        return {"speculative_algorithm": served}

    def files_as_before(self) -> dict:
        after = _sums(self.venv)
        different = sorted(p for p in self.before.keys() | after.keys() if self.before.get(p) != after.get(p))
        if different:
            raise ToolFailed(f"not as at the start: {', '.join(different[:10])}")
        return {"files": len(after), "different": 0}

    def end(self) -> None:
        """End whatever was started here, also by the tool."""
        self.server.stop()
        for group in groups_at_work_in(self.folder):
            end_group(group)

    def _show_logs(self, errors: Path) -> None:
        logs = sorted(self.venv.glob(".ddtree-patch/**/*.log"), key=lambda path: path.stat().st_mtime)
        for path in (errors, self.server.log, *logs[-2:]):
            lines = path.read_text(errors="replace").strip().split("\n")[-12:]
            shown = [f"  --- the end of {path.relative_to(self.folder)}", *(line[:200] for line in lines)]
            print(*shown, sep="\n", flush=True)


def _sums(venv: Path) -> dict[str, str]:
    """sha256 of every file of SGLang, bytecode aside."""
    (site,) = venv.glob("lib/python3*/site-packages")
    return {
        str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in site.glob("sglang*")
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
