import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from packages import A, Tree, Venv, X, Y

from scripts.rig import target
from tests.support.builders import VERSION, make_package

HOOK = """
import importlib.util, sys

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "sglang":
            return importlib.util.spec_from_file_location(
                name, {init!r}, submodule_search_locations=[{package!r}])

sys.meta_path.append(Finder)
"""


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Tree:
    """A tree of X and Y; its catalogue is what the test signs."""
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(tmp_path / "home" / "series"))
    monkeypatch.chdir(tmp_path)
    return Tree(tmp_path / "home")


@pytest.fixture
def installed_editable(tmp_path) -> Callable[[str, Mapping[str, bytes]], tuple[Path, Path]]:
    """An editable install, as pip leaves one: `installed_editable(kind, files)` gives (venv, root of the sources).

    kind: "path file" (a .pth that names the root) or "import hook" (a .pth that imports a finder).
    """

    def install(kind: str, files: Mapping[str, bytes]) -> tuple[Path, Path]:
        venv, source = tmp_path / "venv", tmp_path / "checkout" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        site = next(venv.glob("lib/python*/site-packages"))
        make_package(site, {})
        make_package(source, {"sglang/__init__.py": b"", **files})
        for path in sorted((source / f"sglang-{VERSION}.dist-info").iterdir()):
            path.unlink()
        (source / f"sglang-{VERSION}.dist-info").rmdir()
        if kind == "path file":
            (site / "__editable__.sglang.pth").write_text(f"{source}\n")
        else:
            package = source / "sglang"
            (site / "__editable___sglang_finder.py").write_text(
                HOOK.format(init=str(package / "__init__.py"), package=str(package))
            )
            (site / "__editable__.sglang.pth").write_text("import __editable___sglang_finder\n")
        return venv, source

    return install


@pytest.fixture
def small_venv(tmp_path, monkeypatch) -> Callable[[Mapping[str, bytes | None]], Venv]:
    """`small_venv(files)`: a venv with the package of these files; its catalogue is what the test signs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(tmp_path / "home" / "series"))
    return lambda files: Venv(tmp_path / "home", files)


@pytest.fixture
def venv(small_venv) -> Venv:
    """A venv with X and Y, both A."""
    return small_venv({X: A, Y: A})


@pytest.fixture
def linked_wheel(unpacked_wheel, tmp_path, monkeypatch) -> Path:
    """A tree of the real release whose files are hard links to the unpacked wheel: write no file of it in place."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(unpacked_wheel, tmp_path / "linked", copy_function=os.link))


@pytest.fixture(scope="session")
def uv() -> Path:
    """The real uv, kept in the cache."""
    folder = target.cache_dir() / "uv"
    if not (folder / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "uv"], check=True)
    return folder / "bin" / "uv"
