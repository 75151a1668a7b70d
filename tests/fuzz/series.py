"""Series against the loader: a good one, with its files damaged, exchanged or missing, and signed anew or not."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

from patcher.errors import Conflict
from patcher.plan.make import make_plan
from patcher.series.catalogue import load_series
from patcher.series.model import sha256
from tests.fuzz.damage import damaged
from tests.fuzz.patches import Files, changed_files, edited, stays_inside
from tests.support.builders import inspection, make_series

TOML = (
    b"name = 1",
    b"x = 1979-99-99",
    b"n = " + b"9" * 5000,
    b"a = " + b"[" * 3000,
    b"[files]",
    b"[[stages]]",
    b"= 1",
    b'package = ""',
    b'package = ".."',
    b'package = "os.path"',
    b"ops = [[]]",
    b"versions = []",
    b"files = []",
    b'"\\ud800" = 1',
    b"stages = [1]",
    b"patches = [{}]",
    b"lines_sha256 = {}",
    b"x = 1e999",
    b"x = nan",
)
JSON = (
    b"[]",
    b"{}",
    b"null",
    b"[" * 3000,
    b'{"a": ' * 3000,
    b'{"sglang/x.py": 1}',
    b'{"sglang/x.py": "%%%"}',
    b"\xff",
    b'{"sglang/x.py": "\\ud800"}',
    b"9" * 5000,
    b'{"sglang/x.py": "AAA="}',
)


@dataclass(frozen=True)
class Original:
    """A good series: its files by name, and the package's files pristine and after each stage."""

    files: dict[str, bytes]
    pristine: Files
    after: dict[str, Files]


def original(rng: Random, folder: Path) -> Original:
    while True:
        pristine, one = changed_files(rng)
        two = {path: edited(rng, data) if data and rng.random() < 0.7 else data for path, data in one.items()}
        if pristine != one != two:
            break
    stages = {"one": _changes(pristine, one), "two": _changes(one, two)}
    make_series(folder, pristine, stages)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return Original(files, pristine, {"pristine": pristine, "one": one, "two": two})


def _changes(old: Files, new: Files) -> Files:
    return {path: data for path, data in new.items() if data != old[path]}


def damaged_series(rng: Random, good: Original) -> dict[str, bytes]:
    """The files of a series after an accident; where it was signed anew, the hashes say nothing of it."""
    files = dict(good.files)
    kind = rng.randrange(10)
    name = rng.choice(sorted(files))
    if kind == 0:
        del files[name]
    elif kind == 1:
        files[rng.choice(("0009-other.patch", "0001-copy.patch", "x.patch", "lines.json"))] = files[name]
    elif kind == 2:
        files[name] = rng.choice((b"", files[rng.choice(sorted(files))]))
    else:
        name = name if kind < 7 else "series.toml"
        more = {"series.toml": (_toml, _swapped_hash, _toml_value), "lines.json": (_json,)}.get(name, ())
        files[name] = damaged(rng, files[name], more)
    if name != "series.toml" and name in files and "series.toml" in files and rng.random() < 0.7:
        was, now = sha256(good.files[name]).encode(), sha256(files[name]).encode()
        files["series.toml"] = files["series.toml"].replace(was, now)
    return files


def _toml(rng: Random, text: bytes) -> bytes:
    lines = text.split(b"\n")
    lines.insert(rng.randrange(len(lines)), rng.choice(TOML))
    return b"\n".join(lines)


def _toml_value(rng: Random, text: bytes) -> bytes:
    values = list(re.finditer(rb"= (.*)\n", text))
    if not values:
        return text
    value = rng.choice(values)
    new = rng.choice((b"1", b"[]", b"{}", b'"absent"', b'"\\u001b[2J"', b"true", b"[1]", b'"../x"', b"1979-05-27"))
    return text[: value.start(1)] + new + text[value.end(1) :]


def _swapped_hash(rng: Random, text: bytes) -> bytes:
    hashes = re.findall(rb"[0-9a-f]{64}", text)
    if not hashes:
        return text
    one, other = rng.choice(hashes), rng.choice((*hashes, b"0" * 64, b"absent"))
    return text.replace(one, other, 1)


def _json(rng: Random, text: bytes) -> bytes:
    if rng.random() < 0.5:
        table = dict.fromkeys(("sglang/x.py", "sglang/y.py")[: rng.randrange(3)], "AAAA")
        table[rng.choice(("sglang/x.py", "../x", "é"))] = rng.choice(("", "AAAA", 1, None, [], "é"))
        return json.dumps(table).encode()
    return rng.choice(JSON)


def check_series(files: dict[str, bytes], good: Original, folder: Path) -> str:
    """As check_patch. An accepted series gives the intended bytes, or says that it does not."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    series = load_series(folder)
    for path in series.files:
        stays_inside(path)
        assert path.startswith(f"{series.package}/")
    if set(series.files) - set(good.pristine):
        return "accepted"
    for stage in series.stages:
        for path in series.files:
            try:
                made = series.render(path, good.pristine[path], stage.name)
            except Conflict:
                return "accepted"
            assert sha256(made) == series.sha256(path, stage.name)
            if files == good.files:
                assert made == good.after[stage.name][path], "not what the edit script gives"
    with tempfile.TemporaryDirectory() as site:
        for path, data in good.pristine.items():
            if data is not None:
                (Path(site) / path).parent.mkdir(exist_ok=True)
                (Path(site) / path).write_bytes(data)
        plan = make_plan(series, series.stages[-1].name, inspection(Path(site), series.files))
    for action in plan.changes:
        assert sha256(action.new) == action.after
    return "applied"
