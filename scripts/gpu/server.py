"""Real SGLang servers on a GPU host, with the environment that an offline host needs."""

import http.client
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from scripts.gpu.releases import spelled


class ServerDied(Exception):
    """A server ended before it was ready; the message has the end of its log."""


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "FLASHINFER_USE_CUDA_NORM": "1",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass
class GpuServer:
    """One server of an SGLang release; `args` are added to the common ones. `stop` ends its process group."""

    name: str
    python: Path
    port: int
    log: Path
    target: Path
    release: str
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    started: float = 0.0
    ready_after: float | None = None

    def command(self) -> list[str]:
        return [
            str(self.python),
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(self.target),
            "--skip-tokenizer-init",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--nccl-port",  # SGLang draws one at random, and servers that start together draw the same
            str(self.port + 1),
            "--attention-backend",
            "triton",
            "--sampling-backend",
            "pytorch",
            "--grammar-backend",
            "none",
            *spelled(self.release, ["--disable-piecewise-cuda-graph", *self.args]),
        ]

    def start(self) -> "GpuServer":
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=os.environ | ENVIRONMENT | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.log.parent,
            )
        return self

    def wait_ready(self, deadline: float) -> "GpuServer":
        """Wait until a request is answered; raises ServerDied, or TimeoutError after `deadline` seconds."""
        while time.monotonic() - self.started < deadline:
            if self.process.poll() is not None or b"SIGQUIT received" in self.log.read_bytes():
                raise ServerDied(f"{self.name}: {self.log.read_text(errors='replace')[-3000:]}")
            if b"The server is fired up" in self.log.read_bytes():
                self.ready_after = time.monotonic() - self.started
                return self
            time.sleep(0.5)
        raise TimeoutError(f"{self.name} not ready in {deadline:.0f} s: {self.log.read_text(errors='replace')[-2000:]}")

    def log_tail(self, lines: int) -> str:
        return "\n".join(self.log.read_text(errors="replace").split("\n")[-lines:])

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def generate(port: int, input_ids: list, params: dict | list, timeout: float = 300.0, **more: object) -> list[dict]:
    """POST /generate with one prompt or many, and `more` keys of the body; raises RuntimeError unless it is a 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        body = json.dumps({"input_ids": input_ids, "sampling_params": params, **more})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"port {port}: HTTP {answer.status}: {data[:500]!r}")
    result = json.loads(data)
    return result if isinstance(result, list) else [result]
