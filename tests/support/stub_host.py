"""A venv with a stub package `sglang` whose server can be patched by the synthetic series, and settings for it.

The stub server reports the patch identity as a patched one does: from the files that it runs.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.support.builders import PRISTINE, make_package, make_series

LAUNCH_SERVER = b"""
import hashlib
import json
import pathlib
import sys
from sglang import stub_sglang

ROOT = pathlib.Path(__file__).parent.parent
PATHS = ["sglang/srt/args.py", "sglang/srt/ddtree.py", "sglang/srt/info.py", "sglang/srt/worker.py"]
PATCHED = (ROOT / PATHS[1]).exists()
LINES = [f"{path}\\0{hashlib.sha256((ROOT / path).read_bytes()).hexdigest()}\\n" for path in PATHS] if PATCHED else []
IDENTITY = hashlib.sha256("".join(LINES).encode()).hexdigest() if PATCHED else None


class Patchable(stub_sglang.StubServer):
    def __init__(self, *args, **settings):
        super().__init__(*args, identity=IDENTITY, **settings)


if __name__ == "__main__":
    stub_sglang.StubServer = Patchable
    stub_sglang.IDENTITY = IDENTITY
    misbehaviour = pathlib.Path(sys.prefix).parent / "misbehaviour.json"
    if misbehaviour.exists():
        flags = json.loads(misbehaviour.read_text())
        sys.argv += flags["always"] + (flags["patched"] if PATCHED else [])
    stub_sglang.main()
"""
SUITE = """
temperatures = [0.0, 1.0]
max_new_tokens = 8
samples = 16
timeout = 20
paths = ["temperature", "top_p"]
[[prompts]]
name = "one"
text = "one"
[[prompts]]
name = "two"
text = "two"
"""


class StubHost:
    """A target: `venv`, `site_packages`, `series_root` (for $DDTREE_PATCH_SERIES_ROOT), `config`, `port`."""

    def __init__(self, home: Path, python: str = sys.executable) -> None:
        self.home = home
        self.venv = home / "venv"
        subprocess.run([python, "-m", "venv", "--without-pip", str(self.venv)], check=True)
        self.site_packages = next((self.venv / "lib").glob("python3*")) / "site-packages"
        stub = Path(__file__).with_name("stub_sglang.py").read_bytes()
        make_package(
            self.site_packages, {**PRISTINE, "sglang/launch_server.py": LAUNCH_SERVER, "sglang/stub_sglang.py": stub}
        )
        self.series_root = home / "series"
        self.series_root.mkdir()
        self.series = make_series(self.series_root / "sglang-0.5.11")
        self.config = home / "hosts.toml"
        self.suite = home / "suite.toml"
        self.suite.write_text(SUITE)
        self.port = free_port()
        self.servers: list[subprocess.Popen] = []

    def configure(
        self,
        *names: str,
        args: dict[str, str | bool] | None = None,
        require: bool = False,
        deadline: float = 60,
        more: str = "",
    ) -> Path:
        """Write hosts.toml with these hosts (ssh names, or `local`), all of them this target."""
        flags = "".join(f"{json.dumps(flag)} = {json.dumps(value)}\n" for flag, value in (args or {}).items())
        text = "".join(
            f"""
[hosts.{name}]
venv = "{self.venv}"
endpoint = {{ port = {self.port} }}
ready = {{ deadline = {deadline} }}
smoke = {{ suite = "{self.suite}" }}
kernels = {{ require = {json.dumps(require)} }}
[hosts.{name}.service]
kind = "process"
[hosts.{name}.service.args]
{flags}"""
            for name in names
        )
        self.config.write_text(text + more)
        return self.config

    def start_server(self, *flags: str, cwd: Path | None = None) -> subprocess.Popen:
        """Start the stub server, as an operator would by hand; returns when it answers."""
        server = self.launch(*flags, cwd=cwd)
        self.wait_answer()
        return server

    def launch(self, *flags: str, cwd: Path | None = None) -> subprocess.Popen:
        """Start the stub server, and do not wait for it."""
        log = (self.home / "server.log").open("ab")
        argv = [f"{self.venv}/bin/python", "-m", "sglang.launch_server", "--port", str(self.port), *flags]
        server = subprocess.Popen(
            argv, cwd=cwd or self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        self.servers.append(server)
        return server

    def misbehave(self, *, patched: Sequence[str] = (), always: Sequence[str] = ()) -> None:
        """From its next start on the server takes these flags too, wherever its command line stands; () ends it."""
        text = json.dumps({"patched": list(patched), "always": list(always)})
        (self.home / "misbehaviour.json").write_text(text)

    def wait_answer(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.info()
                return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def info(self) -> dict:
        """What the server that answers now says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=10) as answer:
            return json.load(answer)

    def served_identity(self) -> str | None:
        return self.info()["internal_states"][0].get("ddtree_patch", {}).get("identity")

    def stop(self) -> None:
        """End what runs from this venv: a restarted server belongs to no process of the test."""
        for pid in self.server_pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        for server in self.servers:
            server.wait()

    def server_pids(self) -> list[int]:
        """The processes that run from this venv, whoever started them."""
        own = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    first = (entry / "cmdline").read_bytes().split(b"\0")[0]
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if first.startswith(os.fsencode(f"{self.venv}/bin/")):
                    own.append(int(entry.name))
        return own

    def hashes(self) -> dict[str, bytes]:
        """Every file of site-packages, bytecode aside (an interpreter that ran writes it)."""
        return {
            str(path.relative_to(self.site_packages)): path.read_bytes()
            for path in sorted(self.site_packages.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
