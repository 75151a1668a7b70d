"""What an installed wheel brings along: it works without the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_wheel_has_the_series_and_the_suites(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("patcher", "patches", "configs", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        (source / name).symlink_to(ROOT / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path]
    subprocess.run([*pip, source], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    unpacked = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(unpacked)
    shipped = {path.relative_to(ROOT) for path in (*ROOT.glob("patches/*/*"), *ROOT.glob("configs/smoke/*.toml"))}
    assert shipped
    for path in shipped:
        assert (unpacked / "patcher" / "data" / path).read_bytes() == (ROOT / path).read_bytes()
    listing = [sys.executable, "-m", "patcher", "list"]
    assert b"sglang-0.5.11" in subprocess.run(listing, cwd=unpacked, capture_output=True, check=True).stdout
