"""What a commit does to files, links, RECORD and bytecode, and what a revert gives back."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path

import pytest

from patcher.errors import Conflict, Drift
from tests.support.builders import DDTREE, PRISTINE
from tests.support.installations import Installation, sha

ARGS, DDTREE_FILE = "sglang/srt/args.py", "sglang/srt/ddtree.py"


@pytest.fixture
def tree(tmp_path: Path) -> Installation:
    return Installation.tree(tmp_path / "tree")


@pytest.fixture
def venv(tmp_path: Path) -> Installation:
    return Installation.in_venv(tmp_path / "venv")


def change(path: str, old: bytes | None, new: bytes | None) -> dict:
    data = None if new is None else b64encode(new).decode()
    return {"path": path, "before": sha(old), "after": sha(new), "data": data}


def receipt(path: str, old: bytes | None, new: bytes | None) -> dict:
    return {"stage": "one", "files": {path: {"before": sha(old), "after": sha(new)}}}


def record_of(host: Installation) -> dict[str, str]:
    return {line.split(",")[0]: line for line in host.record.read_text().splitlines()}


# ---------------------------------------------------------------- there and back


def test_a_tree_comes_back_to_the_last_byte_and_without_any_trace(tree: Installation):
    before = tree.snapshot()
    times = {path: (tree.site / path).stat().st_mtime_ns for path in before if (tree.site / path).is_file()}
    assert tree.commit("ddtree")["record"] == "rewritten"
    tree.commit("temperature")
    assert tree.commit("pristine")["record"] == "restored"
    assert tree.snapshot() == before
    assert {path: (tree.site / path).stat().st_mtime_ns for path in times} == times
    assert not (tree.site / ".ddtree-patch").exists()


def test_a_patched_tree_may_move(tree: Installation, tmp_path: Path):
    before = tree.snapshot()
    tree.commit("ddtree")
    moved = Installation(Path(shutil.move(tree.site, tmp_path / "elsewhere")))
    assert moved.ask("inspect")["receipt_state"] == "valid"
    moved.commit("pristine")
    assert moved.snapshot() == before


def test_a_venv_keeps_its_history_and_the_state(venv: Installation):
    before = venv.snapshot()
    venv.commit("ddtree")
    venv.ask("state", put={"baseline": [1, 2]})
    venv.commit("pristine")
    assert venv.snapshot() == before
    assert [line["what"] for line in venv.ask("history")["lines"]] == ["ddtree", "pristine"]
    assert venv.ask("state", get=["baseline", "other"])["values"] == {"baseline": [1, 2], "other": None}
    assert sorted(path.name for path in venv.state.iterdir()) == ["history.jsonl", "state.json"]


def test_state_is_private(venv: Installation):
    venv.commit("ddtree")
    for path in (venv.state.parent, *venv.state.parent.rglob("*")):
        assert oct(path.stat().st_mode & 0o777) == ("0o700" if path.is_dir() else "0o600"), path


def test_mode_owner_and_attributes_stay(tree: Installation):
    file = tree.site / ARGS
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 1234, 4321)
    try:
        os.setxattr(file, "user.note", b"kept")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    tree.commit("ddtree")
    info = file.stat()
    assert oct(info.st_mode & 0o777) == "0o640"
    assert (info.st_uid, info.st_gid) == ((1234, 4321) if os.geteuid() == 0 else (os.getuid(), os.getgid()))
    assert os.getxattr(file, "user.note") == b"kept"
    new = tree.site / DDTREE_FILE
    assert oct(new.stat().st_mode & 0o777) == oct((tree.site / "sglang/__init__.py").stat().st_mode & 0o777)


def test_new_directories_go_again(tree: Installation):
    before = tree.snapshot()
    path, new = "sglang/srt/deep/er/new.py", b"x = 1\n"
    tree.ask("commit", actions=[change(path, None, new)], receipt=receipt(path, None, new))
    assert tree.read(path) == new
    tree.ask("commit", actions=[change(path, new, None)], receipt=None)
    assert tree.snapshot() == before


def test_a_deleted_file_comes_back(tree: Installation):
    before, old = tree.snapshot(), PRISTINE[ARGS]
    (tree.site / ARGS).chmod(0o604)
    before = tree.snapshot()
    tree.ask("commit", actions=[change(ARGS, old, None)], receipt=receipt(ARGS, old, None))
    assert tree.read(ARGS) is None
    assert ARGS not in record_of(tree)
    tree.ask("commit", actions=[{**change(ARGS, None, old), "data": None, "backup": True}], receipt=None)
    assert tree.snapshot() == before


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_what_is_linked_elsewhere_keeps_its_bytes(tree: Installation, tmp_path: Path, link):
    cache = tmp_path / "cache"
    shutil.copytree(tree.site / "sglang", cache)
    for path in PRISTINE:
        if tree.read(path) is not None:
            (tree.site / path).unlink()
            link(cache / path.removeprefix("sglang/"), tree.site / path)
    before = tree.snapshot()
    tree.commit("ddtree")
    assert tree.is_stage("ddtree")
    assert not (tree.site / ARGS).is_symlink()
    assert (cache / "srt/args.py").read_bytes() == PRISTINE[ARGS]
    tree.commit("pristine")
    assert tree.snapshot() == before  # symbolic links are links again
    assert (cache / "srt/args.py").read_bytes() == PRISTINE[ARGS]


def test_a_link_whose_target_changed_comes_back_as_a_file(tree: Installation, tmp_path: Path):
    other = tmp_path / "other.py"
    shutil.move(tree.site / ARGS, other)
    (tree.site / ARGS).symlink_to(other)
    tree.commit("ddtree")
    other.write_bytes(b"changed = 1\n")
    tree.commit("pristine")
    assert not (tree.site / ARGS).is_symlink()
    assert tree.is_stage("pristine")


def test_a_linked_package_directory_is_resolved(tree: Installation, tmp_path: Path):
    real = tmp_path / "real"
    shutil.move(tree.site / "sglang", real)
    (tree.site / "sglang").symlink_to(real)
    tree.commit("ddtree")
    assert (real / "srt/ddtree.py").read_bytes() == DDTREE[DDTREE_FILE]
    assert (tree.site / "sglang").is_symlink()


def test_a_linked_directory_inside_is_refused(tree: Installation, tmp_path: Path):
    outside = tmp_path / "outside"
    shutil.move(tree.site / "sglang/srt", outside)
    (tree.site / "sglang/srt").symlink_to(outside)
    with pytest.raises(Conflict, match="is a link"):
        tree.commit("ddtree")
    assert not (outside / "ddtree.py").exists()


@pytest.mark.parametrize(
    "path", ["sglang/../evil.py", "/etc/evil.py", "other/x.py", "sglang", "sglang//x.py", "sglang/./x.py"]
)
def test_paths_outside_are_refused(tree: Installation, path: str):
    with pytest.raises(Conflict):
        tree.ask("commit", actions=[change(path, None, b"")], receipt=None)


def test_a_directory_in_place_of_a_file_is_drift(tree: Installation):
    (tree.site / DDTREE_FILE).mkdir()
    with pytest.raises(Drift, match="no regular file"):
        tree.ask("commit", actions=[change(DDTREE_FILE, None, b"x = 1\n")], receipt=None)


@pytest.mark.parametrize("found", [DDTREE[DDTREE_FILE], b"other = 1\n", b""])
def test_a_new_file_that_is_there_already_is_never_overwritten(tree: Installation, found: bytes):
    request = tree.request("ddtree")
    (tree.site / DDTREE_FILE).write_bytes(found)
    with pytest.raises(Drift):
        tree.ask("commit", **request)
    assert tree.read(DDTREE_FILE) == found


# ---------------------------------------------------------------- RECORD


def test_record_is_true_after_an_apply(tree: Installation):
    pristine = tree.record.read_bytes().splitlines()
    tree.commit("ddtree")
    lines = tree.record.read_bytes().splitlines()
    untouched = [line for line in pristine if line.split(b",")[0].decode() not in DDTREE]
    assert [line for line in lines if line in pristine] == untouched  # byte for byte, in their order
    check = (
        "import importlib.metadata as m, hashlib, base64, sys\n"
        "d = next(iter(m.distributions(name='sglang', path=[sys.argv[1]])))\n"
        "for f in d.files:\n"
        "    data = f.locate().read_bytes()\n"
        "    h = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')\n"
        "    assert f.hash is None or (f.hash.value == h and f.size == len(data)), f\n"
    )
    subprocess.run([sys.executable, "-c", check, str(tree.site)], check=True)
    listed = {line.split(",")[0] for line in tree.record.read_text().splitlines()}
    assert {str(path.relative_to(tree.site)) for path in tree.site.rglob("*") if path.is_file()} == listed


def test_record_that_someone_else_changed_keeps_their_lines(tree: Installation):
    pristine = tree.record.read_bytes()
    tree.commit("ddtree")
    tree.record.write_bytes(tree.record.read_bytes() + b"bin/extra,,\n")
    assert tree.commit("pristine")["record"] == "rewritten"
    assert sorted(tree.record.read_bytes().splitlines()) == sorted([*pristine.splitlines(), b"bin/extra,,"])


def test_crlf_record_stays_crlf(tree: Installation):
    pristine = tree.record.read_bytes().replace(b"\n", b"\r\n")
    tree.record.write_bytes(pristine)
    tree.commit("ddtree")
    assert tree.record.read_bytes().count(b"\n") == tree.record.read_bytes().count(b"\r\n")
    tree.commit("pristine")
    assert tree.record.read_bytes() == pristine


def test_an_installation_without_record(tree: Installation):
    tree.record.unlink()
    assert tree.commit("ddtree")["record"] == "none lists these files"
    tree.commit("pristine")
    assert not tree.record.exists()
    assert tree.is_stage("pristine")


def test_uninstalling_leaves_no_file_of_ours(tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    empty = {path for path in (tmp_path / "venv").rglob("*") if "pip" not in str(path)}
    host = Installation.in_venv(tmp_path / "venv")
    host.python = str(tmp_path / "venv" / "bin" / "python")
    host.commit("ddtree")
    host.ask("state", put={"baseline": {"text": "x"}})
    pip = subprocess.run([host.python, "-m", "pip", "uninstall", "-y", "sglang"], capture_output=True, text=True)
    assert pip.returncode == 0, pip.stderr
    left = {path for path in (tmp_path / "venv").rglob("*") if "pip" not in str(path)} - empty
    assert [path for path in left if path.is_file()] == []


# ---------------------------------------------------------------- bytecode


def run(host: Installation, code: str, **environment: str) -> str:
    return subprocess.run(
        [host.python, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, **environment}
    ).stdout.strip()


IMPORT = "from sglang.srt import args; print(args.ARG_0)"


@pytest.mark.parametrize("mode", ["TIMESTAMP", "UNCHECKED_HASH"])
def test_new_code_runs_whatever_is_compiled(venv: Installation, mode: str):
    file = venv.site / ARGS
    now = time.time()
    os.utime(file, (now, now))  # the commit falls into the same second
    run(venv, f"import py_compile as p\np.compile({str(file)!r}, invalidation_mode=p.PycInvalidationMode.{mode})")
    old = PRISTINE[ARGS]
    new = old.replace(b"ARG_0 = 0\n", b"ARG_0 = 7\n")  # of the same size
    before = venv.snapshot()
    venv.ask("commit", actions=[change(ARGS, old, new)], receipt=receipt(ARGS, old, new))
    assert run(venv, IMPORT) == "7"
    venv.ask("commit", actions=[change(ARGS, new, old)], receipt=None)
    assert run(venv, IMPORT) == "0"
    assert venv.snapshot() == before  # the bytecode as well


def test_bytecode_of_a_cache_prefix(venv: Installation, tmp_path: Path):
    prefix = str(tmp_path / "cache")
    file = venv.site / ARGS
    py_compile.compile(
        str(file),
        cfile=f"{prefix}{file.parent}/args.{sys.implementation.cache_tag}.pyc",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    assert run(venv, IMPORT, PYTHONPYCACHEPREFIX=prefix) == "0"
    new = PRISTINE[ARGS].replace(b"ARG_0 = 0\n", b"ARG_0 = 7\n")
    venv.ask(
        "commit",
        actions=[change(ARGS, PRISTINE[ARGS], new)],
        receipt=receipt(ARGS, PRISTINE[ARGS], new),
        pycache_prefixes=[prefix],
    )
    assert run(venv, IMPORT, PYTHONPYCACHEPREFIX=prefix) == "7"


def test_bytecode_in_a_tree_is_removed_and_given_back(tree: Installation):
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree.site)], check=True)
    before = tree.snapshot()
    tree.commit("ddtree")
    assert not list(tree.site.glob("sglang/srt/__pycache__/args.*"))
    tree.commit("pristine")
    assert tree.snapshot() == before


def test_a_venv_is_compiled(venv: Installation):
    venv.commit("ddtree")
    assert list(venv.site.glob("sglang/srt/__pycache__/ddtree.*.pyc"))


# ---------------------------------------------------------------- refusals that undo


def test_a_new_file_that_does_not_compile_is_refused(tree: Installation):
    before = tree.snapshot()
    with pytest.raises(Conflict, match="does not compile"):
        tree.ask(
            "commit",
            actions=[change(ARGS, PRISTINE[ARGS], b"def f(:\n")],
            receipt=receipt(ARGS, PRISTINE[ARGS], b"def f(:\n"),
        )
    assert tree.snapshot() == before
    assert not tree.state.exists()


def test_a_module_that_does_not_import_is_undone(venv: Installation):
    before = venv.snapshot()
    broken = b"import no_such_module\n"
    with pytest.raises(Conflict, match="no_such_module") as failure:
        venv.ask(
            "commit",
            actions=[change(ARGS, PRISTINE[ARGS], broken)],
            receipt=receipt(ARGS, PRISTINE[ARGS], broken),
            imports=["sglang.srt.args"],
        )
    assert "Traceback" in failure.value.detail
    assert venv.snapshot() == before
    assert venv.leftovers() == []
    assert not venv.state.exists()


def test_the_import_check_sees_the_new_files(venv: Installation):
    venv.commit("ddtree", imports=["sglang.srt.ddtree", "sglang.srt.worker"])


def test_wrong_bytes_are_refused(tree: Installation):
    action = {**change(ARGS, PRISTINE[ARGS], b"x = 1\n"), "data": b64encode(b"y = 1\n").decode()}
    with pytest.raises(Conflict, match="hash"):
        tree.ask("commit", actions=[action], receipt=None)


def test_a_receipt_that_could_not_be_reverted_is_refused(tree: Installation):
    """x.py carries its change already, by hand: its old bytes must come along, or there is no way back."""
    (tree.site / ARGS).write_bytes(DDTREE[ARGS])
    request = tree.request("ddtree")
    with pytest.raises(Conflict, match="backup"):
        tree.ask("commit", **request)
    tree.ask("commit", **request, store={sha(PRISTINE[ARGS]): b64encode(PRISTINE[ARGS]).decode()})
    assert tree.ask("inspect")["files"][ARGS]["before_data"] == b64encode(PRISTINE[ARGS]).decode()
    tree.commit("pristine")
    assert tree.is_stage("pristine")


def test_a_receipt_that_lies_is_refused(tree: Installation):
    request = tree.request("ddtree")
    request["receipt"]["files"][ARGS]["after"] = sha(b"something else")
    with pytest.raises(Conflict, match="receipt"):
        tree.ask("commit", **request)


def test_a_roll_back_may_give_the_old_receipt_back(venv: Installation):
    venv.commit("ddtree")
    old = venv.ask("inspect")["receipt"]
    before = venv.snapshot(compiled=False)
    venv.commit("temperature")
    venv.ask("commit", **{**venv.request("ddtree"), "receipt": old})
    assert venv.snapshot(compiled=False) == before
    assert venv.ask("inspect")["receipt_state"] == "valid"
    venv.commit("pristine")
    assert venv.is_stage("pristine")
