"""The bench of apply runs from one end to the other; what it measures is nobody's promise here."""

import json
import subprocess
import sys
from pathlib import Path

from scripts.apply_bench.page import page

ROOT = Path(__file__).parents[3]


def test_one_host_and_one_run():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.bench_apply",
            "--hosts",
            "1",
            "--round-trips",
            "20",
            "--runs",
            "1",
            "--ansible",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    bench = json.loads(done.stdout)
    (result,) = bench["results"]
    assert (result["hosts"], result["added_round_trip_ms"], result["contestant"]) == (1, 20, "ddtree-patch")
    assert result["programs"] == 2 and result["turns"] > 2 and result["up"] > bench["work"]["patch_bytes"]
    assert "| 20 | 1 |" in page({"bench.json": bench})
