"""A virtual environment with the real SGLang 0.5.11 on the CPU, and the real wheel, both kept in a cache.

`python -m scripts.rig.target` builds what is missing and prints the paths.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.rig.problem import RigProblem

SGLANG = "sglang==0.5.11"
WHEEL = "sglang-0.5.11-cp311-cp311-manylinux_2_34_x86_64.whl"
WHEEL_SHA256 = "fe0748beaff218d3e16c9018a5e19f018db06fc3c7ac4f90d2f93da1cf074b6f"
PYTHON = (3, 11)  # the interpreter that the wheels are built for

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements-sglang-0.5.11.txt"
SHIMS = HERE / "cpu_shims.py"

# In this order, and all but torch without their dependencies: sglang's own pins would bring gigabytes of CUDA.
# Which torch 2.13.0 it is (a CPU build is enough and far smaller) is the business of the machine's pip settings.
INSTALLS = (
    ("torch==2.13.0",),
    ("--no-deps", SGLANG, "torchvision==0.28.0", "triton==3.7.1"),
    ("--no-deps", "-r", str(REQUIREMENTS)),
)


def cache_dir() -> Path:
    """$DDTREE_PATCH_CACHE, or ~/.cache/ddtree-patch; created if missing."""
    path = Path(os.environ.get("DDTREE_PATCH_CACHE") or Path.home() / ".cache" / "ddtree-patch")
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """One builder of `name` at a time; others wait here and then find it built."""
    with open(cache_dir() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wheel() -> Path:
    """The SGLang wheel as published, in the cache. Raises RigProblem if it cannot be had or is another one."""
    path = cache_dir() / WHEEL
    with _locked("wheel"):
        if not path.exists():
            beside = cache_dir() / "download"
            shutil.rmtree(beside, ignore_errors=True)
            _pip(
                Path(sys.executable),
                "download",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--python-version",
                "3.11",
                "--dest",
                str(beside),
                SGLANG,
            )
            os.replace(beside / WHEEL, path)
            beside.rmdir()
    if hashlib.sha256(path.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise RigProblem(f"{path} is not the published {SGLANG}: another sha256. Delete it and run again.")
    return path


def unpack_wheel(destination: Path) -> Path:
    """Unpack the wheel into the new directory `destination` and return it: a tree for --site-packages."""
    destination.mkdir(parents=True)
    with zipfile.ZipFile(wheel()) as archive:
        archive.extractall(destination)
    return destination


def target_venv() -> Path:
    """The CPU target venv in the cache, built now (a minute or two) unless there. Raises RigProblem.

    The directory is named by a hash of all that is installed into it; the shims are brought up to date in place. It is
    complete if and only if its marker file exists, which is written last: a venv cannot be moved into place
    afterwards, since scripts name its path.
    """
    if sys.version_info[:2] != PYTHON:
        raise RigProblem(f"the target venv needs CPython 3.11, this is {sys.version.split()[0]}: run with python3.11")
    recipe = repr((INSTALLS[:2], REQUIREMENTS.read_text(), sys.version, sys.base_prefix))
    name = f"target-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    path = cache_dir() / name
    marker = path / "complete"
    with _locked(name):
        if not marker.exists():
            shutil.rmtree(path, ignore_errors=True)
            _build(path)
            marker.touch()
        _install_shims(site_packages(path))
    return path


def _build(path: Path) -> None:
    print(f"building the target venv with the real {SGLANG} in {path}", file=sys.stderr, flush=True)
    venv.create(path, with_pip=True)
    for arguments in INSTALLS:
        _pip(path / "bin/python", "install", *arguments)
    _install_shims(site_packages(path))
    _run([str(path / "bin/python"), "-c", "import sglang.srt.server_args"], "the built target venv does not work")


def site_packages(venv_path: Path) -> Path:
    return venv_path / "lib/python3.11/site-packages"


def _install_shims(directory: Path) -> None:
    shutil.copyfile(SHIMS, directory / "ddtree_cpu_shims.py")
    (directory / "ddtree_cpu_shims.pth").write_text("import ddtree_cpu_shims\n")


def copy_target(destination: Path) -> Path:
    """A venv of its own at `destination` that may be patched: real copies of SGLang's files, the rest by reference.

    Everything but sglang (torch and the like, two gigabytes) is imported from the cached venv through a .pth file,
    behind the copy's own site-packages. Shared files are never links, so nothing written here reaches the cache.
    """
    base = site_packages(target_venv())
    venv.create(destination, with_pip=False)
    own = site_packages(destination)
    for pattern in ("sglang", "sglang-*.dist-info"):
        for source in base.glob(pattern):
            shutil.copytree(source, own / source.name)
    _install_shims(own)
    (own / "shared.pth").write_text(f"{base}\n")
    return destination


def add_pytest(venv_path: Path) -> None:
    """Let `venv_path/bin/python -m pytest` run, behind whatever the venv has: pytest itself stays in the cache."""
    path = cache_dir() / "pytest-for-target"
    with _locked(path.name):
        if not (path / "complete").exists():
            shutil.rmtree(path, ignore_errors=True)
            _pip(Path(sys.executable), "install", "--target", str(path), "pytest>=8,<10")
            (path / "complete").touch()
    (site_packages(venv_path) / "pytest.pth").write_text(f"{path}\n")


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "--quiet", *arguments], "pip could not get what the rig needs")


def _run(argv: list[str], what: str) -> None:
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = b"\n".join(done.stdout.splitlines()[-20:]).decode(errors="replace")
        raise RigProblem(f"{what}: {' '.join(argv)} ended with {done.returncode}:\n{tail}")


if __name__ == "__main__":
    try:
        print(wheel(), target_venv(), sep="\n")
    except RigProblem as problem:
        sys.exit(f"error: {problem}")
