"""The CPU verify attention against attention computed node by node along each path."""

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parent / "check_verify_attention.py"


def test_verify_attention_on_random_trees(target_venv):
    """In the target venv, since only that has torch."""
    done = subprocess.run(
        [target_venv / "bin/python", SCRIPT], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "checked" in done.stdout
