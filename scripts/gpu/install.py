"""Put environments together on an offline GPU host, from what collect.py and render.py brought.

    python3 -m scripts.gpu.install ENVIRONMENTS PART...

A part is a folder with packages.tar.xz, patched.tar.xz, or both. Of every release whose packages are there,
ENVIRONMENTS/RELEASE/stock has it as it came and ENVIRONMENTS/RELEASE/patched the series applied; both find their
release's packages first and the packages of the host's own python3 last. Called again with more parts, it adds.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

from scripts.gpu.releases import RELEASES

STUBS = "ddtree_offline_stubs"


class NotAsExpected(Exception):
    """A file is not the one that its patched text was made from."""


def install(environments: Path, parts: list[Path]) -> None:
    """Raises NotAsExpected, or CalledProcessError when an archive cannot be read."""
    packages = environments / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if (archive := part / "packages.tar.xz").exists():
            subprocess.run(["tar", "-xJf", archive, "-C", packages], check=True)
    complete = {v for v in RELEASES if all((packages / folder).is_dir() for folder in folders(v))}
    fresh = [version for version in sorted(complete) if not (environments / version / "stock").exists()]
    compile_all([packages / folder for version in fresh for folder in ("common", *folders(version))])
    for version in fresh:
        make(environments, version, "stock")
    for part in parts:
        if (archive := part / "patched.tar.xz").exists():
            with tarfile.open(archive) as source:
                for version in (name.removesuffix(".json") for name in source.getnames() if "/" not in name):
                    if version in complete:
                        patch(environments, version, source)  # a release that fails is no reason to lose the others


def folders(version: str) -> list[str]:
    """Of packages, what a release does not share with all others."""
    return [layer.replace("==", "-") for layer in RELEASES[version].layers(version)]


def compile_all(where: list[Path]) -> None:
    """Bytecode before the first start: servers that start together would each do it."""
    if where:
        jobs = str(os.cpu_count())
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", jobs, *dict.fromkeys(where)], check=False)


def make(environments: Path, version: str, name: str) -> Path:
    """An environment of a release as it came; gives its site-packages. SGLang's files are links to the packages'."""
    venv, packages = environments / version / name, environments / "packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python3*/site-packages")
    for folder in (packages / folders(version)[0]).iterdir():
        subprocess.run(["cp", "-al", folder, site], check=True)
    shutil.copyfile(Path(__file__).with_name("offline_stubs.py"), site / f"{STUBS}.py")
    path = [*(packages / folder for folder in folders(version)[1:]), packages / "common"]
    host = sysconfig.get_paths()["purelib"]
    (site / "zz_ddtree_offline.pth").write_text("\n".join([f"import {STUBS}", *map(str, path), host]) + "\n")
    return site


def patch(environments: Path, version: str, source: tarfile.TarFile) -> None:
    """Make ENVIRONMENTS/VERSION/patched anew; every file has to be the one that was patched."""
    shutil.rmtree(environments / version / "patched", ignore_errors=True)
    site = make(environments, version, "patched")
    sums = json.loads(source.extractfile(f"{version}.json").read())
    for name, (before, after) in sums.items():
        path = site / name
        data = source.extractfile(f"{version}/{name}").read()
        if (_sha256(path.read_bytes()) if path.exists() else None) != before or _sha256(data) != after:
            raise NotAsExpected(f"{version}: {name} is not what its patch was made for")
        path.unlink(missing_ok=True)  # a link to the packages' file
        path.write_bytes(data)
    compile_all([(site / name).parent for name in sums])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    args = parser.parse_args()
    began = time.monotonic()
    install(args.environments.absolute(), [part.absolute() for part in args.parts])
    made = sorted(path.parent.name + "/" + path.name for path in args.environments.glob("0.*/*"))
    print(f"{', '.join(made)}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
