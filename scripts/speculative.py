"""The patched modules of sglang/srt/speculative: of the installed SGLang, or from a directory where there is none."""

import importlib
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.speculative")


def patched_directory() -> Path | None:
    """$SPECULATIVE_DIR, else sglang/srt/speculative of the installed SGLang; None where there is neither."""
    if "SPECULATIVE_DIR" in os.environ:
        return Path(os.environ["SPECULATIVE_DIR"])
    # Not by sys.modules, where a stand-in may be; nor by import, which needs all that a server needs.
    installed = importlib.machinery.PathFinder.find_spec("sglang")
    return Path(installed.origin).parent / "srt/speculative" if installed else None


def load(name: str, directory: Path | None = None) -> ModuleType:
    """Import sglang.srt.speculative.<name>.

    directory: where its file and those it imports are, for a host without SGLang. The packages above them are then
        empty, so it serves modules that import nothing else of SGLang (ddtree_tree, ddtree_kernels,
        ddtree_top_kernels), and those for whose other imports the caller has put stand-ins into sys.modules.
    """
    if directory is not None:
        for package in PACKAGES:
            empty = ModuleType(package)
            empty.__path__ = [str(directory)] if package == PACKAGES[-1] else []
            sys.modules.setdefault(package, empty)
    return importlib.import_module(f"{PACKAGES[-1]}.{name}")
