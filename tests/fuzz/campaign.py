"""Many cases from one seed, and what became of them."""

from __future__ import annotations

import collections
import shutil
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from patcher.errors import DdtreePatchError
from tests.fuzz.patches import check_patch, patch_cases
from tests.fuzz.replies import Replies
from tests.fuzz.series import check_series, damaged_series, original
from tests.support.builders import make_series
from tests.support.installations import STAGES, Installation, sha

SERIES_EACH = 200  # damaged series made of one good one
GIT_EACH = 40  # of the accepted damaged patches, every so many-th is given to git too


@dataclass
class Figures:
    """outcomes: "applied", "accepted" (but not applied to these files) or an error's name, -> how many.

    crashes: whatever was no typed error and no right result, with how to see it again.
    """

    kind: str
    cases: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    by_git: int = 0
    crashes: list[str] = field(default_factory=list)

    def note(self, check, again: str) -> str:
        self.cases += 1
        try:
            outcome = check()
        except DdtreePatchError as error:
            outcome = f"refused: {type(error).__name__}" if type(error) is not DdtreePatchError else "untyped"
            if outcome == "untyped":
                self.crashes.append(f"{again}: {error}")
        except Exception:
            outcome = "crash"
            self.crashes.append(f"{again}\n{traceback.format_exc()}")
        self.outcomes[outcome] += 1
        return outcome

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        git = f"; {self.by_git} also compared with git" if self.by_git else ""
        return f"{self.kind}: {self.cases} cases: {told}{git}; {len(self.crashes)} crashes"


def fuzz_patches(count: int, seed: int, git_each: int = GIT_EACH) -> Figures:
    figures = Figures("patches")
    accepted = 0
    at = 0
    while figures.cases < count:
        for number, case in enumerate(patch_cases(Random(f"{seed} {at}"))):
            again = f"patch {seed} {at} {number}: {case.raw!r}"
            outcome = figures.note(lambda case=case: check_patch(case, False), again)
            if outcome == "applied" and case.new is None:
                accepted += 1
                if accepted % git_each == 0:
                    figures.by_git += 1
                    figures.cases -= 1
                    figures.outcomes["applied"] -= 1
                    figures.note(lambda case=case: check_patch(case, True), again)
        at += 1
    return figures


def fuzz_series(count: int, seed: int) -> Figures:
    figures = Figures("series")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        at = 0
        while figures.cases < count:
            rng = Random(f"{seed} {at}")
            good = original(rng, Path(scratch, "good"))
            figures.note(lambda good=good: _in_folder(good.files, good, scratch), f"series {seed} {at}")
            for number in range(min(SERIES_EACH, count - figures.cases)):
                files = damaged_series(rng, good)
                figures.note(
                    lambda files=files, good=good: _in_folder(files, good, scratch),
                    f"series {seed} {at} {number}: {files!r}",
                )
            shutil.rmtree(Path(scratch, "good"))
            at += 1
    return figures


def fuzz_replies(count: int, seed: int) -> Figures:
    """A third of the cases each: a stock tree, and one at each stage."""
    figures = Figures("replies")
    with tempfile.TemporaryDirectory() as scratch:
        series = make_series(Path(scratch, "series"))
        hosts = []
        for stage in ("pristine", "ddtree", "temperature"):
            tree = Installation.tree(Path(scratch, stage))
            if stage != "pristine":
                request = tree.request(stage)
                told = {
                    "series": series.name,
                    "package": "sglang",
                    "version": "0.5.11",
                    "by": "me",
                    "tool": "1",
                    "identity": series.identity(stage),
                }
                request["receipt"] |= told
                request["history"] = {"event": "apply"}
                tree.ask("commit", **request)
            committed = {
                "commit_time": 1.7e9,
                "record": "rewritten",
                "recovered": "nothing",
                "left": [],
                "read_back": {path: sha(data) for path, data in STAGES["temperature"].items()},
            }
            hosts.append(Replies(series, tree.site, committed))
        for number in range(count):
            again = f"{seed} {number}"
            figures.note(lambda again=again, host=hosts[number % 3]: host.check(again), f"reply {again}")
    return figures


def _in_folder(files: dict[str, bytes], good, scratch: str) -> str:
    folder = Path(scratch, "case")
    folder.mkdir()
    try:
        return check_series(files, good, folder)
    finally:
        shutil.rmtree(folder)
