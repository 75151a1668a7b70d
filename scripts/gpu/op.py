"""The sampling op against the reference walk on the GPU: tests/gpu, run by pytest in the patched environment."""

import subprocess
import time

from scripts.gpu.fleet import ROOT, Run

MEANWHILE = True  # needs no server


def run(run: Run) -> dict:
    began = time.monotonic()
    command = ["-m", "pytest", "-q", "-m", "gpu", "-rA", "--durations=0", "tests/gpu", "-p", "no:cacheprovider"]
    command += ["--noconftest"]  # what the other tests need of a host is not there
    done = subprocess.run(
        [str(run.python("patched")), *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=400
    )
    print(done.stdout[-3000:], flush=True)
    if done.returncode:
        run.failed.append("op")
    return {
        "pytest_exit": done.returncode,
        "seconds": time.monotonic() - began,
        # The tests print what they covered, one line each.
        "covered": [line for line in done.stdout.split("\n") if line.startswith("covered: ")],
        "output": done.stdout[-6000:] + done.stderr[-1000:],
    }
