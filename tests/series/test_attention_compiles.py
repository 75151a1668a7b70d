"""The tree's attention compiles for GPUs that nobody has tried, and fits into their shared memory."""

import json
import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(900)
def test_it_compiles_for_other_gpus(patched_venv, tmp_path):
    (speculative,) = patched_venv.glob("lib/python3*/site-packages/sglang/srt/speculative")
    script = Path(__file__).with_name("compile_attention.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [patched_venv / "bin" / "python", script, speculative],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["capability"] for row in rows} == {80, 86, 89, 90, 120}
    assert [row for row in rows if row["shared"] > row["limit"]] == []
