"""Loading a series: everything that contradicts itself is refused before any host is asked."""

from __future__ import annotations

import hashlib
import json
import shutil
from base64 import b64encode
from pathlib import Path

import pytest
import tomlkit

from patcher.errors import Conflict, SeriesProblem, UnsupportedVersion
from patcher.series import udiff
from patcher.series.catalogue import ROOT_VARIABLE, catalogue, check_against, load_series
from patcher.series.model import identity
from patcher.series.versions import choose
from tests.support.builders import PRISTINE, STAGES, files_after, make_series

ARGS, NEW, WORKER = "sglang/srt/args.py", "sglang/srt/ddtree.py", "sglang/srt/worker.py"


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    directory = tmp_path_factory.mktemp("catalogue") / "sglang-0.5.11"
    make_series(directory)
    return directory


@pytest.fixture
def directory(pattern, tmp_path):
    return Path(shutil.copytree(pattern, tmp_path / "sglang-0.5.11"))


def test_what_is_loaded(directory):
    series = load_series(directory)
    assert series.states == ("pristine", "ddtree", "temperature")
    assert [(patch.name, patch.stage) for patch in series.patches] == [
        ("ddtree-all", "ddtree"),
        ("temperature-all", "temperature"),
    ]
    assert series.state_of(ARGS, sha(PRISTINE[ARGS])) == {"pristine"}
    assert series.state_of(ARGS, sha(files_after("ddtree")[ARGS])) == {"ddtree", "temperature"}
    assert series.state_of(NEW, None) == {"pristine"}
    assert series.state_of(NEW, sha(b"other")) == {"unknown"}


def test_old_names_of_stages(tmp_path):
    stages = {"greedy": STAGES["ddtree"], "sampling": STAGES["temperature"]}
    series = make_series(tmp_path / "new", stages=stages)
    assert [series.stage_called(name) for name in ("greedy", "sampling", "ddtree", "temperature")] == [
        "greedy",
        "sampling",
    ] * 2
    assert series.stage_called("pristine") is None and series.stage_called("other") is None
    # A series of someone's own may call a stage what it likes.
    assert make_series(tmp_path / "own").stage_called("ddtree") == "ddtree"


@pytest.mark.parametrize("stage", STAGES)
def test_render_and_move_give_the_listed_bytes(directory, stage):
    series = load_series(directory)
    for path in series.files:
        pristine, patched = PRISTINE[path], files_after(stage)[path]
        assert series.render(path, pristine, stage) == patched
        assert series.move(path, patched, stage, "pristine") == pristine
        assert series.move(path, patched, stage, "temperature") == files_after("temperature")[path]
        assert list(series.digests(path, stage)) == [
            hashlib.sha256(line).digest()[:4] for line in udiff.split_lines(patched)
        ]


def test_render_refuses_what_is_not_pristine(directory):
    series = load_series(directory)
    with pytest.raises(SeriesProblem, match="another hash"):
        series.render(ARGS, PRISTINE[ARGS].replace(b"ARG_1 = 1\n", b"ARG_1 = 0\n"), "ddtree")
    with pytest.raises(Conflict):
        series.render(ARGS, PRISTINE[ARGS].replace(b"ARG_20 = 20\n", b"ARG_20 = 0\n"), "ddtree")


def test_identity_is_that_of_the_files_that_exist(directory):
    series = load_series(directory)
    files = {path: sha(data) for path, data in files_after("ddtree").items() if path in series.files}
    lines = "".join(f"{path}\0{value}\n" for path, value in sorted(files.items()))
    assert series.identity("ddtree") == hashlib.sha256(lines.encode()).hexdigest() == identity(files)
    assert series.identity("ddtree") != series.identity("temperature")
    assert series.identity("pristine") == identity({path: value for path, value in files_pristine(series).items()})


def test_pristine_at_hand_proves_the_hashes(directory):
    series = load_series(directory)
    check_against(series, PRISTINE)
    with pytest.raises(SeriesProblem, match="not the pristine file"):
        check_against(series, PRISTINE | {ARGS: b"other\n"})
    # A wrong hash of a file that existed before cannot be seen without that file.
    edit(directory, lambda table: table["files"][ARGS].update(ddtree="0" * 64, temperature="0" * 64))
    with pytest.raises(SeriesProblem, match="stage ddtree does not come out right"):
        check_against(load_series(directory), PRISTINE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(extra=1), "extra: unknown key"),
        (lambda t: t.pop("ops"), "ops: is missing"),
        (lambda t: t.update(ops=[]), "ops: must be a list"),
        (lambda t: t.update(versions="0.5.11"), "versions: must be a list"),
        (lambda t: t.update(versions=["1", "1"]), "versions: must be distinct"),
        (lambda t: t["stages"][0].update(extra=1), "extra: unknown key"),
        (lambda t: t["stages"][0].update(name="pristine"), "no name for a stage"),
        (lambda t: t["stages"].reverse(), "order of their stages"),
        (lambda t: t["stages"][1].update(name="ddtree"), "missing|unknown|distinct"),
        (lambda t: t["patches"][0].update(extra=1), "extra: unknown key"),
        (lambda t: t["patches"][0].update(stage="other"), "'other', which is not listed"),
        (lambda t: t["patches"][1].update(stage="ddtree"), "no patch is of stage temperature"),
        (lambda t: t["patches"].reverse(), "order of their stages"),
        (lambda t: t["patches"][0].update(sha256="0" * 64), "its sha256 differs"),
        (lambda t: t["patches"][0].update(file="../0001-x.patch"), "not named like"),
        (lambda t: t["patches"][0].update(file="0009-gone.patch"), "cannot be read"),
        (lambda t: t["patches"].pop(), "1 distinct names|no patch"),
        (lambda t: t["patches"].append(t["patches"][1]), "2 distinct names"),
        (lambda t: t["files"].pop(ARGS), f"differ: {ARGS}"),
        (lambda t: t["files"].update({"sglang/more.py": t["files"][ARGS]}), "differ: sglang/more.py"),
        (lambda t: t["files"][ARGS].pop("ddtree"), "ddtree: is missing"),
        (lambda t: t["files"][ARGS].update(other="absent"), "other: unknown key"),
        (lambda t: t["files"][ARGS].update(ddtree="abc"), "neither a sha256"),
        (lambda t: t["files"][ARGS].update(pristine="absent"), "lines.json is not about"),
        (lambda t: t["files"][ARGS].update(ddtree="absent"), "do not produce the hash listed for stage ddtree"),
        (lambda t: t["files"][ARGS].update(ddtree=t["files"][ARGS]["pristine"]), "contradicts the patches"),
        (lambda t: t["files"][ARGS].update(temperature="0" * 64), "contradicts the patches"),
        (lambda t: t["files"][NEW].update(ddtree="0" * 64), "do not produce the hash"),
        (lambda t: t.update(lines_sha256="0" * 64), "its sha256 differs"),
        (lambda t: t.update(package="other"), "not in the installed other/"),
    ],
)
def test_contradictions_in_series_toml(directory, change, said):
    edit(directory, change)
    with pytest.raises(SeriesProblem, match=said) as caught:
        load_series(directory)
    assert caught.value.exit_code == 4 and str(directory) in caught.value.where


@pytest.mark.parametrize("raw", [b"name = \n", b"\xff", b"", b"n = " + b"9" * 5000, b"n = " + b"[" * 5000])
def test_series_toml_that_cannot_be_read(directory, raw):
    (directory / "series.toml").write_bytes(raw)
    with pytest.raises(SeriesProblem, match=r"series\.toml"):
        load_series(directory)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"b/sglang/srt/args.py", b"b/../evil.py", "relative path"),
        (b"/sglang/srt/args.py", b"/python/sglang/srt/args.py", "touches python/sglang/srt/args.py"),
        (b"/sglang/srt/args.py", b"/sglang/srt/worker.py", "twice"),
        (b"-ARG_20 = 20", b"-ARG_20 = 19", "does not fit what comes before"),
        (b"@@ -18,7 +18,7 @@", b"@@ -17,7 +17,7 @@", "does not fit what comes before"),
        (b"@@ -18,7 +18,7 @@", b"@@ -18,7 +18,9 @@", "line [0-9]+"),
        (b"\n", b"\r\n", r"\\r\\n"),
    ],
)
def test_a_patch_that_is_wrong_though_its_hash_is_listed(directory, old, new, said):
    rewrite(directory, "0001-ddtree-all.patch", lambda raw: raw.replace(old, new))
    with pytest.raises(SeriesProblem, match=said):
        load_series(directory)


@pytest.mark.parametrize("raw", [b"", b"<html></html>\n", b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n"])
def test_a_patch_that_is_none(directory, raw):
    rewrite(directory, "0001-ddtree-all.patch", lambda _: raw)
    with pytest.raises(SeriesProblem, match=r"0001-ddtree-all\.patch"):
        load_series(directory)


def test_a_patch_file_that_is_not_listed(directory):
    (directory / "0003-more.patch").write_bytes(b"x")
    with pytest.raises(SeriesProblem, match="3 patch files are there"):
        load_series(directory)


CORE = {"sglang/srt/core.py": b"TREE = 1\n"}


@pytest.fixture
def with_core(tmp_path):
    """Two series that share one patch."""
    for version in ("0.5.11", "0.5.12"):
        make_series(tmp_path / "patches" / f"sglang-{version}", version=version, shared=CORE)
    return tmp_path / "patches"


def test_two_series_share_a_patch(with_core):
    one, other = catalogue(with_core)
    assert [path.name for path in (with_core / "core").iterdir()] == ["core-all.patch"]
    assert [(patch.name, patch.shared) for patch in one.patches] == [
        ("core-all", True),
        ("ddtree-all", False),
        ("temperature-all", False),
    ]
    assert one.patches[0] == other.patches[0]
    assert one.render("sglang/srt/core.py", None, "ddtree") == CORE["sglang/srt/core.py"]


def test_a_core_that_does_not_hash_is_refused_by_every_series(with_core):
    path = with_core / "core" / "core-all.patch"
    path.write_bytes(path.read_bytes().replace(b"TREE = 1", b"TREE = 2"))
    for directory in sorted(with_core.glob("sglang-*")):
        with pytest.raises(SeriesProblem, match=f"{directory.name} pins") as caught:
            load_series(directory)
        assert "refresh_series" in caught.value.next_step and str(caught.value.where) == str(path)
    with pytest.raises(SeriesProblem):
        catalogue(with_core)


def test_a_core_that_is_gone_or_a_series(with_core):
    path = with_core / "core" / "core-all.patch"
    (with_core / "core" / "series.toml").write_bytes(b"")
    with pytest.raises(SeriesProblem, match="cannot be a series"):
        catalogue(with_core)
    path.unlink()
    with pytest.raises(SeriesProblem, match="cannot be read"):
        load_series(with_core / "sglang-0.5.11")


@pytest.mark.parametrize(
    "file",
    [
        "../core/../core/core-all.patch",
        "../core/core-all.patch/",
        "../other/core-all.patch",
        "../core/0001-x.txt",
        "core/core-all.patch",
        "/core/core-all.patch",
        "../core/core-all.patch\n",
        "../core/.patch",
        "../core/x/core-all.patch",
        "..\\core\\core-all.patch",
    ],
)
def test_the_only_path_of_a_shared_patch(with_core, file):
    directory = with_core / "sglang-0.5.11"
    edit(directory, lambda t: t["patches"][0].update(file=file))
    with pytest.raises(SeriesProblem, match="not named like"):
        load_series(directory)


@pytest.mark.parametrize("kind", ["modify", "delete"])
def test_a_shared_patch_only_adds_files(with_core, kind):
    new = None if kind == "delete" else b"ARG = 1\n"
    raw = udiff.make(ARGS, PRISTINE[ARGS], new)
    (with_core / "core" / "core-all.patch").write_bytes(raw)
    edit(with_core / "sglang-0.5.11", lambda t: t["patches"][0].update(sha256=sha(raw)))
    with pytest.raises(SeriesProblem, match="may only add files"):
        load_series(with_core / "sglang-0.5.11")


def test_an_own_patch_of_the_name_of_a_shared_one(with_core):
    directory = with_core / "sglang-0.5.11"
    (directory / "0001-ddtree-all.patch").rename(directory / "0001-core-all.patch")
    edit(directory, lambda t: t["patches"][1].update(file="0001-core-all.patch"))
    with pytest.raises(SeriesProblem, match="distinct names"):
        load_series(directory)


def test_lines_of_another_pristine_file(directory):
    digests = json.loads((directory / "lines.json").read_bytes())
    digests[ARGS] = b64encode(bytes(160)).decode()
    write_lines(directory, json.dumps(digests).encode())
    with pytest.raises(SeriesProblem, match="does not fit what comes before"):
        load_series(directory)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'{"sglang/srt/args.py": 1}', b'{"sglang/srt/args.py": "?"}', b"[" * 100_000]
)
def test_lines_that_cannot_be_read(directory, raw):
    write_lines(directory, raw)
    with pytest.raises(SeriesProblem, match=r"lines\.json"):
        load_series(directory)


def test_catalogue(directory, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(directory.parent))
    (series,) = catalogue()
    assert series.name == "sglang-0.5.11" and catalogue(directory.parent)[0].name == series.name
    assert choose([series], "sglang", "0.5.11") is series
    for version in ("0.5.12", "0.5.11.post1", "0.5.1"):
        with pytest.raises(UnsupportedVersion) as caught:
            choose([series], "sglang", version)
        assert "0.5.11" in caught.value.next_step and version in str(caught.value)
    with pytest.raises(UnsupportedVersion, match="vllm"):
        choose([series], "vllm", "0.5.11")


def test_a_catalogue_without_series(tmp_path):
    with pytest.raises(SeriesProblem, match="no series found"):
        catalogue(tmp_path)


def test_two_series_for_one_version(directory):
    other = Path(shutil.copytree(directory, directory.parent / "copy"))
    edit(other, lambda table: table.update(name="copy"))
    with pytest.raises(SeriesProblem, match=r"both for sglang 0\.5\.11"):
        catalogue(directory.parent)


def files_pristine(series):
    return {path: sha(PRISTINE[path]) for path in series.files}


def edit(directory: Path, change) -> None:
    table = tomlkit.parse((directory / "series.toml").read_text()).unwrap()
    change(table)
    (directory / "series.toml").write_text(tomlkit.dumps(table))


def rewrite(directory: Path, file: str, change) -> None:
    """Change a patch, and what series.toml says of its hash."""
    raw = change((directory / file).read_bytes())
    (directory / file).write_bytes(raw)
    edit(directory, lambda table: next(p for p in table["patches"] if p["file"] == file).update(sha256=sha(raw)))


def write_lines(directory: Path, raw: bytes) -> None:
    (directory / "lines.json").write_bytes(raw)
    edit(directory, lambda table: table.update(lines_sha256=sha(raw)))


def sha(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()
