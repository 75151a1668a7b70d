"""A real SGLang server on the CPU with the trained pair: its command line, its life, a minimal client."""

import http.client
import json
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.rig.problem import RigProblem
from scripts.rig.processes import end_group
from scripts.rig.releases import DEFAULT, Release

MODELS = Path(__file__).parents[2] / "tests/models/tiny-b8"

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_NATIVE_ATTN": "1",
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    # torch.compile would want a C++ compiler, and minutes of it.
    "TORCHDYNAMO_DISABLE": "1",
    # The models are tiny: a second thread gains nothing, and threads of two servers would spin against each other.
    "OMP_NUM_THREADS": "1",
}


def command_line(
    venv: Path,
    port: int,
    algorithm: str | None,
    extra: Sequence[str] = (),
    models: Path = MODELS,
    *,
    release: Release = DEFAULT,
    overlap: bool = True,
    page_size: int = 1,
) -> list[str]:
    """Launch command; `algorithm` is DFLASH, DDTREE or None (plain decoding, without the draft).

    models: directory of the pair. Without a tokenizer.json beside the target, requests are token ids.
    release: of the SGLang in `venv`. overlap: whether its scheduler prepares a batch while the one before runs; the
        releases of family v1 never do with DFLASH.
    """
    without_tokenizer = [] if (models / "target/tokenizer.json").exists() else ["--skip-tokenizer-init"]
    argv = [
        str(venv / "bin/python"),
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(models / "target"),
        *without_tokenizer,
        "--device",
        "cpu",
        "--attention-backend",
        "triton" if algorithm else "torch_native",
        "--sampling-backend",
        "pytorch",
        "--grammar-backend",
        "none",
        *([] if overlap and release.family == "v2" else ["--disable-overlap-schedule"]),
        "--page-size",
        str(page_size),
        "--max-total-tokens",
        "8192",
        "--context-length",
        "1024",
        "--max-running-requests",
        "4",
        "--mem-fraction-static",
        "0.1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--sleep-on-idle",  # else the scheduler of a server that nobody asks keeps a core busy
        "--dtype",
        "float32",  # in bfloat16 the shape of a batch decides near-ties, and greedy texts differ
    ]
    if algorithm:
        argv += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(models / "draft")]
    return [*argv, *extra]


def free_port_for_sglang() -> int:
    """A port that is free, as is the one 10,000 above, which SGLang takes, too.

    Both lie below those that the kernel hands out: SGLang binds half a minute after it was started, and by then
    another program could have been given the port.
    """
    while True:
        port = random.randrange(11_000, 22_000)
        if _is_free(port) and _is_free(port + 10_000):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def token_ids(text: bytes) -> list[int]:
    """The pair's encoding: a begin token, then each byte plus 4."""
    return [1, *(byte + 4 for byte in text)]


class CpuServer:
    """One server in a process group of its own. Attributes: argv, port, log, pid."""

    def __init__(
        self,
        venv: Path,
        log: Path,
        *,
        algorithm: str | None = "DFLASH",
        extra: Sequence[str] = (),
        port: int | None = None,
        models: Path = MODELS,
        release: Release = DEFAULT,
        overlap: bool = True,
        page_size: int = 1,
    ):
        """Starts in the directory of `log`; does not wait (see `wait_ready`). For the rest see `command_line`."""
        self.port = port or free_port_for_sglang()
        self.log = log
        self.argv = command_line(
            venv, self.port, algorithm, extra, models, release=release, overlap=overlap, page_size=page_size
        )
        sockets = log.parent / "sockets"  # SGLang makes empty files for their names, and leaves them
        sockets.mkdir(exist_ok=True)
        environment = {**os.environ, **ENVIRONMENT, "TMPDIR": str(sockets)}
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                self.argv,
                cwd=log.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        # Whoever ends the server, for example a restart that is under test, must not wait for a zombie of ours.
        threading.Thread(target=self._process.wait, daemon=True).start()

    def wait_ready(self, deadline_s: float = 300) -> "CpuServer":
        """Until /health answers 200. Raises RigProblem with the log's end if it dies or takes too long."""
        deadline = time.monotonic() + deadline_s
        while True:
            if self._process.poll() is not None:
                raise RigProblem(f"the server died with {self._process.returncode}:\n{self.log_tail()}")
            try:
                if self.request("GET", "/health", timeout=10)[0] == 200:
                    return self
            except OSError:  # not listening yet, or busy warming up
                pass
            if time.monotonic() > deadline:
                raise RigProblem(f"the server was not ready after {deadline_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.3)

    def request(self, method: str, path: str, body: dict | None = None, timeout: float = 300) -> tuple[int, bytes]:
        """(status, body). Raises OSError."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def generate(self, prompt: bytes, **sampling: object) -> dict:
        """/generate of one prompt, parsed. Raises RigProblem on any status but 200."""
        status, body = self.request("POST", "/generate", {"input_ids": token_ids(prompt), "sampling_params": sampling})
        if status != 200:
            raise RigProblem(f"/generate answered {status}: {body[:500]!r}")
        return json.loads(body)

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").split("\n")[-lines:])

    def stop(self) -> None:
        end_group(self.pid)
        self._process.wait()
