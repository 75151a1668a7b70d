"""Tokens per verify step over budgets, candidates and temperatures: the whole grid, by tree_acceptance.py."""

import json
import subprocess

from scripts.gpu.fleet import ROOT, Run

MEANWHILE = True  # needs no server


def run(run: Run) -> dict:
    size = [str(run.count(512, 4)), str(run.count(192, 48))]
    done = subprocess.run(
        [str(run.python("patched")), "-m", "scripts.gpu.tree_acceptance", *size],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    if done.returncode:
        raise RuntimeError(f"tree_acceptance: exit {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().split("\n")[-1])
