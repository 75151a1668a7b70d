"""Run the fault matrix: python -m tests.faults.run --thin|--whole [--only TEXT] [--json FILE] [--markdown FILE].

Needs root with CAP_SYS_ADMIN: mounts and processes are in namespaces of its own, and end with it.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.faults.causes import make_image
from tests.faults.cell import Result, run_cell
from tests.faults.cells import Cell, thin, whole
from tests.faults.prepare import Starts
from tests.faults.table import as_markdown, as_text

NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def obey_permissions() -> None:
    """What is started from here on is root, but not one who may write where the mode bits forbid it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")


def run(cells: list[Cell], folder: Path, workers: int) -> list[Result]:
    """Run the cells below FOLDER, WORKERS at a time."""
    for name in [name for name in os.environ if name.startswith("DDTREE_")]:
        del os.environ[name]
    os.environ["XDG_CONFIG_HOME"] = str(folder / "no-config")
    os.environ["PYTHONPATH"] = os.getcwd()  # for clients in a process of their own
    starts = Starts(folder / "starts")
    starts.make()
    for name in starts.snapshots:
        make_image(starts.folder / name)
    with ProcessPoolExecutor(workers, initializer=obey_permissions) as pool:
        results = []
        work = functools.partial(_numbered, starts=starts, folder=folder)
        for result in pool.map(work, enumerate(cells)):
            results.append(result)
            if result.problems:
                print(f"{result.cell}: {'; '.join(result.problems)}", file=sys.stderr, flush=True)
    return results


def _numbered(numbered: tuple[int, Cell], starts: Starts, folder: Path) -> Result:
    number, cell = numbered
    return run_cell(cell, starts, folder / f"cell-{number}")


def main() -> None:
    if "--inside" not in sys.argv:
        os.execvp("unshare", [*NAMESPACES, sys.executable, "-m", "tests.faults.run", "--inside", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--thin", action="store_const", const=thin, dest="cells")
    which.add_argument("--whole", action="store_const", const=whole, dest="cells")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--json", type=Path, help="results as JSON")
    parser.add_argument("--markdown", type=Path, help="the table as a page")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cells = [cell for cell in options.cells() if options.only in str(cell)]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        results = run(cells, Path(folder), options.workers)
    print(as_text(results))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results]))
    if options.markdown:
        options.markdown.write_text(as_markdown(results))
    sys.exit(any(result.problems for result in results))


if __name__ == "__main__":
    main()
