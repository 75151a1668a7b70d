"""The small package of the cases, and series signed over whatever a patch file holds.

`A` is a file of the lines a to g, and the hunk `H` turns its c into C. Two-file cases use `X` and `Y`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomlkit

from patcher.series import udiff
from patcher.series.model import line_digest, sha256
from tests.support.builders import VERSION, make_package
from tests.support.command_line import Said

X, Y = "sglang/x.py", "sglang/y.py"
A = b"a\nb\nc\nd\ne\nf\ng\n"
H = b"@@ -2,3 +2,3 @@\n b\n-c\n+C\n d\n"
PATCHED = A.replace(b"c\n", b"C\n")


def patch_of(*paths: str, hunks: bytes = H) -> bytes:
    return b"".join(b"--- a/%s\n+++ b/%s\n%s" % (path.encode(), path.encode(), hunks) for path in paths)


def sign(
    directory: Path,
    patches: Mapping[str, bytes],
    pristine: Mapping[str, bytes | None],
    after: Sequence[Mapping[str, bytes | None]],
) -> Path:
    """Write a series of patches as they come, with every hash right: what is wrong with it is the patches' own.

    patches: stage -> patch. after: for each stage the files that it changes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines = json.dumps(
        {
            path: b64encode(b"".join(map(line_digest, udiff.split_lines(data)))).decode()
            for path, data in pristine.items()
            if data is not None
        }
    ).encode()
    files, now = {path: {"pristine": sha256(data) or "absent"} for path, data in pristine.items()}, dict(pristine)
    rows = []
    for number, (stage, changed) in enumerate(zip(patches, after, strict=True), 1):
        now |= changed
        name = f"{number:04}-{stage}-all.patch"
        (directory / name).write_bytes(patches[stage])
        rows.append({"file": name, "stage": stage, "purpose": stage, "sha256": sha256(patches[stage])})
        for path, hashes in files.items():
            hashes[stage] = sha256(now[path]) or "absent"
    settings = {
        "name": f"sglang-{VERSION}",
        "package": "sglang",
        "versions": [VERSION],
        "ops": ["op"],
        "lines_sha256": sha256(lines),
        "stages": [{"name": stage, "purpose": stage} for stage in patches],
        "patches": rows,
        "files": files,
    }
    (directory / "series.toml").write_text(tomlkit.dumps(settings))
    (directory / "lines.json").write_bytes(lines)
    return directory


class Tree:
    """An unpacked package of X and Y, both A, and the one series of the catalogue."""

    def __init__(self, home: Path, files: Mapping[str, bytes | None] | None = None) -> None:
        self.home = home
        self.pristine = {X: A, Y: A} if files is None else dict(files)
        self.site = make_package(home / "site-packages", {"sglang/__init__.py": b"", **self.pristine})
        self.series = home / "series" / "only"

    @property
    def options(self) -> tuple[object, ...]:
        return ("--site-packages", self.site, "--json")

    def sign(
        self,
        patch: bytes,
        after: Mapping[str, bytes | None] | None = None,
        pristine: Mapping[str, bytes | None] | None = None,
    ) -> None:
        """A series with one patch; `after`: X and Y with C, if nothing else is said."""
        after = {X: PATCHED, Y: PATCHED} if after is None else after
        sign(self.series, {"all": patch}, self.pristine if pristine is None else pristine, [after])

    def read(self, path: str) -> bytes | None:
        return (self.site / path).read_bytes() if (self.site / path).is_file() else None

    def write(self, path: str, data: bytes) -> None:
        (self.site / path).write_bytes(data)

    def everything(self) -> dict[str, object]:
        """Every name below the home of the test, with what it holds: nothing may appear beside the package either."""
        return contents(self.home)


class Venv(Tree):
    """The same in a venv of its own, patched through its interpreter; no server is looked after.

    It is this machine's (`options`), and the host `demo` of its hosts.toml.
    """

    def __init__(self, home: Path, files: Mapping[str, bytes | None]) -> None:
        self.home, self.venv = home, home / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.venv)], check=True)
        self.pristine = dict(files)
        site = next(self.venv.glob("lib/python*/site-packages"))
        self.site = make_package(site, {"sglang/__init__.py": b"", **files})
        self.series = home / "series" / "only"
        self.python = str(self.venv / "bin" / "python")
        self.state = self.venv / ".ddtree-patch" / "sglang"
        self.config = home / "hosts.toml"
        self.config.write_text(
            "".join(
                f'[hosts.{name}]\nvenv = "{self.venv}"\n'
                'service = { kind = "none" }\nkernels = { require = false }\n'
                for name in ("local", "demo")
            )
        )

    @property
    def options(self) -> tuple[object, ...]:
        return ("--local", "--config", self.config, "--json")

    def run(self, code: str, *flags: str, **environment: str) -> str:
        """What the venv's interpreter prints."""
        done = subprocess.run(
            [self.python, *flags, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )
        return done.stdout.strip()

    def at_start(self, code: str) -> None:
        """Let the agent run this code first, whoever starts it: the way to a fault at a certain moment."""
        script = self.home / "agent_start.txt"
        script.write_text(f"if 'ddtree_agent' in ' '.join(sys.orig_argv):\n    exec({code!r}, {{'sys': sys}})\n")
        (self.site / "agent_start.pth").write_text(f"import sys; exec(open({str(script)!r}).read())\n")


def make_wheel(folder: Path, files: Mapping[str, bytes | None], version: str = VERSION) -> Path:
    """A wheel of the package, for pip and uv."""
    root = make_package(folder / "content", {"sglang/__init__.py": b"", **files}, version=version)
    wheel = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            archive.write(path, path.relative_to(root))
    return wheel


def contents(root: Path) -> dict[str, object]:
    """Every name below `root` -> bytes of a file, target of a link, None for a directory."""
    return {
        str(path.relative_to(root)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(root.rglob("*"))
    }


def told(said: Said, code: int, *words: str) -> dict:
    """The error of a failed run: its exit code, its three parts, and these words in it; gives the error."""
    assert said.code == code, said.stdout + said.stderr
    error = said.error
    assert error["exit_code"] == code and error["what"] and error["where"] and error["next"], error
    text = " ".join((error["what"], error["where"], error["next"], error["detail"]))
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return error


def refused_at_load(said: Said, *words: str) -> dict:
    """Refused before any host was asked."""
    error = told(said, 4, *words)
    assert error["error"] == "SeriesProblem" and said.json["hosts"] == []
    return error
