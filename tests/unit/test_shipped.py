"""What an installed wheel brings along: it works without the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.builders import make_series

ROOT = Path(__file__).resolve().parents[2]


def test_a_wheel_has_the_series_and_the_suites(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(ROOT / "patches", source / "patches")
    make_series(source / "patches" / "sglang-0.0.1", version="0.0.1", shared={"sglang/srt/core.py": b"TREE = 1\n"})
    for name in ("patcher", "configs", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        (source / name).symlink_to(ROOT / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path]
    subprocess.run([*pip, source], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    unpacked = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(unpacked)
    shipped = {path.relative_to(source) for path in (*source.glob("patches/*/*"), *source.glob("configs/smoke/*.toml"))}
    assert Path("patches/core/core-all.patch") in shipped
    for path in shipped:
        assert (unpacked / "patcher" / "data" / path).read_bytes() == (source / path).read_bytes()
    listing = [sys.executable, "-m", "patcher", "list"]
    listed = subprocess.run(listing, cwd=unpacked, capture_output=True, check=True).stdout
    assert b"sglang-0.5.11" in listed and b"sglang-0.0.1" in listed
