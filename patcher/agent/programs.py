"""Other programs that the agent runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from .failures import Refusal
from .site import Site

LOADER = "import sys;exec(compile(sys.stdin.buffer.read(),'<sent>','exec'))"


def run_child(argv: Sequence[str], data: bytes, env: Mapping[str, str], seconds: float) -> dict:
    """Run a program to its end; it and its children end when its time is up (rc 124)."""
    child = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **env},
        start_new_session=True,
    )
    try:
        out, err = child.communicate(data, timeout=seconds)
        rc = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        rc, err = 124, err + b"\nended after %d s" % seconds
    return {"rc": rc, "stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}


def run_python(site: Site, request: dict) -> dict:
    """Run a script with the environment's own interpreter."""
    if site.tree:
        raise Refusal("NoInstallation", "a tree has no interpreter to run this with", site.root, "give --venv")
    return run_child(
        [sys.executable, "-I", "-B", "-c", LOADER, *(request.get("argv") or ())],
        request["source"].encode(),
        request.get("env") or {},
        request.get("timeout") or 600,
    )
