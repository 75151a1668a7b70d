"""Patches against the reader and the engine: files, an edit script, a patch for it, and mostly some damage.

Oracles: the edit script itself for what is undamaged; for what is damaged and accepted all the same, git, or GNU patch
where git is the stricter one.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from patcher.errors import Conflict
from patcher.series import udiff
from patcher.series.udiff_parse import parse
from tests.fuzz.damage import damaged

PATHS = ("sglang/x.py", "sglang/y.py", "sglang/new.py")
# Few distinct lines make repeated context likely; some look like a patch's own lines.
LINES = (
    b"a",
    b"b",
    b"c",
    b"",
    b"    return",
    b"-",
    b"+x",
    b"-- ",
    b"@@ -1 +1 @@",
    b"\\ No",
    b"x\r",
    b"\f",
    b"\xff",
    b"--- a/sglang/x.py",
    b"\xc2\x85",
    b" ",
    b"\x1b[2J",
)
ENVIRONMENT = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
TOOLS = (
    ["git", "apply", "--whitespace=nowarn", "-"],
    ["patch", "-F0", "-p1", "--binary", "--force", "--no-backup-if-mismatch", "-s"],
)
Files = dict[str, bytes | None]


@dataclass(frozen=True)
class PatchCase:
    """`raw` is what is read; `new` what `old` must become, None once the patch is damaged."""

    raw: bytes
    old: Files
    new: Files | None


def patch_cases(rng: Random) -> Iterator[PatchCase]:
    """One patch and three damaged ones made from it."""
    old, new = changed_files(rng)
    raw = preamble(rng) + b"".join(udiff.make(path, old[path], new[path]) for path in PATHS)
    if old == new:
        return
    yield PatchCase(raw, old, new)
    for _ in range(3):
        yield PatchCase(damaged(rng, raw), old, None)


def changed_files(rng: Random) -> tuple[Files, Files]:
    old, new = {}, {}
    for path in PATHS[: rng.randrange(1, 4)]:
        old[path] = None if rng.random() < 0.15 else contents(rng)
        new[path] = None if old[path] is not None and rng.random() < 0.1 else edited(rng, old[path] or b"")
    rest = dict.fromkeys(PATHS)
    return {**rest, **old}, {**rest, **new}


def contents(rng: Random) -> bytes:
    text = b"".join(rng.choice(LINES) + b"\n" for _ in range(rng.randrange(18)))
    return text[:-1] if rng.random() < 0.15 else text


def edited(rng: Random, text: bytes) -> bytes:
    """TEXT with a few pieces replaced."""
    lines = udiff.split_lines(text)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(lines) + 1)
        lines[at : at + rng.randrange(3)] = [rng.choice(LINES) + b"\n" for _ in range(rng.randrange(3))]
    return b"".join(lines)


def preamble(rng: Random) -> bytes:
    return rng.choice((b"", b"", b"Subject: x\n\nwhy\n---\n sglang/x.py | 2 +-\n\n"))


def check_patch(case: PatchCase, ask_others: bool) -> str:
    """ "accepted" or "applied". Raises what the tool refuses with, or AssertionError where it is wrong."""
    patches = parse(case.raw, "0001-x.patch")
    for patch in patches:
        stays_inside(patch.path)
    found = dict(case.old)
    for patch in patches:
        try:
            found[patch.path] = udiff.apply(patch, found.get(patch.path))
            back = udiff.apply(udiff.reverse(patch), found[patch.path])
        except Conflict:
            if case.new is not None:
                raise AssertionError("a patch does not fit the files that it was made from") from None
            return "accepted"
        assert back == case.old.get(patch.path), "the reverse does not give the old file back"
    if case.new is not None:
        assert found == case.new, "not what the edit script gives"
    elif ask_others:
        others = [made for made in (applied_by(tool, case.raw, case.old, set(found)) for tool in TOOLS) if made]
        assert found in others, f"git and GNU patch make something else of it, or nothing: {others}"
    return "applied"


def stays_inside(path: str) -> None:
    """Whatever a path is joined to, it stays below that."""
    joined = os.path.normpath(os.path.join("/site", path))
    assert joined == f"/site/{path}" and "\\" not in path and "\0" not in path, f"{path!r} leaves the package"


def applied_by(tool: list[str], raw: bytes, old: Files, paths: set[str]) -> Files | None:
    """What another tool makes of the files; None where it refuses."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "sglang").mkdir()
        for path, data in old.items():
            if data is not None:
                (root / path).write_bytes(data)
        done = subprocess.run(
            tool,
            cwd=root,
            input=raw,
            capture_output=True,
            check=False,
            env=ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": str(root.parent)},
        )
        if done.returncode != 0:
            return None
        return {path: (root / path).read_bytes() if (root / path).is_file() else None for path in paths}
