"""A work tree of a release and its series: made, exported, made again, and which commits are refused."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from patcher.errors import SeriesProblem, UsageProblem
from patcher.series.catalogue import check_against, load_series
from patcher.series.export import export
from patcher.series.releases import unpack
from patcher.series.worktree import Base, make, replay
from tests.support.builders import DDTREE, PRISTINE, TEMPERATURE, files_after, make_package

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "refresh_series.py"
ARGS, INFO, WORKER = "sglang/srt/args.py", "sglang/srt/info.py", "sglang/srt/worker.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    root = make_package(tmp_path_factory.mktemp("site"))
    path = tmp_path_factory.mktemp("wheel") / "sglang-0.5.11-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(root).as_posix())
    return path


@pytest.fixture
def work(tmp_path, wheel):
    directory = tmp_path / "work"
    assert init(directory, wheel, tmp_path / "none") == 0
    return directory


def test_commits_become_a_series_and_the_series_the_same_commits(work, wheel, tmp_path):
    two_stages(work)
    first = tmp_path / "patches" / "sglang-0.5.11"
    series = export(work, first)
    check_against(series, PRISTINE)
    assert [(patch.name, patch.stage, patch.purpose) for patch in series.patches] == [
        ("tree", "greedy", "Builds the tree."),
        ("sample", "sampling", "Samples from it."),
    ]
    for stage, files in (("greedy", files_after("ddtree")), ("sampling", files_after("temperature"))):
        for path in series.files:
            assert series.render(path, PRISTINE[path], stage) == files[path]
    again = tmp_path / "again"
    assert init(again, wheel, first) == 2
    second = tmp_path / "patches2" / "sglang-0.5.11"
    export(again, second)
    assert contents(first) == contents(second)


def test_the_users_settings_of_git_change_nothing(work, tmp_path, monkeypatch):
    two_stages(work)
    export(work, tmp_path / "plain" / "series")
    settings = tmp_path / "gitconfig"
    settings.write_text(
        "[core]\nabbrev = 5\nautocrlf = true\nquotePath = false\n[diff]\nnoprefix = true\nmnemonicPrefix = true\n"
        "context = 1\nalgorithm = histogram\nexternal = false\nrenames = copies\n[color]\nui = always\n"
    )
    for name, value in {"GIT_CONFIG_GLOBAL": str(settings), "GIT_DIFF_OPTS": "-u1", "GIT_DIR": "/none"}.items():
        monkeypatch.setenv(name, value)
    for line in ("core.abbrev 4", "diff.noprefix true", "diff.context 0", "diff.algorithm patience"):
        subprocess.run(["git", "config", "--file", str(work / ".git/config"), *line.split()], check=True)
    export(work, tmp_path / "odd" / "series")
    assert contents(tmp_path / "plain" / "series") == contents(tmp_path / "odd" / "series")


def test_settings_of_the_series_are_kept_and_old_patches_go(work, tmp_path):
    directory = tmp_path / "sglang-0.5.11"
    two_stages(work)
    export(work, directory)
    text = (directory / "series.toml").read_text()
    text = text.replace('versions = ["0.5.11"]', 'versions = ["0.5.11", "0.5.11.post1"]')
    text = text.replace("adds DDTree", "brings DDTree").replace("top_p_renorm_prob", "top_q_renorm_prob")
    (directory / "series.toml").write_text(text)
    git(work, "reset", "-q", "--hard", "HEAD~1")
    series = export(work, directory)
    assert series.versions == ("0.5.11", "0.5.11.post1") and "top_q_renorm_prob" in series.ops
    assert [stage.purpose[:12] for stage in series.stages] == ["brings DDTre"]
    assert [path.name for path in directory.glob("*.patch")] == ["0001-tree.patch"]


def test_a_shared_commit_is_written_to_the_core_and_must_be_what_is_there(work, wheel, tmp_path):
    core = "sglang/srt/core.py"
    write(work, {core: b"TREE = 1\n"})
    commit(work, "core\n\nThe tree.\n\nStage: greedy\nShared: core")
    two_stages(work)
    directory = tmp_path / "patches" / "sglang-0.5.11"
    series = export(work, directory)
    assert [(patch.name, patch.shared) for patch in series.patches] == [
        ("core", True),
        ("tree", False),
        ("sample", False),
    ]
    shared = tmp_path / "patches" / "core" / "core.patch"
    assert sorted(path.name for path in directory.glob("*.patch")) == ["0001-tree.patch", "0002-sample.patch"]
    first = contents(directory), shared.read_bytes()
    again = tmp_path / "again"
    init(again, wheel, directory)
    export(again, directory)
    assert (contents(directory), shared.read_bytes()) == first
    # Another text of it is another release's business as well.
    other = tmp_path / "other"
    init(other, wheel, tmp_path / "none")
    write(other, {core: b"TREE = 2\n"})
    commit(other, "core\n\nThe tree.\n\nStage: greedy\nShared: core")
    with pytest.raises(SeriesProblem, match="not the shared patch"):
        export(other, tmp_path / "patches" / "sglang-other")
    assert not (tmp_path / "patches" / "sglang-other").exists() and shared.read_bytes() == first[1]
    export(other, directory, replace_core=True)
    assert load_series(directory).render(core, None, "greedy") == b"TREE = 2\n"


@pytest.mark.parametrize("trailer", ["Shared: other", "Shared: core\nShared: core"])
def test_a_commit_that_cannot_be_shared(work, tmp_path, trailer):
    write(work, {"sglang/srt/core.py": b"TREE = 1\n"})
    commit(work, f"core\n\nThe tree.\n\nStage: greedy\n{trailer}")
    with pytest.raises(SeriesProblem, match="can only be 'Shared: core'"):
        export(work, tmp_path / "out")


def test_a_shared_commit_changes_no_file_of_the_release(work, tmp_path):
    write(work, {"sglang/srt/core.py": b"TREE = 1\n", ARGS: DDTREE[ARGS]})
    commit(work, "core\n\nThe tree.\n\nStage: greedy\nShared: core")
    with pytest.raises(SeriesProblem, match="may only add"):
        export(work, tmp_path / "out")


def test_only_commits_after_pristine_and_all_of_them(work, tmp_path):
    with pytest.raises(SeriesProblem, match="no commit"):
        export(work, tmp_path / "out")
    (work / ARGS).write_bytes(b"edited\n")
    with pytest.raises(UsageProblem, match="not committed"):
        export(work, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("tree\n\nBuilds.\n", "needs one trailer"),
        ("tree\n\nBuilds.\n\nStage: other", "needs one trailer"),
        ("tree\n\nBuilds.\n\nStage: greedy\nStage: sampling", "needs one trailer"),
        ("Tree builder\n\nBuilds.\n\nStage: greedy", "small letters"),
        ("../tree\n\nBuilds.\n\nStage: greedy", "small letters"),
        ("tree\n\nStage: greedy", "what the patch is for"),
    ],
)
def test_messages_that_are_refused(work, tmp_path, message, said):
    write(work, {ARGS: DDTREE[ARGS]})
    commit(work, message)
    with pytest.raises(SeriesProblem, match=said):
        export(work, tmp_path / "out")


def rename(work):
    git(work, "mv", ARGS, "sglang/srt/renamed.py")


def make_executable(work):
    (work / ARGS).chmod(0o755)


def link(work):
    (work / "sglang/link.py").symlink_to("__init__.py")


def become_a_link(work):
    (work / ARGS).unlink()
    (work / ARGS).symlink_to("info.py")


def executable_file(work):
    write(work, {"sglang/run.py": b"x\n"})
    (work / "sglang/run.py").chmod(0o755)


def binary(work):
    write(work, {"sglang/x.bin": b"a\0b\n"})


def outside(work):
    write(work, {"setup.py": b"x\n"})


def submodule(work):
    head = git(work, "rev-parse", "HEAD").strip()
    git(work, "update-index", "--add", "--cacheinfo", f"160000,{head},sglang/sub")


def nothing(work):
    pass


@pytest.mark.parametrize(
    "change", [rename, make_executable, link, become_a_link, executable_file, binary, outside, submodule, nothing]
)
def test_changes_that_are_refused(work, tmp_path, change):
    change(work)
    if change is submodule:
        git(work, *WHO, "commit", "-q", "-m", "tree\n\nBuilds.\n\nStage: greedy")
        (work / "sglang/sub").mkdir()
    else:
        commit(work, "tree\n\nBuilds.\n\nStage: greedy")
    with pytest.raises(SeriesProblem):
        export(work, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stages_in_the_wrong_order_names_twice_and_merges(work, tmp_path):
    write(work, {INFO: TEMPERATURE[INFO]})
    commit(work, "tree\n\nx\n\nStage: sampling")
    write(work, {ARGS: DDTREE[ARGS]})
    commit(work, "builder\n\nx\n\nStage: greedy")
    with pytest.raises(SeriesProblem, match="builder is of stage greedy, but follows tree of stage sampling"):
        export(work, tmp_path / "out")
    git(work, *WHO, "commit", "-q", "--amend", "-m", "tree\n\nx\n\nStage: sampling")
    with pytest.raises(SeriesProblem, match="same subject"):
        export(work, tmp_path / "out")
    git(work, "checkout", "-q", "-b", "side", "HEAD~1")
    write(work, {WORKER: DDTREE[WORKER]})
    commit(work, "side\n\nx\n\nStage: sampling")
    git(work, *WHO, "merge", "-q", "-m", "merge\n\nx\n\nStage: sampling", "series")
    with pytest.raises(SeriesProblem, match="merge"):
        export(work, tmp_path / "out")


def test_new_empty_and_removed_files(work, tmp_path):
    write(work, {"sglang/empty.py": b"", "sglang/größe.py": b"x\n", "sglang/no_end.py": b"x"})
    (work / INFO).unlink()
    commit(work, "tree\n\nx\n\nStage: greedy")
    series = export(work, tmp_path / "out")
    assert {path: series.render(path, PRISTINE.get(path), "greedy") for path in series.files} == {
        "sglang/empty.py": b"",
        "sglang/größe.py": b"x\n",
        "sglang/no_end.py": b"x",
        INFO: None,
    }


def test_a_wheel_that_is_another_or_damaged(tmp_path, wheel):
    with pytest.raises(UsageProblem, match=r"not the wheel of sglang 0\.5\.12"):
        unpack(wheel, "sglang", "0.5.12", tmp_path)
    damaged = tmp_path / "damaged.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"other\n" if name == ARGS else old.read(name))
    with pytest.raises(UsageProblem, match="RECORD"):
        unpack(damaged, "sglang", "0.5.11", tmp_path)


def test_a_series_of_another_release_is_not_overwritten(work, tmp_path):
    two_stages(work)
    export(work, tmp_path / "out")
    text = (tmp_path / "out" / "series.toml").read_text()
    (tmp_path / "out" / "series.toml").write_text(text.replace('["0.5.11"]', '["0.5.12"]'))
    before = contents(tmp_path / "out")
    with pytest.raises(UsageProblem, match=r"of 0\.5\.11, the series there of 0\.5\.12"):
        export(work, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_folder_that_is_no_work_tree(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageProblem, match="not a work tree"):
            export(folder, tmp_path / "out")


WHO = ("-c", "user.name=tester", "-c", "user.email=tester@localhost")


def init(work: Path, wheel: Path, directory: Path) -> int:
    """A work tree of the wheel with the series of the directory, if there is one; gives how many patches it has."""
    make(work, Base("sglang", "0.5.11"), lambda tree: unpack(wheel, "sglang", "0.5.11", tree))
    return replay(work, load_series(directory)) if directory.exists() else 0


def two_stages(work: Path) -> None:
    write(work, DDTREE)
    commit(work, "tree\n\nBuilds\nthe tree.\n\nMore about it.\n\nStage: greedy")
    write(work, TEMPERATURE)
    commit(work, "sample\n\nSamples from it.\n\nStage: sampling")


def write(work: Path, files: dict) -> None:
    for path, data in files.items():
        (work / path).write_bytes(data)


def commit(work: Path, message: str) -> None:
    git(work, "add", "-A")
    git(work, *WHO, "commit", "-q", "--allow-empty", "-m", message)


def git(work: Path, *arguments: str) -> str:
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", "-C", str(work), *arguments], capture_output=True, check=True, env=environment)
    return done.stdout.decode()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
