"""Cases 14 to 23: what surrounds the files, on a real venv with the small package of packages.py."""

import json
import os
import py_compile
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packages import PATCHED, A, Venv, X, Y, contents, make_wheel, patch_of, told

from patcher.agent.record import record_lines
from patcher.series.model import sha256
from tests.support.builders import VERSION, make_package
from tests.support.command_line import said_by, start_tool

BOTH = patch_of(X, Y)
INFO = f"sglang-{VERSION}.dist-info"


def may_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not may_mount(), reason="a mount namespace needs root with CAP_SYS_ADMIN")


# ---------------------------------------------------------------- 14: uv links


def nodes(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below `root`: its inode and its bytes."""
    return {
        str(path.relative_to(root)): (path.lstat().st_ino, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["hard", "symbolic"])
def test_case_14_uv_links(venv, tool, tmp_path, kind):
    """The layout that uv makes: every file of the package in venv 1 and 2 is a link to the one in the cache."""
    venv.sign(BOTH)
    cache, second = tmp_path / "cache", tmp_path / "second"
    shutil.copytree(venv.site, cache)
    for site in (venv.site, second):
        for file in [path for path in cache.rglob("*") if path.is_file()]:
            link = site / file.relative_to(cache)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            if kind == "hard":
                os.link(file, link)
            else:
                link.symlink_to(file)
    others = nodes(cache), nodes(second)
    start = contents(venv.site)
    look = tool("doctor", *venv.options)
    assert any("several names" in step["detail"] for step in look.host["steps"] if step["name"] == "links")
    assert tool("apply", *venv.options).code == 0
    assert venv.read(X) == PATCHED and (nodes(cache), nodes(second)) == others
    assert tool("revert", *venv.options).code == 0
    assert (nodes(cache), nodes(second)) == others
    assert contents(venv.site) == start  # where a link led, too


def test_case_14_the_real_wheel(linked_wheel, unpacked_wheel, tool):
    """A tree of hard links to the unpacked wheel, and the shipped series."""
    others, start = nodes(unpacked_wheel), contents(linked_wheel)
    options = ("--site-packages", linked_wheel, "--json")
    done = tool("apply", *options)
    assert done.code == 0 and contents(linked_wheel) != start, done.stderr
    assert nodes(unpacked_wheel) == others
    assert tool("revert", *options).code == 0
    assert contents(linked_wheel) == start and nodes(unpacked_wheel) == others


@pytest.mark.long
@pytest.mark.parametrize("mode", ["hardlink", "symlink", "copy"])
def test_case_14_uv_itself(tree, tool, tmp_path, uv, mode):
    """Two venvs that uv made of one wheel and one cache; then uv replaces and removes the patched one."""
    tree.sign(BOTH)
    wheel = make_wheel(tmp_path, {X: A, Y: A})
    env = {**os.environ, "UV_CACHE_DIR": str(tmp_path / "uv-cache"), "UV_LINK_MODE": mode, "UV_OFFLINE": "1"}

    def run(*words: object) -> None:
        subprocess.run([uv, *map(str, words)], check=True, capture_output=True, env=env, cwd=tmp_path)

    venvs = [tmp_path / name for name in ("one", "two")]
    for venv in venvs:
        run("venv", "--python", sys.executable, venv)
        run("pip", "install", "--python", venv, wheel)
    site, second = (next(venv.glob("lib/python*/site-packages")) for venv in venvs)
    file = site / X
    if mode == "hardlink":
        assert file.stat().st_nlink >= 3
    assert file.is_symlink() is (mode == "symlink")
    options = ("--venv", venvs[0], "--no-restart", "--json")  # apply and revert only
    others, start = (nodes(tmp_path / "uv-cache"), nodes(second)), contents(site)
    assert tool("apply", *options).code == 0
    assert file.read_bytes() == PATCHED and (nodes(tmp_path / "uv-cache"), nodes(second)) == others
    assert tool("revert", *options).code == 0
    assert contents(site) == start and (nodes(tmp_path / "uv-cache"), nodes(second)) == others

    assert tool("apply", *options).code == 0
    run("pip", "install", "--python", venvs[0], "--reinstall", wheel)
    assert file.read_bytes() == A and tool("apply", *options).code == 0 and file.read_bytes() == PATCHED
    assert nodes(second) == others[1]
    run("pip", "uninstall", "--python", venvs[0], "sglang")
    assert not [
        path
        for path in venvs[0].rglob("*")
        if path.is_file()
        and ("sglang" in str(path.relative_to(venvs[0])) or "ddtree" in str(path.relative_to(venvs[0])))
    ]


# ---------------------------------------------------------------- 15: nested repository


@pytest.mark.parametrize("place", ["ignored", "tracked", "in the package"])
def test_case_15_nested_repository(venv, tool, tmp_path, monkeypatch, place):
    """The venv lies inside a work tree, whether it is tracked there or not; the package may even be one itself."""
    venv.sign(BOTH)
    repository = venv.site / "sglang" if place == "in the package" else tmp_path

    def git(*words: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.hooksPath=/dev/null", *words],
            cwd=repository,
            check=True,
            capture_output=True,
            text=True,
            env=env,
        ).stdout

    git("init", "-q")
    if place != "tracked":
        (repository / ".gitignore").write_text("*\n")
    git("add", "-A")
    git("commit", "-qm", "all", "--allow-empty")
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))  # as in a hook of some repository
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "nowhere"))
    own, start = contents(repository / ".git"), contents(venv.site)
    assert tool("apply", *venv.options).code == 0
    assert (venv.read(X), venv.read(Y)) == (PATCHED, PATCHED)
    assert contents(repository / ".git") == own, "the repository is none of our business"
    if place == "tracked":
        assert f"{(venv.site / X).relative_to(tmp_path)}" in git("status", "--porcelain")
    assert tool("revert", *venv.options).code == 0
    assert contents(venv.site) == start


# ---------------------------------------------------------------- 16: failure in the write phase

THREE = ("sglang/one/x.py", "sglang/two/y.py", "sglang/z/z.py")
LOCKED_DIRECTORY = """
import ctypes, os
# Without capabilities root is held to the modes of its files, as any owner is.
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
renames = [0]
def hook(event, arguments):
    if event == "os.rename" and str(arguments[0]).endswith(".py.ddtree-new"):
        renames[0] += 1
        if renames[0] == {number}:
            os.chmod("/proc/self/fd/%d" % arguments[3], 0o555)
sys.addaudithook(hook)
"""


@pytest.mark.parametrize(
    ("job", "number"),
    [
        ("apply", 2),
        ("revert", 2),
        pytest.param("apply", 1, marks=pytest.mark.long),
        pytest.param("apply", 3, marks=pytest.mark.long),
    ],
)
def test_case_16_failure_in_the_write_phase(small_venv, tool, job, number):
    """A directory becomes read-only just before the rename in it."""
    venv = small_venv(dict.fromkeys(THREE, A))
    venv.sign(patch_of(*THREE), dict.fromkeys(THREE, PATCHED))
    if job == "revert":
        venv.at_start("")
        assert tool("apply", *venv.options).code == 0
    venv.at_start(LOCKED_DIRECTORY.format(number=number))
    before, locked = contents(venv.site), venv.site / THREE[number - 1]

    said = tool(job, *venv.options)
    error = told(said, 4, "no permission", str(locked), "was put back, but these could not be removed")
    assert [venv.read(path) for path in THREE] == [A if job == "apply" else PATCHED] * 3
    assert all(name.startswith(str(locked.parent / ".")) for name in error["next"].rpartition(": ")[2].split(", "))
    assert not said.host["changed"]

    status = tool("status", *venv.options)  # still read-only: said, and no reason to fail
    assert status.code == 0 and "put back" not in status.host["summary"]
    assert str(locked.parent) in status.host["facts"]["left behind"]
    assert status.host["state"] == ("pristine" if job == "apply" else "all")
    told(tool(job, *venv.options), 4, "could not be removed")

    locked.parent.chmod(0o755)
    cleared = tool("status", *venv.options)
    assert "left behind" not in cleared.host["facts"] and "journal" not in cleared.host["facts"]
    assert contents(venv.site) == before
    venv.at_start("")
    assert tool(job, *venv.options).code == 0


def test_case_16_nothing_can_be_put_back_for_now(small_venv, tool):
    """All three files lie in the directory that becomes read-only: hands are needed, and then one command more."""
    files = ("sglang/x.py", "sglang/y.py", "sglang/z.py")
    venv = small_venv(dict.fromkeys(files, A))
    venv.sign(patch_of(*files), dict.fromkeys(files, PATCHED))
    venv.at_start(LOCKED_DIRECTORY.format(number=2))
    before = contents(venv.site)
    said = tool("apply", *venv.options)
    assert said.code == 8 and str(venv.site / "sglang/x.py") in said.error["what"], said.stderr
    assert any(str(venv.site / "sglang/x.py") in command for command in said.error["commands"])
    (venv.site / "sglang").chmod(0o755)
    assert tool("status", *venv.options).host["state"] == "pristine"
    assert contents(venv.site) == before


# ---------------------------------------------------------------- 17: stale bytecode

OLD, NEW = b"value = 1\n", b"value = 2\n"
SAME_SIZE = b"@@ -1 +1 @@\n-value = 1\n+value = 2\n"
SHOW = "from sglang import x; print(x.value)"
SERVER = b"import time\ntime.sleep(600)\n"
MODES = py_compile.PycInvalidationMode


COMPILED = ("timestamp", "unchecked_hash", "checked_hash", "optimised", "beside_the_source")
WHEN = ("old", "this_second", "next_year")


def test_case_17_stale_bytecode(small_venv, tool):
    """A module for each kind of bytecode and time of the source. The edit keeps the size, and the time may be the old
    one's; what runs is the new code, and after the revert the old."""
    modules = {f"{kind}_{when}": f"sglang/{kind}_{when}.py" for kind in COMPILED for when in WHEN}
    venv = small_venv(dict.fromkeys(modules.values(), OLD))
    venv.sign(patch_of(*modules.values(), hunks=SAME_SIZE), dict.fromkeys(modules.values(), NEW))
    now = time.time()
    for module, path in modules.items():
        source = venv.site / path
        kind = next(kind for kind in COMPILED if module.startswith(kind))
        seconds = {"old": 10**9, "this_second": now, "next_year": now + 3 * 10**7}[module.removeprefix(f"{kind}_")]
        os.utime(source, (seconds, seconds))
        py_compile.compile(
            str(source),
            cfile=f"{source}c" if kind == "beside_the_source" else None,
            optimize=1 if kind == "optimised" else -1,
            invalidation_mode={"unchecked_hash": MODES.UNCHECKED_HASH, "checked_hash": MODES.CHECKED_HASH}.get(
                kind, MODES.TIMESTAMP
            ),
        )
    show = f"import importlib; print({{importlib.import_module('sglang.' + n).value for n in {[*modules]!r}}})"
    start = contents(venv.site)
    for flags in (["-B"], ["-B", "-O"]):
        assert venv.run(show, *flags) == "{1}"
    assert tool("apply", *venv.options).code == 0
    for flags in (["-B"], ["-B", "-O"], []):
        assert venv.run(show, *flags) == "{2}"
    assert tool("revert", *venv.options).code == 0
    assert contents(venv.site) == start  # the bytecode as well
    for flags in (["-B"], ["-B", "-O"]):
        assert venv.run(show, *flags) == "{1}"


@pytest.mark.parametrize("way", ["PYTHONPYCACHEPREFIX", "-X", "-X joined"])
def test_case_17_bytecode_elsewhere(small_venv, tool, tmp_path, way):
    """The server keeps its bytecode in a directory of its own, which only its process tells."""
    venv = small_venv({X: OLD, "sglang/launch_server.py": SERVER})
    venv.sign(patch_of(X, hunks=SAME_SIZE), {X: NEW}, {X: OLD})
    cache = tmp_path / "cache"
    flags = {"-X": ["-X", f"pycache_prefix={cache}"], "-X joined": [f"-Xpycache_prefix={cache}"]}.get(way, [])
    env = {"PYTHONPYCACHEPREFIX": str(cache)} if way == "PYTHONPYCACHEPREFIX" else {}
    venv.run(
        f"import py_compile as p; p.compile({str(venv.site / X)!r}, "
        "invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)",
        *flags,
        **env,
    )
    assert list(cache.rglob("x.*.pyc")) and venv.run(SHOW, *flags, **env) == "1"
    argv = [venv.python, *flags, "-m", "sglang.launch_server", "--port", "1"]
    server = subprocess.Popen(argv, env={**os.environ, **env}, cwd=tmp_path)
    try:
        while b"launch_server" not in Path(f"/proc/{server.pid}/cmdline").read_bytes():
            time.sleep(0.01)  # between fork and exec
        assert tool("apply", *venv.options).code == 0
        assert venv.run(SHOW, *flags, **env) == "2"
        assert tool("revert", *venv.options).code == 0
        assert venv.run(SHOW, *flags, **env) == "1"
    finally:
        server.kill()
        server.wait()


# ---------------------------------------------------------------- 18: bind mount and read-only image

MOUNTS = {
    "a file": ("mount --bind {site}/sglang/x.py {site}/sglang/x.py", "mount point", "{site}/sglang/x.py"),
    "RECORD": ("mount --bind {site}/{info}/RECORD {site}/{info}/RECORD", "mount point", "{site}/{info}/RECORD"),
    "site-packages": ("mount --bind {site} {site} && mount -o remount,ro,bind {site}", "read-only", "{site}"),
    "the package": (
        "mount --bind {site}/sglang {site}/sglang && mount -o remount,ro,bind {site}/sglang",
        "read-only",
        "{site}/sglang",
    ),
    "the venv": ("mount --bind {venv} {venv} && mount -o remount,ro,bind {venv}", "read-only", "{venv}"),
}


@needs_mounts
@pytest.mark.parametrize(
    ("kind", "job"), [*((kind, "apply") for kind in MOUNTS), ("a file", "revert"), ("site-packages", "revert")]
)
def test_case_18_bind_mount_and_read_only_image(venv, tool, kind, job):
    venv.sign(BOTH)
    if job == "revert":
        assert tool("apply", *venv.options).code == 0
    before = contents(venv.venv)
    script, words, mount = (text.format(site=venv.site, venv=venv.venv, info=INFO) for text in MOUNTS[kind])
    around = ("unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh")
    said = said_by(start_tool(job, *venv.options, around=around))
    told(said, 4, words, f"mount {mount}")
    assert contents(venv.venv) == before  # no litter, no lock, no state that was not there


@needs_mounts
def test_case_18_a_writable_mount_is_no_obstacle(venv):
    """A volume over site-packages: the new files are made on it, and so can be renamed."""
    venv.sign(BOTH)
    around = ("unshare", "-m", "sh", "-c", f'mount --bind {venv.site} {venv.site} && exec "$@"', "sh")
    assert said_by(start_tool("apply", *venv.options, around=around)).code == 0
    assert venv.read(X) == PATCHED


# ---------------------------------------------------------------- 19: the package manager


def pip(venv: Venv, command: str, *words: object) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            venv.python,
            "--disable-pip-version-check",
            command,
            "--quiet",
            *map(str, words),
        ],
        check=True,
        capture_output=True,
    )


def record_is_true(venv: Venv, version: str = VERSION) -> bool:
    """Every hash of RECORD is that of the file, and every file of the package is listed."""
    lines = record_lines((venv.site / f"sglang-{version}.dist-info" / "RECORD").read_bytes())
    files = {str(path.relative_to(venv.site)) for path in (venv.site / "sglang").rglob("*") if path.suffix == ".py"}
    return files <= set(lines) and all(
        sha256((venv.site / path).read_bytes()) == told for path, (_, told) in lines.items() if told
    )


@pytest.fixture
def more_venv(venv) -> Venv:
    """A venv whose series also adds a file in a new directory."""
    create = b"--- /dev/null\n+++ b/sglang/more/new.py\n@@ -0,0 +1 @@\n+new = 1\n"
    venv.sign(
        BOTH + create,
        {X: PATCHED, Y: PATCHED, "sglang/more/new.py": b"new = 1\n"},
        {X: A, Y: A, "sglang/more/new.py": None},
    )
    return venv


def lay_over(venv: Venv, files: dict[str, bytes], version: str = VERSION) -> None:
    """Another installation in the place of this one, by someone who takes nothing of ours away: rsync, an image."""
    for name in ("sglang", INFO):
        shutil.rmtree(venv.site / name)
    make_package(venv.site, {"sglang/__init__.py": b"", **files}, version=version)


def test_case_19_record_is_true_and_uninstalling_leaves_nothing(more_venv, tool, tmp_path):
    venv = more_venv
    pip(venv, "install", "--no-index", "--force-reinstall", make_wheel(tmp_path / "wheels", {X: A, Y: A}))
    start = contents(venv.site)
    assert record_is_true(venv)
    assert tool("apply", *venv.options).code == 0
    assert record_is_true(venv) and venv.read("sglang/more/new.py")
    assert tool("revert", *venv.options).code == 0
    assert record_is_true(venv) and contents(venv.site) == start
    assert tool("apply", *venv.options).code == 0
    pip(venv, "uninstall", "-y", "sglang")
    left = [name for name, data in contents(venv.venv).items() if "sglang" in name or ".ddtree" in name]
    assert left in ([], [".ddtree-patch"], [".ddtree-patch", ".ddtree-patch/sglang"]), left
    told(tool("status", *venv.options), 4, "has no sglang")


@pytest.mark.parametrize("version", [VERSION, "0.5.20"])
@pytest.mark.parametrize("manner", ["by pip", "laid over"])
def test_case_19_replaced_under_the_patch(more_venv, tool, tmp_path, manner, version):
    """pip takes our state along when it uninstalls; what only writes its own files over does not, and leaves a receipt
    of files that are gone."""
    venv, newer = more_venv, {X: A, Y: A} if version == VERSION else {X: b"other = 1\n", Y: b"other = 2\n"}
    assert tool("apply", *venv.options).code == 0
    if manner == "by pip":
        pip(venv, "install", "--no-index", "--force-reinstall", make_wheel(tmp_path / "newer", newer, version))
    else:
        lay_over(venv, newer, version)
    start = contents(venv.site)

    status = tool("status", *venv.options)
    assert status.code == 0 and status.host["receipt_state"] == ("none" if manner == "by pip" else "stale")
    assert manner == "by pip" or "apply patches them anew, revert drops" in status.host["facts"]["receipt"]
    told(tool("verify", *venv.options), 4, "not patched")
    if version != VERSION:
        told(tool("apply", *venv.options), 4, "0.5.20", VERSION)
    assert contents(venv.site) == start
    back = tool("revert", *venv.options)
    assert back.code == 0 and not back.host["changed"] and contents(venv.site) == start, "never reversed onto it"
    assert manner == "by pip" or any("stale" in line for line in back.host["not_done"])
    assert tool("status", *venv.options).host["receipt_state"] == "none"
    assert record_is_true(venv, version)


def test_case_19_a_stale_receipt_and_apply(more_venv, tool):
    """Apply goes by the files; the receipt that was stale is replaced, and a revert gives the new installation back."""
    venv = more_venv
    assert tool("apply", *venv.options).code == 0
    lay_over(venv, {X: A, Y: A})
    start = contents(venv.site)
    done = tool("apply", *venv.options)
    assert done.code == 0 and any("stale" in step["detail"] for step in done.host["steps"])
    assert venv.read(X) == PATCHED and record_is_true(venv)
    assert tool("revert", *venv.options).code == 0 and contents(venv.site) == start


# ---------------------------------------------------------------- 20, 21: the kernel

FAKE_TORCH = '''
"""A fake torch: what the probe needs of it to call an op, and a GPU that is not there."""
from types import SimpleNamespace

int64 = int32 = float32 = None
version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda i: "Fake GPU")


class Tensor(list):
    def contiguous(self):
        return self

    def tolist(self):
        return self


def tensor(data, dtype=None, device=None):
    return Tensor(data)


def full(shape, value, dtype=None, device=None):
    return Tensor([value] * shape[0] if len(shape) == 1 else [[value] * shape[1] for _ in range(shape[0])])


zeros = lambda count, dtype=None, device=None: Tensor([0] * count)
full_like = lambda other, value: Tensor([value] * len(other))


class _OpNamespace:
    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        raise AttributeError(f"'_OpNamespace' '{self.name}' object has no attribute '{name}'")


ops = SimpleNamespace(sgl_kernel=_OpNamespace("sgl_kernel"))
'''
WRAPPER = """
import torch


def tree_speculative_sampling_target_only(**arguments):
    {call}


def top_k_renorm_prob(probs, k):
    return torch.tensor([[2 / 3, 1 / 3, 0.0, 0.0]])


top_p_renorm_prob = top_k_renorm_prob
"""
NO_OP = "torch.ops.sgl_kernel.tree_speculative_sampling_target_only.default(**arguments)"


def install(site: Path, name: str, version: str, module: str, code: str) -> None:
    (site / f"{module}.py").write_text(code)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def kernel(site: Path, code: str) -> None:
    """Put another sgl_kernel in place, without a trace of the one before."""
    (site / "sgl_kernel.py").write_text(code)
    shutil.rmtree(site / "__pycache__", ignore_errors=True)


BROKEN_KERNELS = {
    "raise ImportError('/x/common_ops.abi3.so: undefined symbol: _ZN3c104cuda29c10_cuda_check_implementationEiPKc')": [
        "undefined symbol: _ZN3c104cuda29"
    ],
    "raise OSError('libcudart.so.13: cannot open shared object file')": ["libcudart.so.13"],
    "import ctypes; ctypes.CDLL(__file__)": ["OSError"],
    "raise SystemExit('no supported architecture')": ["no supported architecture"],
    "import os; os.abort()": ["no report", "belong together"],
    "pass": ["AttributeError"],
}


def test_case_20_kernel_abi_mismatch(stub_host, tool):
    """However the import ends, the versions that have to fit each other are named, and nothing is touched."""
    install(stub_host.site_packages, "torch", "2.9.1", "torch", FAKE_TORCH)
    install(stub_host.site_packages, "sglang-kernel", "0.4.2", "sgl_kernel", "")
    options = ("--local", "--config", stub_host.configure("local", require=True), "--json")
    for code, words in BROKEN_KERNELS.items():
        kernel(stub_host.site_packages, code)
        before = contents(stub_host.site_packages)
        error = told(tool("apply", *options), 5, "torch 2.9.1", "sglang-kernel 0.4.2", "CUDA 13.0", "Fake GPU", *words)
        assert error["error"] == "KernelProblem"
        after = contents(stub_host.site_packages)
        assert {name: data for name, data in after.items() if "__pycache__" not in name} == before
        assert not (stub_host.venv / ".ddtree-patch").exists()


USELESS_WRAPPERS = {
    NO_OP: "AttributeError: '_OpNamespace' 'sgl_kernel' object has no attribute 'tree_speculative_sampling_target_on",
    "raise RuntimeError('CUDA error: no kernel image is available for execution on the device')": "no kernel image",
    "raise NotImplementedError('could not run sgl_kernel::tree with arguments from the CUDA backend')": "backend",
    "raise TypeError('unexpected keyword argument deterministic')": "deterministic",
    "return None": "differs from the reference walk in predicts",
}


def test_case_21_kernel_wrapper_without_kernel(stub_host, tool):
    """The import works and the call raises, or does nothing: wrong even where no kernel is required."""
    install(stub_host.site_packages, "torch", "2.9.1", "torch", FAKE_TORCH)
    install(stub_host.site_packages, "sglang-kernel", "0.4.2", "sgl_kernel", "")
    options = ("--local", "--config", stub_host.configure("local", require=False), "--json")
    for call, word in USELESS_WRAPPERS.items():
        kernel(stub_host.site_packages, WRAPPER.format(call=call))
        before = stub_host.hashes()
        told(tool("apply", *options), 5, word, "torch 2.9.1", "sglang-kernel 0.4.2", "CUDA 13.0")
        assert stub_host.hashes() == before
    assert tool("apply", *options, "--no-restart").code == 0
    kernel(stub_host.site_packages, WRAPPER.format(call=NO_OP))
    told(tool("verify", *options), 5, USELESS_WRAPPERS[NO_OP])


# ---------------------------------------------------------------- 22: full disk

FULL = """
set -e
mount -t tmpfs -o {limit} tmpfs {mounted}
cp -a {venv}/. {mounted}
{fill}
rc=0; "$@" {job} {options} --venv {mounted} > {out}/said 2> {out}/err || rc=$?
echo $rc > {out}/code
cp -a {mounted}/. {out}/full
rm -rf {mounted}/filler
"$@" status {options} --venv {mounted} > {out}/status
cp -a {mounted}/. {out}/after
"""
FILL = "head -c $(( ($(df -k --output=avail {mounted} | tail -1) - {left}) * 1024 )) /dev/zero > {mounted}/filler"
FILL_INODES = (
    "mkdir {mounted}/filler; for n in $(seq $(( $(df --output=iavail {mounted} | tail -1) - {left} ))); "
    "do : > {mounted}/filler/$n; done"
)


@needs_mounts
@pytest.mark.parametrize(
    ("job", "limit", "left"),
    [
        ("apply", "size=1m", 0),
        ("revert", "size=1m", 8),
        ("apply", "size=1m,nr_inodes=400", 3),
        pytest.param("apply", "size=1m", 28, marks=pytest.mark.long),
        pytest.param("apply", "size=1m,nr_inodes=400", 9, marks=pytest.mark.long),
    ],
)
def test_case_22_full_disk(venv, tool, tmp_path, job, limit, left):
    """A tmpfs with `left` free kilobytes or inodes: the old files are whole, and the next command leaves nothing."""
    venv.sign(BOTH)
    if job == "revert":
        assert tool("apply", *venv.options).code == 0
    stage = "pristine" if job == "apply" else "all"
    mounted, out = tmp_path / "mounted", tmp_path / "out"
    mounted.mkdir()
    out.mkdir()
    fill = (FILL_INODES if "inodes" in limit else FILL).format(mounted=mounted, left=left)
    script = FULL.format(
        limit=limit,
        mounted=mounted,
        venv=venv.venv,
        fill=fill,
        out=out,
        job=job,
        options=shlex.join(map(str, venv.options)),
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-m", "patcher"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads((out / "said").read_text())
    assert said["exit_code"] == 4, (out / "err").read_text()
    assert "no space is left" in said["error"]["what"] and f"mount {mounted}" in said["error"]["what"]
    assert "free some space" in said["error"]["next"]
    old = contents(venv.site)
    site = venv.site.relative_to(venv.venv)
    full = contents(out / "full" / site)
    assert {path: full[path] for path in (X, Y, f"{INFO}/RECORD")} == {
        path: old[path] for path in (X, Y, f"{INFO}/RECORD")
    }
    assert json.loads((out / "status").read_text())["hosts"][0]["state"] == stage
    assert contents(out / "after") == contents(venv.venv), "what was written on the way is gone again"


# ---------------------------------------------------------------- 23: two operators

GATE = """
import os, time
def hook(event, arguments):
    if event == "os.rename" and str(arguments[0]).endswith("x.py.ddtree-new"):
        open({here!r}, "w").close()
        while os.path.exists({gate!r}):
            time.sleep(0.02)
sys.addaudithook(hook)
"""


@pytest.fixture
def halted(venv, tmp_path, sshd, monkeypatch):
    """`halted(way)` starts an apply as a program of its own and gives it once its agent has the lock and waits.

    It goes on when the file `gate` is removed. way: "local" or "ssh".
    """
    venv.sign(BOTH)
    gate, here = tmp_path / "gate", tmp_path / "here"
    gate.touch()
    started = []

    def start(way: str) -> tuple[subprocess.Popen, tuple[object, ...]]:
        venv.at_start(GATE.format(gate=str(gate), here=str(here)))
        options = venv.options
        if way == "ssh":
            monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(sshd(alias="demo").ssh_config))
            options = ("--host", *("demo" if word == "--local" else word for word in options))
        started.append(start_tool("apply", *options))
        deadline = time.monotonic() + 120
        while not here.exists():
            assert started[-1].poll() is None and time.monotonic() < deadline, started[-1].communicate()
            time.sleep(0.02)
        return started[-1], options

    yield start
    gate.unlink(missing_ok=True)
    for program in started:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


def holder(venv: Venv) -> dict:
    return json.loads((venv.state / "lock").read_bytes())


@pytest.mark.parametrize("way", ["local", "ssh"])
def test_case_23_two_operators(venv, tool, tmp_path, halted, way):
    """The second is told who holds it since when, and may look; the first ends well."""
    first, options = halted(way)
    error = told(tool("apply", *options), 9, "holds the lock since 20", str(holder(venv)["pid"]), holder(venv)["who"])
    assert error["error"] == "Locked"
    told(tool("revert", *options), 9, "holds the lock since 20")
    look = tool("status", *options)
    assert look.code == 0 and look.host["lock"]["who"] == holder(venv)["who"]
    assert "is changing these files" in look.host["facts"]["lock"] and "journal" not in look.host["facts"]
    assert look.host["summary"].startswith("being changed by ")
    told(tool("verify", *options), 9, "holds the lock since 20")
    assert told(tool("doctor", *options), 9, holder(venv)["who"])
    (tmp_path / "gate").unlink()
    assert said_by(first).code == 0
    assert (venv.read(X), venv.read(Y)) == (PATCHED, PATCHED)
    again = tool("apply", *options)
    assert again.code == 0 and not again.host["changed"]
    assert not (venv.state / "lock").exists()


@pytest.mark.parametrize("way", ["local", "ssh"])
def test_case_23_a_client_was_killed(venv, tool, tmp_path, halted, way):
    """Its agent lives and holds the lock until it is done; nobody has to remove anything."""
    first, options = halted(way)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    told(tool("apply", *options), 9, holder(venv)["who"])
    (tmp_path / "gate").unlink()
    deadline = time.monotonic() + 60
    while (venv.state / "lock").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (venv.read(X), venv.read(Y)) == (PATCHED, PATCHED)
    status = tool("status", *options)
    assert status.host["state"] == "all" and status.host["receipt_state"] == "valid"


def test_case_23_a_dead_holders_lock_is_taken_over(venv, tool, tmp_path, halted):
    """Client and agent were killed: the lock and the journal lie there. The next command undoes, and goes on."""
    first, options = halted("local")
    before = {X: A, Y: A}
    os.kill(holder(venv)["pid"], signal.SIGKILL)
    told(said_by(first), 3, "run the command again")
    (tmp_path / "gate").unlink()
    status = tool("status", *options)
    assert status.code == 0 and "undone" in status.host["steps"][0]["detail"]
    assert {path: venv.read(path) for path in before} == before
    assert not (venv.state / "lock").exists() and not (venv.state / "journal.json").exists()
    assert tool("apply", *options).code == 0 and venv.read(X) == PATCHED


@pytest.mark.parametrize("others", ["apply", "revert"])
def test_case_23_four_at_the_same_moment(venv, tool, others):
    """Without any gate: each did it, found it done, or was told by whom; the outcome is whole."""
    venv.sign(BOTH)
    if others == "revert":
        assert tool("apply", *venv.options).code == 0
    said = [said_by(program) for program in [start_tool(others, *venv.options) for _ in range(4)]]
    assert {one.code for one in said} <= {0, 9}, [one.stderr for one in said]
    assert sum(one.host["changed"] for one in said) == 1
    wanted = PATCHED if others == "apply" else A
    assert (venv.read(X), venv.read(Y)) == (wanted, wanted)
    assert tool("status", *venv.options).host["state"] == ("all" if others == "apply" else "pristine")
    assert not [
        path
        for path in venv.venv.rglob("*")
        if path.name in ("lock", "journal.json") or path.name.endswith((".ddtree-new", ".ddtree-old"))
    ]


def test_case_23_overtaken_between_plan_and_commit(venv, tool, monkeypatch):
    """The other's commit comes after our plan and before our commit: he is named, and nothing is drift."""
    from patcher.installation.session import Session

    venv.sign(BOTH)
    look = Session.inspect

    def inspect_and_be_late(session: Session) -> None:
        look(session)
        monkeypatch.setattr(Session, "inspect", look)
        assert said_by(start_tool("apply", *venv.options)).code == 0

    monkeypatch.setattr(Session, "inspect", inspect_and_be_late)
    error = told(tool("apply", *venv.options), 9, "was changed by", "since the plan was made", "run the command again")
    assert error["error"] == "Locked"
    assert tool("apply", *venv.options).host["changed"] is False
