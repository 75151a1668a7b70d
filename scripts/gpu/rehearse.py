"""Make a release's two environments for a rehearsal on this machine's CPU.

    python3 -m scripts.gpu.rehearse ENVIRONMENTS 0.5.17

ENVIRONMENTS/RELEASE/stock has the release as it came and ENVIRONMENTS/RELEASE/patched the series applied, as install.py
leaves them on a GPU host; `scripts.gpu.run --rehearsal` runs with them. Needs what the rig needs (`make rig`).
"""

import argparse
import subprocess
import sys
from pathlib import Path

from scripts.rig.releases import named
from scripts.rig.target import copy_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("release", type=named)
    args = parser.parse_args()
    folder = (args.environments / args.release.version).absolute()
    for name in ("stock", "patched"):
        copy_target(folder / name, args.release)
    apply = ("-m", "patcher", "apply", "--local", "--venv", str(folder / "patched"), "--no-restart")
    subprocess.run([sys.executable, *apply], check=True)


if __name__ == "__main__":
    main()
