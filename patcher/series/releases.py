"""A release's files: from its wheel, which pip fetches, or from a tree of someone's own."""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from patcher.errors import UsageProblem

CACHE_VARIABLE = "DDTREE_PATCH_CACHE"
FOR_TARGETS = (
    "--no-deps",
    "--only-binary=:all:",
    "--implementation=cp",
    "--python-version=3.11",
    "--platform=manylinux_2_34_x86_64",
    "--platform=manylinux2014_x86_64",
)


def cache_dir() -> Path:
    """Where fetched wheels are kept: $DDTREE_PATCH_CACHE, else ~/.cache/ddtree-patch."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "ddtree-patch")


def find_wheel(package: str, version: str, wheels: Path | None = None) -> Path:
    """The release's wheel in the directory ``wheels``; without one, in the cache, where pip puts it if it is absent.

    Raises UsageProblem if ``wheels`` has none, or with pip's words if there is none to fetch.
    """
    directory = wheels or cache_dir()
    found = _wheel_in(directory, package, version)
    if found:
        return found
    if wheels:
        raise UsageProblem(
            f"no wheel of {package} {version}", where=str(wheels), next_step="put it there, or leave --wheels out"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="download-") as beside:
        command = [sys.executable, "-m", "pip", "download", *FOR_TARGETS, "--dest", beside, f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = _wheel_in(Path(beside), package, version)
        if done.returncode or not fetched:
            raise UsageProblem(
                f"pip could not fetch {package} {version}",
                next_step="check the version, or name a directory that has the wheel with --wheels DIR",
                detail=done.stderr,
            )
        return fetched.replace(directory / fetched.name)


def unpack(wheel: Path, package: str, version: str, destination: Path) -> None:
    """Write the package's files from the wheel.  Raises UsageProblem as `read`."""
    for name, data in read(wheel, package, version):
        target = destination / name
        if not target.resolve().is_relative_to(destination.resolve()):
            raise _bad_wheel(f"{name} leads out of the wheel", wheel)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def read(wheel: Path, package: str, version: str, wanted: Collection[str] | None = None) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the package's files, all or those ``wanted``, each checked against the wheel's own RECORD.

    Raises UsageProblem for a wheel that is another one or damaged.
    """
    with zipfile.ZipFile(wheel) as archive:
        record = f"{package}-{version}.dist-info/RECORD"
        if record not in archive.namelist():
            raise _bad_wheel(f"not the wheel of {package} {version}", wheel)
        recorded = {row[0]: row[1] for row in csv.reader(archive.read(record).decode().splitlines())}
        for name in archive.namelist():
            if not name.startswith(f"{package}/") or name.endswith("/") or (wanted is not None and name not in wanted):
                continue
            data = archive.read(name)
            digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if recorded.get(name) != f"sha256={digest}":
                raise _bad_wheel(f"{name} is not what the wheel's RECORD says", wheel)
            yield name, data


def copy_tree(site: Path, package: str, version: str, destination: Path) -> None:
    """The package's files from someone's own tree: a site-packages, or the folder with the package of a checkout.

    Links are followed, bytecode is left out.  Raises UsageProblem if the package is not there, or if the metadata
    beside it names another version.
    """
    if not (site / package).is_dir():
        raise UsageProblem(f"no package {package} in it", where=str(site), next_step="name the folder above it")
    for info in site.glob("*.dist-info"):
        name, _, found = info.name.removesuffix(".dist-info").rpartition("-")
        if canonicalize_name(name) == canonicalize_name(package) and found != version:
            raise UsageProblem(
                f"the tree has {package} {found}, not {version}", where=str(info), next_step=f"give {found}"
            )
    no_bytecode = shutil.ignore_patterns("__pycache__", "*.pyc", ".git")
    shutil.copytree(site / package, destination / package, ignore=no_bytecode)


def _wheel_in(directory: Path, package: str, version: str) -> Path | None:
    for path in sorted(directory.glob("*.whl")):
        try:
            name, found, _, _ = parse_wheel_filename(path.name)
            if name == canonicalize_name(package) and found == Version(version):
                return path
        except (InvalidWheelFilename, InvalidVersion):
            continue
    return None


def _bad_wheel(what: str, wheel: Path) -> UsageProblem:
    return UsageProblem(what, where=str(wheel), next_step="fetch it anew")
