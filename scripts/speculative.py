"""The patched modules of sglang/srt/speculative: of the installed SGLang, or from a directory where there is none."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.speculative")


def load(name: str, directory: Path | None = None) -> ModuleType:
    """Import sglang.srt.speculative.<name>.

    directory: where its file and those it imports are, for a host without SGLang. The packages above them are then
        empty, so it serves modules that import nothing else of SGLang: ddtree_tree, ddtree_kernels, ddtree_top_kernels.
    """
    if directory is not None:
        for package in PACKAGES:
            empty = ModuleType(package)
            empty.__path__ = [str(directory)] if package == PACKAGES[-1] else []
            there = sys.modules.setdefault(package, empty)
            if not hasattr(there, "__path__"):  # a stand-in that somebody else made
                there.__path__ = empty.__path__
    return importlib.import_module(f"{PACKAGES[-1]}.{name}")
