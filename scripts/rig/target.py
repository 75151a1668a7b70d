"""Virtual environments with the real SGLang on the CPU, one per release, and the real wheels, all kept in a cache.

`python -m scripts.rig.target [VERSION...]` builds what is missing and prints the paths. In the cache:

* a base: torch, torchvision, triton and the packages that all releases share;
* a folder for each file requirements/from-*.txt: packages that some releases want in a version of their own;
* a target for each release: a venv that holds SGLang itself, and imports the rest from the two above.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.rig.problem import RigProblem
from scripts.rig.releases import ALWAYS, DEFAULT, Release, named

PYTHON = (3, 11)  # the interpreter that the wheels are built for

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements"
SHIMS = HERE / "cpu_shims"

# In this order, and all but torch without their dependencies: sglang's own pins would bring gigabytes of CUDA.
# Which torch 2.13.0 it is (a CPU build is enough and far smaller) is the business of the machine's pip settings.
BASE = (
    ("torch==2.13.0",),
    ("--no-deps", "torchvision==0.28.0", "triton==3.7.1"),
    ("--no-deps", "-r", str(REQUIREMENTS / "base.txt")),
)
# What the tests need that the venv's Python runs, beside numpy.
TESTING = (("pytest>=8,<10",), ("--no-deps", "scipy==1.17.1"))


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


# ---- wheels ------------------------------------------------------------------------------------------------


def wheel(release: Release = DEFAULT) -> Path:
    """The SGLang wheel as published, in the cache. Raises RigProblem if it cannot be had or is another one."""
    path = cache_dir() / release.wheel
    with _locked(release.wheel):
        if not path.exists():
            beside = cache_dir() / f"{release.wheel}.download"
            shutil.rmtree(beside, ignore_errors=True)
            requirement = f"sglang=={release.version}"
            how = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "--dest", str(beside))
            _pip(Path(sys.executable), "download", *how, requirement)
            os.replace(beside / release.wheel, path)
            beside.rmdir()
    if hashlib.sha256(path.read_bytes()).hexdigest() != release.sha256:
        raise RigProblem(f"{path} is not the published wheel: another sha256. Delete it and run again.")
    return path


def unpack_wheel(destination: Path, release: Release = DEFAULT) -> Path:
    """Unpack the wheel into the new directory `destination` and return it: a tree for --site-packages."""
    destination.mkdir(parents=True)
    with zipfile.ZipFile(wheel(release)) as archive:
        archive.extractall(destination)
    return destination


# ---- what a target is made of --------------------------------------------------------------------------------


def _built(kind: str, recipe: object, build: Callable[[Path], None]) -> Path:
    """The directory of the cache that `build` fills, by a name that hashes `recipe`; filled now unless it is there.

    It is complete if and only if its marker file exists, which is written last: a venv cannot be moved into place
    afterwards, since scripts name its path.
    """
    name = f"{kind}-{hashlib.sha256(repr((recipe, sys.version, sys.base_prefix)).encode()).hexdigest()[:12]}"
    path = cache_dir() / name
    with _locked(name):
        if not (path / "complete").exists():
            print(f"building {path}", file=sys.stderr, flush=True)
            shutil.rmtree(path, ignore_errors=True)
            build(path)
            (path / "complete").touch()
    return path


def _base() -> Path:
    """site-packages of the base."""

    def build(path: Path) -> None:
        venv.create(path, with_pip=True)
        for arguments in BASE:
            _pip(path / "bin/python", "install", *arguments)

    return site_packages(_built("base", (BASE[:2], (REQUIREMENTS / "base.txt").read_text()), build))


def _requirements(file: str) -> Path:
    """A folder with the packages of requirements/`file`, to be imported before the base's."""
    source = REQUIREMENTS / file

    def build(path: Path) -> None:
        _pip(Path(sys.executable), "install", "--no-deps", "--target", str(path), "-r", str(source))

    return _built(f"packages-{source.stem}", source.read_text(), build)


def target_venv(release: Release = DEFAULT) -> Path:
    """The CPU target venv of `release` in the cache, built now unless there; its shims are brought up to date.

    Raises RigProblem.
    """
    if sys.version_info[:2] != PYTHON:
        raise RigProblem(f"the target venv needs CPython 3.11, this is {sys.version.split()[0]}: run with python3.11")
    shared = [_requirements(release.requirements), _base()]

    def build(path: Path) -> None:
        venv.create(path, with_pip=False)
        python = path / "bin/python"
        _pip(Path(sys.executable), "--python", str(python), "install", "--no-deps", str(wheel(release)))
        _finish(path, shared)
        _run([str(python), "-c", "import sglang.srt.server_args"], "the built target venv does not work")

    path = _built(f"target-{release.version}", (release, shared), build)
    with _locked(path.name):
        _install_shims(site_packages(path))
    return path


def site_packages(venv_path: Path) -> Path:
    return venv_path / "lib/python3.11/site-packages"


def _finish(venv_path: Path, shared: list[Path]) -> None:
    """Add the shims and, behind the venv's own packages, those in `shared`."""
    own = site_packages(venv_path)
    (own / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    _install_shims(own)


def _install_shims(directory: Path) -> None:
    shutil.copytree(
        SHIMS, directory / "ddtree_cpu_shims", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    (directory / "ddtree_cpu_shims.pth").write_text("import ddtree_cpu_shims\n")


def copy_target(destination: Path, release: Release = DEFAULT) -> Path:
    """A venv of its own at `destination` that may be patched: real copies of SGLang's files, the rest by reference.

    Nothing written to it reaches the cache: shared packages are imported through a .pth file, none is a link.
    """
    base = site_packages(target_venv(release))
    venv.create(destination, with_pip=False)
    own = site_packages(destination)
    for pattern in ("sglang", "sglang-*.dist-info"):
        for source in base.glob(pattern):
            shutil.copytree(source, own / source.name)
    _finish(destination, [Path(line) for line in (base / "shared.pth").read_text().splitlines()])
    return destination


def add_pytest(venv_path: Path) -> None:
    """Let `venv_path/bin/python -m pytest` run and its tests import scipy, both from the cache, behind its own."""

    def build(path: Path) -> None:
        for arguments in TESTING:
            _pip(Path(sys.executable), "install", "--target", str(path), *arguments)

    path = _built("pytest-for-target", TESTING, build)
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
        for one in [named(version) for version in sys.argv[1:]] or ALWAYS:
            print(wheel(one), target_venv(one), sep="\n")
    except RigProblem as problem:
        sys.exit(f"error: {problem}")
