"""Whatever kills a commit, and whenever: the next command finds all of the old or all of the new."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from patcher.agent.steps import STEPS
from patcher.errors import Conflict, Drift, HostUnreachable, RollbackFailed
from tests.support.installations import Installation, Through, may_mount

AFTER_DECISION = STEPS[STEPS.index("receipt") :]  # killed before one of these, a commit is finished
UNTOUCHED = ("lock", "check", "backup", "journal", "unlock")  # killed before one of these, there is nothing to do
JOBS = {"apply": ("pristine", "ddtree"), "upgrade": ("ddtree", "temperature"), "revert": ("temperature", "pristine")}
CHANGED = {"apply": 3, "upgrade": 2, "revert": 4}  # files of the package that each job changes


def points(job: str) -> list[str]:
    """Every place where the job can be killed: some steps happen once a file, and RECORD is written too."""
    times = {"write": CHANGED[job] + 1, "rename": CHANGED[job]}
    return [f"{step}:{n}" for step in STEPS for n in range(1, times.get(step, 1) + 1)]


needs_mounts = pytest.mark.skipif(not may_mount(), reason="a mount namespace needs root with CAP_SYS_ADMIN")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Installation]:
    """One installation a stage, each reached as an operator would: to copy, never to change."""
    folder = tmp_path_factory.mktemp("installed")
    stages = {"pristine": Installation.in_venv(folder / "pristine")}
    stages["ddtree"] = stages["pristine"].copy(folder / "ddtree")
    stages["ddtree"].commit("ddtree")
    stages["temperature"] = stages["ddtree"].copy(folder / "temperature")
    stages["temperature"].commit("temperature")
    return stages


@pytest.fixture(scope="module")
def snapshots(installed: dict[str, Installation], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What every job leaves when nothing kills it; by job and by stage before."""
    folder = tmp_path_factory.mktemp("jobs")
    found = {}
    for job, (before, after) in JOBS.items():
        copy = installed[before].copy(folder / job)
        copy.commit(after)
        found[job] = copy.snapshot(compiled=False)
    return found


@pytest.mark.parametrize(("job", "point"), [(job, point) for job in JOBS for point in points(job)])
def test_killed_at_every_step(installed, snapshots, tmp_path: Path, job: str, point: str):
    before, after = JOBS[job]
    host = installed[before].copy(tmp_path / "host")
    old = host.snapshot()
    with pytest.raises(HostUnreachable):
        host.commit(after, die_at=point)

    look = host.ask("inspect")  # any command puts it right

    step = point.partition(":")[0]
    finished = step in AFTER_DECISION
    assert look["recovered"] == ("nothing" if step in UNTOUCHED else "finished" if finished else "undone")
    assert host.leftovers() == []
    if finished:
        assert host.snapshot(compiled=False) == snapshots[job]
        assert host.is_stage(after)
    else:
        assert host.snapshot() == old
        assert host.is_stage(before)
    stage = after if finished else before
    assert (look["receipt"] or {"stage": "pristine"})["stage"] == stage
    assert look["receipt_state"] == ("none" if stage == "pristine" else "valid")
    history = host.state / "history.jsonl"
    lines = [json.loads(line)["what"] for line in history.read_text().splitlines()] if history.exists() else []
    assert lines.count(after) == finished


@pytest.mark.parametrize("point", ["write:2", "rename:2", "compile", "receipt", "clean", "unlock"])
def test_all_the_way_on_and_back_after_a_kill(installed, tmp_path: Path, point: str):
    host = installed["ddtree"].copy(tmp_path / "host")
    with pytest.raises(HostUnreachable):
        host.commit("temperature", die_at=point)
    host.ask("recover")
    host.commit("temperature")
    assert host.is_stage("temperature")
    host.commit("ddtree")
    assert host.is_stage("ddtree")
    host.commit("pristine")
    assert host.snapshot() == installed["pristine"].snapshot()


def test_the_steps_are_those_of_the_list(installed, tmp_path: Path):
    host = installed["pristine"].copy(tmp_path / "host")
    assert host.commit("ddtree")["steps"] == list(STEPS)


@pytest.mark.parametrize("second", range(1, 5))
def test_killed_while_undoing(installed, tmp_path: Path, second: int):
    host = installed["ddtree"].copy(tmp_path / "host")
    old = host.snapshot()
    with pytest.raises(HostUnreachable):
        host.commit("pristine", die_at="read-back")
    with pytest.raises(HostUnreachable):
        host.ask("recover", die_at=f"undo:{second}")
    assert host.ask("inspect")["recovered"] == "undone"  # any command does
    assert host.snapshot() == old
    assert host.leftovers() == []


@pytest.mark.parametrize("op", ["inspect", "commit", "history", "state", "run_python", "forget"])
def test_every_command_recovers_first(installed, tmp_path: Path, op: str):
    host = installed["pristine"].copy(tmp_path / "host")
    old = host.snapshot()
    with pytest.raises(HostUnreachable):
        host.commit("ddtree", die_at="record")
    request = {"run_python": {"source": "print(1)"}, "commit": {"actions": [], "receipt": None}}.get(op, {})
    assert host.ask(op, **request)["recovered"] == "undone"
    assert host.snapshot() == old


def test_an_unfinished_commit_over_a_reinstalled_package_lets_the_new_files_be(installed, tmp_path: Path):
    host = installed["pristine"].copy(tmp_path / "host")
    with pytest.raises(HostUnreachable):
        host.commit("ddtree", die_at="bytecode")
    (host.site / "sglang/srt/args.py").write_bytes(b"newer = 1\n")
    host.record.write_bytes(b"sglang/srt/args.py,,\n")
    assert host.ask("recover")["recovered"] == "undone"
    assert host.read("sglang/srt/args.py") == b"newer = 1\n"
    assert host.read("sglang/srt/ddtree.py") is None
    assert host.leftovers() == []


def test_a_file_that_someone_edits_before_the_undo_needs_hands(installed, tmp_path: Path):
    host = installed["pristine"].copy(tmp_path / "host")
    with pytest.raises(HostUnreachable):
        host.commit("ddtree", die_at="bytecode")
    (host.site / "sglang/srt/args.py").write_bytes(b"mine = 1\n")
    with pytest.raises(RollbackFailed, match=r"args\.py") as failure:
        host.ask("recover")
    assert failure.value.exit_code == 8
    assert len(failure.value.commands) == 1
    assert host.connection.run(["sh", "-c", failure.value.commands[0]]).rc == 0
    assert host.ask("recover")["recovered"] == "undone"
    assert host.is_stage("pristine")
    assert host.leftovers() == []


@needs_mounts
def test_a_mount_point_among_the_files_is_refused_before_anything_is_written(installed, tmp_path: Path):
    host = installed["pristine"].copy(tmp_path / "host")
    old = host.snapshot()
    target = host.site / "sglang/srt/worker.py"
    host.connection = Through(f'mount --bind {target} {target} && exec "$@"', "unshare", "-m")
    look = host.ask("inspect", paths=["sglang/srt/worker.py"])
    assert look["writable"]["mount"] == str(target)
    with pytest.raises(Conflict, match="mount point") as failure:
        host.commit("ddtree")
    assert str(target) in str(failure.value)
    assert failure.value.exit_code == 4
    assert host.snapshot() == old
    assert not host.state.exists()


def read_only(folder: Path) -> Through:
    return Through(f'mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} && exec "$@"', "unshare", "-m")


@needs_mounts
def test_a_read_only_image_is_refused(installed, tmp_path: Path):
    host = installed["pristine"].copy(tmp_path / "host")
    old = host.snapshot()
    host.connection = read_only(host.venv)
    assert host.ask("inspect", paths=["sglang/srt/worker.py"])["writable"]["reason"] == "Read-only file system"
    with pytest.raises(Conflict, match="read-only") as failure:
        host.commit("ddtree")
    assert str(host.venv) in str(failure.value)
    assert host.snapshot() == old
    assert not host.state.exists()


@needs_mounts
def test_read_only_site_packages_with_a_writable_prefix(installed, tmp_path: Path):
    host = installed["pristine"].copy(tmp_path / "host")
    host.connection = read_only(host.site)
    with pytest.raises(Conflict, match="read-only"):
        host.commit("ddtree")
    assert not host.state.exists()


@needs_mounts
def test_a_rename_that_fails_in_the_middle_is_undone(installed, tmp_path: Path):
    """An immutable file passes every check and refuses the rename. On tmpfs and others it does not exist: bind then."""
    host = installed["pristine"].copy(tmp_path / "host")
    old = host.snapshot()
    target = host.site / "sglang/srt/worker.py"
    if host.connection.run(["chattr", "+i", str(target)]).rc != 0:
        pytest.skip("this file system knows no immutable files")
    try:
        with pytest.raises(Conflict, match="permission"):
            host.commit("ddtree")
        assert host.snapshot() == old
        assert host.leftovers() == []
        assert not host.state.exists()
    finally:
        host.connection.run(["chattr", "-i", str(target)])
    host.commit("ddtree")


@needs_mounts
@pytest.mark.parametrize("kilobytes", [*range(0, 40, 4), 48, 64])
def test_a_full_disk_leaves_the_old_files(installed, tmp_path: Path, kilobytes: int):
    """A tiny tmpfs over the venv with so much free space: wherever it runs out, nothing changes."""
    host = installed["temperature"].copy(tmp_path / "host")
    old = host.snapshot()
    report = tmp_path / "report"
    script = f"""
        set -e
        mount -t tmpfs -o size=16m tmpfs {tmp_path}/mounted
        cp -a {host.venv}/. {tmp_path}/mounted
        free=$(df -k --output=avail {tmp_path}/mounted | tail -1)
        head -c $(( (free - {kilobytes}) * 1024 )) /dev/zero > {tmp_path}/mounted/filler
        rc=0; "$@" || rc=$?
        rm {tmp_path}/mounted/filler; cp -a {tmp_path}/mounted {report}; exit $rc"""
    (tmp_path / "mounted").mkdir()
    inside = Installation(tmp_path / "mounted" / host.site.relative_to(host.venv), tmp_path / "mounted")
    inside.connection = Through(script, "unshare", "-m")
    request = host.request("pristine")
    try:
        inside.ask("commit", **request)
        expected = "pristine"
    except Conflict as failure:
        assert "space" in str(failure)
        assert str(tmp_path / "mounted") in str(failure)
        expected = "temperature"
    after = Installation(report / host.site.relative_to(host.venv), report)
    assert after.is_stage(expected)
    assert after.ask("recover")["recovered"] in ("nothing", "undone")
    assert after.leftovers() == []
    if expected == "temperature":
        assert after.snapshot(compiled=False) == {
            **old,
            **{path: value for path, value in after.snapshot(compiled=False).items() if path.endswith(".pyc")},
        }
    else:
        assert after.snapshot() == installed["pristine"].snapshot()


def test_several_commands_at_once_after_a_death(installed, tmp_path: Path):
    host = installed["pristine"].copy(tmp_path / "host")
    old = host.snapshot()
    with pytest.raises(HostUnreachable):
        host.commit("ddtree", die_at="read-back")
    with ThreadPoolExecutor(6) as pool:
        looks = list(pool.map(lambda _: host.ask("inspect"), range(6)))
    assert sorted(look["recovered"] for look in looks) == ["nothing"] * 5 + ["undone"]
    assert host.snapshot() == old
    assert host.leftovers() == []


def test_old_hashes_are_compared_under_the_lock(installed, tmp_path: Path):
    host = installed["pristine"].copy(tmp_path / "host")
    request = host.request("ddtree")
    (host.site / "sglang/srt/args.py").write_bytes(b"changed since = 1\n")
    old = host.snapshot()
    with pytest.raises(Drift, match=r"args\.py"):
        host.ask("commit", **request)
    assert host.snapshot() == old
    assert not host.state.exists()
