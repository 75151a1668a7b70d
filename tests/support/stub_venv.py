"""A real, small venv whose package `sglang` is a stub: `python -m sglang.launch_server` there runs stub_sglang.py."""

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).with_name("stub_sglang.py")


def make_stub_venv(directory: Path) -> Path:
    """Create the venv; gives its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    site = next(directory.glob("lib/python3*/site-packages"))
    package, info = site / "sglang", site / "sglang-0.0.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(STUB, package / "launch_server.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.0.0\n")
    rows = []
    for path in (package / "__init__.py", package / "launch_server.py", info / "METADATA"):
        data = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path.relative_to(site)},sha256={digest},{len(data)}")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")
    return directory / "bin" / "python3"
