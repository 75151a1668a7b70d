"""The long run: python -m tests.fuzz [--cases N] [--seed N]. Ends with 1 when anything crashed or was wrong."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.campaign import fuzz_patches, fuzz_replies, fuzz_series

parser = argparse.ArgumentParser()
parser.add_argument("--cases", type=int, default=150_000, help="patches and series; a tenth as many replies more")
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
print(f"seed {options.seed}")
crashes = 0
for run, share in ((fuzz_patches, 0.6), (fuzz_series, 0.4), (fuzz_replies, 0.1)):
    begun = time.monotonic()
    figures = run(round(options.cases * share), options.seed)
    print(f"{figures} in {time.monotonic() - begun:.0f} s", flush=True)
    print(*figures.crashes[:20], sep="\n", end="" if not figures.crashes else "\n")
    crashes += len(figures.crashes)
sys.exit(1 if crashes else 0)
