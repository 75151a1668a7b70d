"""Which processes are SGLang servers, and what is said of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patcher.agent.keepers import unit_of
from patcher.agent.processes import is_launcher
from patcher.ssh.connection import LocalConnection
from patcher.wire.call import call_agent
from scripts.rig.processes import end_group
from tests.support.installations import Installation

SERVER = """
import multiprocessing, os, socket, sys, time
if __name__ == "__main__":
    link = socket.create_server(("127.0.0.1", 0))
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
    print(link.getsockname()[1], flush=True)
    time.sleep(600)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Installation, subprocess.Popen, Path]]:
    host = Installation.in_venv(tmp_path / "venv")
    (host.site / "sglang/launch_server.py").write_text(SERVER)
    log = tmp_path / "server.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [host.python, "-m", "sglang.launch_server", "--port", "1"],
            stdout=out,
            cwd=tmp_path,
            start_new_session=True,
            env={"PYTHONPYCACHEPREFIX": str(tmp_path / "cache")},
        )
    while not log.read_text().strip():
        assert process.poll() is None
        time.sleep(0.02)
    yield host, process, log
    end_group(process.pid)
    process.wait()


def test_a_running_server(server):
    host, process, log = server
    reply = call_agent(LocalConnection(), sys.executable, {"op": "processes"})
    found = [item for item in reply["processes"] if item["prefix"] == str(host.venv)]
    assert [item["pid"] for item in found] == [process.pid]  # its child is none
    item = found[0]
    assert item["argv"][1:] == ["-m", "sglang.launch_server", "--port", "1"]
    assert (item["python"], item["cwd"]) == (host.python, str(log.parent))
    assert item["listening"] == [int(log.read_text())]
    assert item["log"] == str(log)
    assert (item["pgid"], item["sid"]) == (process.pid, process.pid)
    assert item["sglang_root"] is None
    assert item["pycache_prefix"] == str(log.parent / "cache")
    assert item["start_time"] <= time.time()


def test_a_source_tree_in_the_working_directory_wins(server, tmp_path: Path):
    host, _, _ = server
    process = subprocess.Popen(
        [host.python, "-m", "sglang.launch_server"], cwd=host.site, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        process.stdout.readline()
        reply = call_agent(LocalConnection(), sys.executable, {"op": "processes"})
        root = {item["pid"]: item["sglang_root"] for item in reply["processes"]}[process.pid]
        assert root == str(host.site / "sglang")
    finally:
        end_group(process.pid)
        process.wait()


def test_only_a_file_named_by_a_port_notes_a_server_that_is_missing(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    notes = tmp_path / ".ddtree-patch"
    (notes / "1").mkdir(parents=True)
    os.mkfifo(notes / "2")
    for name in ("30000", "0", "030001", "65536", "9" * 23, "\u0663", "notes"):
        (notes / name).write_text(sys.executable)
    reply = call_agent(LocalConnection(), sys.executable, {"op": "processes"})
    assert reply["missing"] == [{"port": 30000, "python": sys.executable}]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/v/bin/python", "-m", "sglang.launch_server", "--port", "1"], True),
        (["python3.12", "-u", "-X", "dev", "-W", "ignore", "-m", "sglang.launch_server"], True),
        (["/v/bin/python3", "/v/bin/sglang", "serve", "--model", "m"], True),
        (["python", "-m", "sglang", "serve"], True),
        (["python", "/src/python/sglang/launch_server.py"], True),
        (["python", "/v/bin/sglang", "generate"], False),
        (["bash", "-c", "python -m sglang.launch_server"], False),
        (["sudo", "python", "-m", "sglang.launch_server"], False),
        (["python", "-c", "import x", "-m", "sglang.launch_server"], False),
        (["python", "tool.py", "-m", "sglang.launch_server"], False),
        (["vim", "launch_server.py"], False),
        (["sglang::scheduler"], False),
        (["python"], False),
        ([], False),
    ],
)
def test_what_is_a_launcher(argv: list[str], expected: bool):
    assert is_launcher(argv) is expected


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        ("0::/system.slice/sglang.service\n", ("sglang.service", [])),
        ("1:name=systemd:/system.slice/sglang.service\n0::/\n", ("sglang.service", [])),
        ("1:name=systemd:/\n0::/system.slice/sglang.service\n", ("sglang.service", [])),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/sglang.service\n", ("sglang.service", ["--user"])),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ("", [])),
        ("0::/user.slice/user-1000.slice/user@1000.service/tmux-spawn-1.scope\n", ("", [])),
        ("0::/system.slice/docker-0a1b.scope\n", ("", [])),
        ("12:cpu:/a/b\n1:name=systemd:/\n0::/\n", ("", [])),
        ("", ("", [])),
    ],
)
def test_the_unit_of_a_control_group(cgroups, unit):
    assert unit_of(cgroups) == unit
