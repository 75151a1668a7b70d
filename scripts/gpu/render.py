"""Patch the wheels that collect.py brings, with the tool itself, and collect the files that are changed or new.

    python3 -m scripts.gpu.render DEST 0.5.17 0.5.11 --wheels CACHE

Writes DEST/patched.tar.xz: RELEASE/FILE for every file, and RELEASE.json with each file's sha256 before and after.
install.py puts them into a host's environments where the file that is there has the first of them. `ddtree-patch apply`
runs here, on the very wheel that travels, so that no more than these files has to reach the host.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from scripts.gpu.collect import download
from scripts.gpu.fleet import ROOT
from scripts.gpu.releases import RELEASES


def rendered(wheel: Path, folder: Path) -> dict[str, tuple[str | None, bytes]]:
    """{file: (sha256 before or None, its bytes now)} of an SGLang wheel that was unpacked into `folder` and patched.

    Raises RuntimeError if the tool does not apply a series.
    """
    with zipfile.ZipFile(wheel) as source:
        source.extractall(folder)
    before = {path: _sha256(path.read_bytes()) for path in _files(folder)}
    command = [sys.executable, "-m", "patcher", "apply", "--local", "--site-packages", str(folder), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{wheel.name}: exit {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    after = {path: path.read_bytes() for path in _files(folder)}
    changed = {path: data for path, data in after.items() if _sha256(data) != before.get(path)}
    return {str(path.relative_to(folder)): (before.get(path), data) for path, data in changed.items()}


def _files(folder: Path) -> list[Path]:
    """SGLang's own; not the tool's records, which are of this machine."""
    return [path for path in sorted(folder.glob("sglang/**/*")) if path.is_file() and path.suffix != ".pyc"]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument("releases", nargs="+", choices=RELEASES)
    parser.add_argument("--wheels", type=Path, required=True, help="where downloaded wheels are kept")
    args = parser.parse_args()
    args.dest.mkdir(parents=True, exist_ok=True)
    with tarfile.open(args.dest / "patched.tar.xz", "w:xz") as out:
        for version in args.releases:
            with tempfile.TemporaryDirectory() as folder:
                files = rendered(download(f"sglang=={version}", args.wheels), Path(folder))
            sums = {name: [before, _sha256(data)] for name, (before, data) in files.items()}
            _add(out, f"{version}.json", json.dumps(sums, indent=1).encode())
            for name, (_before, data) in files.items():
                _add(out, f"{version}/{name}", data)
            print(f"{version}: {len(files)} files")


def _add(out: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    out.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main()
