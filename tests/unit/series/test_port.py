"""A series is carried to another release, and the core to all of them: what merges, what waits, what is refused."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patcher.errors import PortConflict
from patcher.series.catalogue import ROOT_VARIABLE, catalogue, load_series
from patcher.series.export import export
from patcher.series.port import go_on, start
from patcher.series.worktree import Base, make
from tests.support.builders import PRISTINE, STAGES, make_package, make_series
from tests.unit.series.test_worktree import commit, contents, git, write

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "refresh_series.py"
ARGS, INFO, WORKER, NEW = (f"sglang/srt/{name}.py" for name in ("args", "info", "worker", "ddtree"))
CORE = {"sglang/srt/core.py": b"TREE = 1\n"}
TWO_STAGES = {"greedy": STAGES["ddtree"], "sampling": STAGES["temperature"]}
BEFORE = b"# new in this release\n"


def make_wheel(directory: Path, version: str, files: Mapping[str, bytes | None] = PRISTINE) -> Path:
    root = make_package(directory / f"unpacked-{version}", files, version=version)
    path = directory / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(root).as_posix())
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    """wheels/ has 0.5.11, patches/ its series with a core."""
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels", "0.5.11")
    make_series(tmp_path / "patches/sglang-0.5.11", stages=TWO_STAGES, shared=CORE)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "patches"))
    return tmp_path


@pytest.fixture
def ported(home, tool):
    """`ported(files)`: the series goes to a 0.5.12 of these files."""

    def run(changed, *options):
        make_wheel(home / "wheels", "0.5.12", PRISTINE | changed)
        return tool(
            *("fork", "port", "--from", "sglang-0.5.11", "--to", "0.5.12"),
            *("--work", home / "work", "--wheels", home / "wheels", *options),
        )

    return run


def exported(home, tool):
    return tool("fork", "export", "--work", home / "work", "--series", home / "patches/sglang-0.5.12")


def test_init_replays_the_series_and_export_gives_it_back(home, tool):
    said = tool("fork", "init", "0.5.11", "--work", home / "work", "--wheels", home / "wheels")
    assert said.code == 0
    subjects = git(home / "work", "log", "--reverse", "--format=%s").split("\n")[1:-1]
    assert subjects == ["core-all", "greedy-all", "sampling-all"]
    before, core = load_series(home / "patches/sglang-0.5.11"), contents(home / "patches/core")
    said = tool("fork", "export", "--work", home / "work", "--series", home / "patches/sglang-0.5.11")
    assert said.code == 0 and contents(home / "patches/core") == core
    after = load_series(home / "patches/sglang-0.5.11")
    assert (after.files, after.stages) == (before.files, before.stages)
    assert [patch.file for patch in after.patches] == [patch.file for patch in before.patches]


def test_a_port_without_conflicts(home, tool, ported):
    said = ported({WORKER: BEFORE + PRISTINE[WORKER]})
    assert said.code == 0 and said.stdout.count("Merged") == 3
    assert exported(home, tool).code == 0
    one, two = catalogue(home / "patches")
    assert two.versions == ("0.5.12",) and two.states == ("pristine", "greedy", "sampling")
    assert one.patches[0] == two.patches[0]  # the core is the same file
    assert two.render(WORKER, BEFORE + PRISTINE[WORKER], "sampling") == BEFORE + STAGES["temperature"][WORKER]
    status = tool("list", "--json").json
    assert [series["versions"] for series in status["series"]] == [["0.5.11"], ["0.5.12"]]


def test_a_port_with_conflicts_waits_and_nothing_is_exported(home, tool, ported):
    theirs = PRISTINE[WORKER].replace(b"    return 5\n", b"    return 'five'\n")
    said = ported({WORKER: theirs, ARGS: BEFORE + PRISTINE[ARGS]})
    work = home / "work"
    assert said.code == 4 and WORKER in said.stderr and "in step_5" in said.stderr and "what greedy does" in said.stderr
    assert git(work, "ls-files", "--unmerged", "--", WORKER).count("\n") == 3
    assert b"<<<<<<< " in (work / WORKER).read_bytes() and b"return 'five'" in (work / WORKER).read_bytes()
    assert git(work, "show", f":0:{ARGS}") == (BEFORE + STAGES["ddtree"][ARGS]).decode()  # what is clean is staged
    refused = exported(home, tool)
    assert refused.code == 4 and WORKER in refused.stderr and not (home / "patches/sglang-0.5.12").exists()
    # Once more is no way around it, nor are markers that were added.
    assert tool("fork", "port", "--continue", "--work", work).code == 4
    git(work, "add", "-A")
    marked = tool("fork", "port", "--continue", "--work", work)
    assert marked.code == 4 and "markers" in marked.stderr and exported(home, tool).code == 4
    write(work, {WORKER: STAGES["ddtree"][WORKER]})
    git(work, "add", "-A")
    # The second patch conflicts as well? No: it changes the line that was resolved its way.
    done = tool("fork", "port", "--continue", "--work", work)
    assert done.code == 0 and exported(home, tool).code == 0
    series = load_series(home / "patches/sglang-0.5.12")
    assert [patch.name for patch in series.patches] == ["core-all", "greedy-all", "sampling-all"]
    assert series.render(WORKER, theirs, "sampling") == STAGES["temperature"][WORKER]


def test_what_the_release_has_already_is_skipped(home, tool, ported):
    said = ported(
        STAGES["temperature"] | {WORKER: PRISTINE[WORKER].replace(b"return 5\n", b"return 'sampling tree'\n")}
    )
    assert said.code == 4  # the worker's line
    write(home / "work", {WORKER: STAGES["temperature"][WORKER]})
    git(home / "work", "add", "-A")
    said = tool("fork", "port", "--continue", "--work", home / "work")
    assert said.code == 0 and "sampling-all" in said.stdout and "Skipped" in said.stdout
    assert exported(home, tool).code == 0
    assert load_series(home / "patches/sglang-0.5.12").states == ("pristine", "greedy")


def test_a_file_that_moved_is_followed_and_one_that_is_gone_is_named(home, tool, ported):
    moved = "sglang/srt/runner/worker.py"
    said = ported({WORKER: None, moved: PRISTINE[WORKER], ARGS: None})
    assert said.code == 4 and f"{ARGS}: the release has no such file any more" in said.stderr
    assert git(home / "work", "show", f":0:{moved}") == STAGES["ddtree"][WORKER].decode()


def test_one_stage_onto_a_tree_of_ones_own(home, tool):
    """The tree has a DDTree of its own; the stage that samples is merged into what it shares with the release."""
    own = PRISTINE | {NEW: b"def build():\n    return 'my own tree'\n", INFO: BEFORE + PRISTINE[INFO]}
    site = make_package(home / "site", own, version="0.5.11+own")
    work = home / "work"
    wrong = tool("fork", "init", "0.5.11", "--from-tree", site, "--work", work)
    assert wrong.code == 2 and "0.5.11+own" in wrong.stderr and not work.exists()
    assert tool("fork", "init", "0.5.11+own", "--from-tree", site, "--work", work).code == 0
    said = tool(
        *("fork", "port", "--from", "sglang-0.5.11", "--stage", "temperature"),
        *("--work", work, "--wheels", home / "wheels"),
    )
    # The worker's line is one that the other stage wrote.
    assert said.code == 4 and f"{WORKER}: both changed it" in said.stderr and INFO not in said.stderr
    git(work, "checkout", "-q", "--ours", WORKER)
    git(work, "add", "-A")
    assert tool("fork", "port", "--continue", "--work", work).code == 0
    own_series = home / "own/mine"
    assert tool("fork", "export", "--work", work, "--series", own_series).code == 0
    series = load_series(own_series)
    assert series.name == "mine" and series.states == ("pristine", "sampling") and set(series.files) == {INFO}
    assert series.render(INFO, own[INFO], "sampling") == BEFORE + STAGES["temperature"][INFO]


def test_one_patch_alone(home, tool, ported):
    said = ported({}, "--patch", "core-all")
    assert said.code == 0 and said.stdout.count("Merged") == 1
    assert exported(home, tool).code == 0
    assert load_series(home / "patches/sglang-0.5.12").states == ("pristine", "greedy")


def test_what_another_stage_creates_is_left_out(home, tool):
    stages = {"greedy": STAGES["ddtree"], "sampling": {**STAGES["temperature"], NEW: b"def build():\n    return 2\n"}}
    make_series(home / "patches/sglang-0.5.11", stages=stages, shared=CORE)
    own = PRISTINE | {NEW: b"mine\n", WORKER: STAGES["ddtree"][WORKER]}
    site = make_package(home / "site", own, version="0.5.11+own")
    tool("fork", "init", "0.5.11+own", "--from-tree", site, "--work", home / "work")
    said = tool(
        *("fork", "port", "--from", "sglang-0.5.11", "--stage", "sampling"),
        *("--work", home / "work", "--wheels", home / "wheels"),
    )
    assert said.code == 0 and f"left out of sampling-all: {NEW}" in said.stdout
    assert (home / "work" / NEW).read_bytes() == b"mine\n"
    assert (home / "work" / WORKER).read_bytes() == STAGES["temperature"][WORKER]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--from", "sglang-0.5.11", "--continue"),
        ("--continue", "--stage", "sampling"),
        ("--continue",),
        ("--from", "sglang-9"),
        ("--from", "sglang-0.5.11", "--stage", "other"),
        ("--from", "sglang-0.5.11", "--patch", "other"),
        ("--from", "sglang-0.5.11", "--to", "0.5.99"),
    ],
)
def test_what_cannot_be_ported(home, tool, options):
    tool("fork", "init", "0.5.11", "--work", home / "work", "--wheels", home / "wheels")
    head = git(home / "work", "log", "--format=%H")
    said = tool("fork", "port", "--work", home / "work", "--wheels", home / "wheels", *options)
    assert said.code == 2 and git(home / "work", "log", "--format=%H") == head


def test_a_work_tree_that_is_not_clean_and_a_wheel_that_is_another(home, tool):
    options = ("fork", "port", "--work", home / "work", "--from", "sglang-0.5.11", "--wheels", home / "wheels")
    tool("fork", "init", "0.5.11", "--work", home / "work", "--wheels", home / "wheels")
    (home / "work/sglang/more.py").write_bytes(b"x\n")
    assert tool(*options).code == 2
    (home / "work/sglang/more.py").unlink()
    make_wheel(home / "wheels", "0.5.11", PRISTINE | {ARGS: BEFORE + PRISTINE[ARGS]})
    said = tool(*options)
    assert said.code == 2 and f"{ARGS} is not the pristine file" in said.stderr


def refresh(home, *arguments):
    command = [sys.executable, str(SCRIPT), "--patches", str(home / "patches"), "--wheels", str(home / "wheels")]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_an_edit_of_the_core_goes_to_every_series(home, tool):
    make_wheel(home / "wheels", "0.5.12")
    make_wheel(home / "wheels", "0.5.13", PRISTINE | {ARGS: BEFORE + PRISTINE[ARGS]})
    for version in ("0.5.12", "0.5.13"):
        pristine = PRISTINE if version == "0.5.12" else PRISTINE | {ARGS: BEFORE + PRISTINE[ARGS]}
        stages = {"greedy": {NEW: STAGES["ddtree"][NEW]}}
        make_series(home / f"patches/sglang-{version}", pristine, stages, version=version, shared=CORE)
    # 0.5.13 changes a line of the core: it will not follow.
    broken = {"greedy": {"sglang/srt/core.py": b"TREE = 3\n"}}
    make_series(home / "patches/sglang-0.5.13", PRISTINE, broken, version="0.5.13", shared=CORE)
    tool("fork", "init", "0.5.11", "--work", home / "work", "--wheels", home / "wheels")
    write(home / "work", {"sglang/srt/core.py": b"TREE = 2\n"})
    commit(home / "work", "fixup! core-all")
    git(
        home / "work",
        *("-c", "sequence.editor=true", "-c", "user.name=t", "-c", "user.email=t@localhost"),
        *("rebase", "-q", "-i", "--autosquash", "pristine"),
    )
    # Exported as any series is, it is refused: other series use the old text.
    said = tool("fork", "export", "--work", home / "work", "--series", home / "patches/sglang-0.5.11")
    assert said.code == 4 and "refresh_series" in said.stderr
    before = contents(home / "patches/sglang-0.5.13")
    done = refresh(home, "--work", home / "work")
    assert done.returncode == 4 and "sglang-0.5.13" in done.stderr
    assert contents(home / "patches/sglang-0.5.13") == before
    for version in ("0.5.11", "0.5.12"):
        series = load_series(home / f"patches/sglang-{version}")
        assert series.render("sglang/srt/core.py", None, "greedy") == b"TREE = 2\n"
    for path in (home / "patches/sglang-0.5.13").iterdir():
        path.unlink()
    done = refresh(home)
    assert done.returncode == 0 and done.stdout.count("unchanged") == 2
    (home / "patches/core/other.patch").write_bytes(b"")
    assert refresh(home).returncode == 4


def test_versions_of_one_series_must_have_equal_files(home):
    settings = home / "patches/sglang-0.5.11/series.toml"
    settings.write_text(settings.read_text().replace('["0.5.11"]', '["0.5.11", "0.5.11.post1"]'))
    make_wheel(home / "wheels", "0.5.11.post1", PRISTINE | {ARGS: BEFORE + PRISTINE[ARGS]})
    done = refresh(home)
    assert done.returncode == 4 and "0.5.11.post1" in done.stderr and ARGS in done.stderr
    make_wheel(home / "wheels", "0.5.11.post1", PRISTINE | {"sglang/other.py": b"x\n"})
    assert refresh(home).returncode == 0


LINES = 30
edits = st.dictionaries(st.integers(0, LINES - 1), st.sampled_from([b"x\n", b"y\n", b"x\nx\n", b""]), min_size=1)


def edited(lines: list[bytes], changes: Mapping[int, bytes]) -> bytes:
    return b"".join(changes.get(number, line) for number, line in enumerate(lines))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ours=edits, theirs=edits)
def test_edits_apart_merge_and_edits_of_one_line_do_not(tmp_path_factory, ours, theirs):
    home = tmp_path_factory.mktemp("port")
    base = [b"line %d\n" % number for number in range(LINES)]
    series = make_series(
        home / "patches/sglang-1", {ARGS: b"".join(base)}, {"greedy": {ARGS: edited(base, theirs)}}, version="1"
    )
    wheel = make_wheel(home, "1", {ARGS: b"".join(base)})
    make(home / "work", Base("sglang", "2"), lambda tree: put(tree, edited(base, ours)))
    apart = all(abs(one - other) > 1 for one in ours for other in theirs)
    same_line = any(ours[line] != theirs[line] for line in set(ours) & set(theirs))
    try:
        start(home / "work", series, wheel, {"greedy-all"})
    except PortConflict:
        assert not apart
        with pytest.raises(PortConflict):
            go_on(home / "work")
        return
    assert not same_line
    if apart:
        assert (home / "work" / ARGS).read_bytes() == edited(base, {**ours, **theirs})
        made = export(home / "work", home / "out/sglang-2")
        assert made.render(ARGS, edited(base, ours), "greedy") == edited(base, {**ours, **theirs})


def put(tree: Path, data: bytes) -> None:
    (tree / ARGS).parent.mkdir(parents=True)
    (tree / ARGS).write_bytes(data)
