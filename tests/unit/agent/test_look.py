"""What the agent says of an installation, of its receipt, and of who is at work on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patcher.errors import Conflict, DdtreePatchError, HostUnreachable, Locked, NoInstallation, UsageProblem
from patcher.ssh.connection import LocalConnection
from patcher.wire.call import call_agent
from tests.support.builders import PRISTINE, make_package
from tests.support.installations import Installation, sha

ARGS, DDTREE_FILE = "sglang/srt/args.py", "sglang/srt/ddtree.py"


@pytest.fixture
def tree(tmp_path: Path) -> Installation:
    return Installation.tree(tmp_path / "tree")


@pytest.fixture
def venv(tmp_path: Path) -> Installation:
    return Installation.in_venv(tmp_path / "venv")


# ---------------------------------------------------------------- inspect


def test_inspect_of_a_tree(tree: Installation):
    before = tree.snapshot()
    look = tree.ask("inspect", paths=[ARGS, DDTREE_FILE])
    assert look["root"] == str(tree.site)
    assert (look["version"], look["editable"], look["interpreter"]) == ("0.5.11", False, None)
    assert look["files"][ARGS]["sha256"] == look["files"][ARGS]["record_sha256"] == sha(PRISTINE[ARGS])
    assert look["files"][DDTREE_FILE]["sha256"] is None
    assert (look["receipt"], look["receipt_state"], look["lock"], look["journal"]) == (None, "none", None, False)
    assert look["writable"] is None
    assert tree.snapshot() == before
    assert not (tree.site / ".ddtree-patch").exists()


def test_inspect_of_a_venv(venv: Installation):
    look = venv.ask("inspect")
    assert look["interpreter"]["prefix"] == str(venv.venv)
    assert look["state_dir"] == str(venv.venv / ".ddtree-patch" / "sglang")
    assert look["record"] == str(venv.record)


def test_an_edited_file_shows_by_record(tree: Installation):
    (tree.site / ARGS).write_bytes(b"edited = 1\n")
    file = tree.ask("inspect", paths=[ARGS])["files"][ARGS]
    assert file["sha256"] == sha(b"edited = 1\n")
    assert file["record_sha256"] == sha(PRISTINE[ARGS])


def editable(tmp_path: Path) -> tuple[Installation, Path]:
    """A source tree with python/sglang, a .pth that leads there, and metadata in site-packages."""
    host = Installation.in_venv(tmp_path / "venv")
    source = tmp_path / "checkout" / "python"
    source.mkdir(parents=True)
    shutil.move(host.site / "sglang", source / "sglang")
    host.record.write_text("__editable__.sglang-0.5.11.pth,,\nsglang-0.5.11.dist-info/RECORD,,\n")
    (host.site / "__editable__.sglang-0.5.11.pth").write_text(f"{source}\n")
    return host, source


def test_an_editable_install(tmp_path: Path):
    host, source = editable(tmp_path)
    look = host.ask("inspect", paths=[ARGS])
    assert (look["root"], look["editable"], look["record"]) == (str(source), True, None)
    assert look["files"][ARGS]["record_sha256"] is None
    in_source = Installation(source)
    request = in_source.request("ddtree")
    assert host.ask("commit", **request)["record"] == "none lists these files"
    assert in_source.is_stage("ddtree")
    assert host.ask("inspect")["receipt_state"] == "valid"
    for path, data in PRISTINE.items():  # git checkout
        if data is None:
            (source / path).unlink()
        else:
            (source / path).write_bytes(data)
    assert host.ask("inspect")["receipt_state"] == "stale"


def test_leftovers_of_pip_are_no_installation(tree: Installation):
    shutil.copytree(tree.record.parent, tree.site / "~glang-0.5.10.dist-info")
    assert tree.ask("inspect")["version"] == "0.5.11"


# ---------------------------------------------------------------- nothing to patch


@pytest.mark.parametrize("missing", ["all", "package", "metadata"])
def test_a_directory_without_the_package(tree: Installation, missing: str):
    if missing != "metadata":
        shutil.rmtree(tree.site / "sglang")
    if missing != "package":
        shutil.rmtree(tree.record.parent)
    with pytest.raises(NoInstallation) as failure:
        tree.ask("inspect")
    assert str(tree.site) in str(failure.value)
    assert "sglang-*.dist-info" in failure.value.what
    assert failure.value.exit_code == 4


def test_a_directory_that_does_not_exist(tmp_path: Path):
    with pytest.raises(NoInstallation, match="looked for sglang/__init__"):
        Installation(tmp_path / "nowhere").ask("inspect")


def test_two_versions_recorded(tree: Installation):
    other = tree.site / "sglang-0.5.12.dist-info"
    shutil.copytree(tree.record.parent, other)
    with pytest.raises(NoInstallation, match=r"0\.5\.11.*0\.5\.12"):
        tree.ask("inspect")


def test_a_venv_without_the_package(venv: Installation):
    shutil.rmtree(venv.site / "sglang")
    with pytest.raises(NoInstallation, match="has no sglang"):
        venv.ask("inspect")


def test_a_venv_that_does_not_exist(tmp_path: Path):
    host = Installation(tmp_path, tmp_path)
    with pytest.raises(NoInstallation, match="no interpreter"):
        host.ask("inspect")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.8", "3.9", "3.10", "3.12", "3.13"])
def test_every_interpreter_is_taken_or_told(tree: Installation, version: str):
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")) or [shutil.which(f"python{version}")]
    if found[0] is None:
        pytest.skip(f"no CPython {version} here")
    tree.python = str(found[0])
    if tuple(map(int, version.split("."))) >= (3, 9):
        tree.commit("ddtree")
        tree.commit("pristine")
        return
    with pytest.raises(NoInstallation, match=r"no CPython 3\.9"):
        tree.ask("inspect")


# ---------------------------------------------------------------- receipts and the package that was replaced


def test_another_version_makes_the_receipt_stale(tree: Installation):
    tree.commit("ddtree")
    shutil.rmtree(tree.record.parent)
    make_package(tree.site, {path: PRISTINE[path] for path in PRISTINE}, version="0.5.12")
    look = tree.ask("inspect")
    assert (look["version"], look["receipt_state"]) == ("0.5.12", "stale")
    before = tree.snapshot()
    assert tree.ask("forget")["forgotten"]
    assert tree.snapshot() == before
    assert tree.ask("inspect")["receipt_state"] == "none"
    assert tree.ask("history")["lines"][-1]["event"] == "forget"
    assert not (tree.state / "backups").exists()


def test_the_same_version_reinstalled_makes_the_receipt_stale(tree: Installation):
    tree.commit("ddtree")
    make_package(tree.site)  # as pip does: files and RECORD anew; a file that RECORD did not list may stay
    assert tree.ask("inspect")["receipt_state"] == "stale"
    (tree.site / DDTREE_FILE).unlink()
    tree.commit("ddtree")
    assert tree.ask("inspect")["receipt_state"] == "valid"
    tree.commit("pristine")
    assert tree.is_stage("pristine")


def test_files_put_back_by_hand_make_the_receipt_stale(tree: Installation):
    tree.commit("ddtree")
    pristine = Installation.tree(tree.site.parent / "other").record.read_bytes()
    for path, data in PRISTINE.items():
        if data is not None:
            (tree.site / path).write_bytes(data)
    (tree.site / DDTREE_FILE).unlink()
    assert tree.ask("inspect")["receipt_state"] == "stale"
    tree.commit("ddtree")
    tree.commit("pristine")
    assert tree.record.read_bytes() == pristine  # the first one's, not the one that spoke of the patch


def test_one_edited_file_leaves_the_receipt_in_force(tree: Installation):
    tree.commit("ddtree")
    (tree.site / ARGS).write_bytes(b"edited = 1\n")
    look = tree.ask("inspect")
    assert look["receipt_state"] == "valid"
    assert look["files"][ARGS]["before_data"]
    with pytest.raises(Conflict, match="in force"):
        tree.ask("forget")


def test_a_lost_backup_is_told(tree: Installation):
    tree.commit("ddtree")
    (tree.state / "backups" / sha(PRISTINE[ARGS])).unlink()
    assert tree.ask("inspect")["files"][ARGS]["before_data"] is None
    request = tree.request("pristine")
    for action in request["actions"]:
        action["backup"] = action["after"] is not None
    before = tree.snapshot()
    with pytest.raises(Conflict, match=r"backup .* is gone"):
        tree.ask("commit", **request)
    assert tree.snapshot() == before


# ---------------------------------------------------------------- the lock


def holder(**changes) -> str:
    sleeper = {
        "pid": os.getpid(),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "start_ticks": int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]),
        "host": "gpu1",
        "who": "ann@desk",
        "since": time.time(),
    }
    return json.dumps({**sleeper, **changes})


def test_a_live_holder_is_named(tree: Installation):
    tree.state.mkdir(parents=True)
    (tree.state / "lock").write_text(holder())
    with pytest.raises(Locked, match=r"ann@desk holds the lock since \d{4}-\d\d-\d\d .*gpu1") as failure:
        tree.commit("ddtree")
    assert failure.value.exit_code == 9
    assert tree.ask("inspect")["lock"]["who"] == "ann@desk"
    assert tree.is_stage("pristine")


@pytest.mark.parametrize("dead", [{"pid": 2**22 + 1}, {"start_ticks": 1}, {"boot_id": "another"}, None])
def test_a_dead_holder_does_not_count(tree: Installation, dead: dict | None):
    tree.state.mkdir(parents=True)
    (tree.state / "lock").write_text(holder(**dead) if dead else "{torn")
    tree.commit("ddtree")
    assert tree.is_stage("ddtree")
    assert tree.leftovers() == []


def test_two_at_once(venv: Installation):
    """The second finds the first at its import check, and is told; the first ends well."""
    slow = venv.site / "slow.py"
    slow.write_text(
        "import time, pathlib\n"
        f"pathlib.Path({str(venv.site / 'started')!r}).touch()\n"
        f"while not pathlib.Path({str(venv.site / 'go')!r}).exists(): time.sleep(0.02)\n"
    )
    code = (
        "import json, sys; from patcher.ssh.connection import LocalConnection\n"
        "from patcher.wire.call import call_agent\n"
        "print(call_agent(LocalConnection(), sys.argv[1], json.load(sys.stdin))['committed'])"
    )
    request = {
        "op": "commit",
        "package": "sglang",
        "site_packages": None,
        **venv.request("ddtree"),
        "imports": ["slow"],
    }
    first = subprocess.Popen(
        [sys.executable, "-c", code, venv.python],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    first.stdin.write(json.dumps(request).encode())
    first.stdin.close()
    while not (venv.site / "started").exists():
        time.sleep(0.02)
    try:
        with pytest.raises(Locked, match="holds the lock since"):
            venv.ask("commit", actions=[], receipt=None)
        look = venv.ask("inspect")
        assert look["journal"] and look["lock"]["pid"]
        assert look["recovered"] == "nothing"
    finally:
        (venv.site / "go").touch()
    assert first.stdout.read().strip() == b"True"
    assert first.wait() == 0
    assert venv.is_stage("ddtree")


# ---------------------------------------------------------------- state and programs


def test_state_values(venv: Installation):
    venv.ask("state", put={"one": {"a": [1]}, "two": 2})
    venv.ask("state", put={"two": None})
    assert venv.ask("state", get=["one", "two"])["values"] == {"one": {"a": [1]}, "two": None}
    with pytest.raises(UsageProblem):
        venv.ask("state", put={"../x": 1})


def test_run_python(venv: Installation, tree: Installation):
    source = (
        "import sys, os, sglang.srt.args as a\n"
        "if __name__ == '__main__':\n    print(a.ARG_3, sys.argv[1:], os.environ['NOTE'])\n    sys.exit('bad')"
    )
    done = venv.ask("run_python", source=source, argv=["x y"], env={"NOTE": "n"})
    assert done["stdout"] == "3 ['x y'] n\n"
    assert (done["rc"], done["stderr"]) == (1, "bad\n")
    done = venv.ask("run_python", source="import time\nprint('on', flush=True)\ntime.sleep(60)", timeout=0.5)
    assert (done["rc"], done["stdout"]) == (124, "on\n")
    with pytest.raises(NoInstallation):
        tree.ask("run_python", source="")


# ---------------------------------------------------------------- the reply


class Noisy(LocalConnection):
    """A login that greets, and prints what looks like a reply."""

    def _run(self, argv, input, timeout, on_stderr):
        noise = "echo 'Welcome!'; echo '<<ddtree-agent 0 2>>'; echo '{}'; printf 'no newline'; "
        return super()._run(["sh", "-c", noise + '"$@"; echo bye', "sh", *argv], input, timeout, on_stderr)


def test_noise_around_the_reply(tree: Installation):
    tree.connection = Noisy()
    assert tree.ask("inspect")["version"] == "0.5.11"


def test_a_request_that_was_cut_short_does_nothing(tree: Installation):
    class Cut(LocalConnection):
        def _run(self, argv, input, timeout, on_stderr):
            return super()._run(argv, input[: self.keep], timeout, on_stderr)

    tree.connection = Cut()
    for tree.connection.keep in (0, 1000, 20_000, -1, -100):
        with pytest.raises(HostUnreachable):
            tree.commit("ddtree")
        assert tree.is_stage("pristine")
        assert not tree.state.exists()


def test_a_bug_of_the_agent_comes_with_its_trace(tree: Installation):
    with pytest.raises(DdtreePatchError) as failure:
        tree.ask("commit", actions=None)
    assert "Traceback" in failure.value.detail
    assert failure.value.exit_code == 1


def test_a_reply_nobody_hears_is_work_done(tree: Installation):
    class Deaf(LocalConnection):
        def _run(self, argv, input, timeout, on_stderr):
            return super()._run(["sh", "-c", '"$@" | true', "sh", *argv], input, timeout, on_stderr)

    tree.connection = Deaf()
    with pytest.raises(HostUnreachable):
        call_agent(
            tree.connection,
            tree.python,
            {"op": "commit", "package": "sglang", "site_packages": str(tree.site), **tree.request("ddtree")},
        )
    assert tree.is_stage("ddtree")
    assert tree.leftovers() == []
