"""What keeps a server running: only what would start it again, and no program that it merely came from."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patcher.agent import keepers
from patcher.agent.keepers import keeper_of, of_engine
from scripts.rig.processes import end_group

ID = "0a1b" * 16
SUBREAPER = 36  # prctl: orphans below come to this process, as they do to process 1
SERVER = f"{sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., tuple[int, int]]]:
    """Factory: run a shell script in a session of its own; (its process, the one whose id it wrote to "$PIDS")."""
    groups: list[subprocess.Popen] = []

    def start(script: str, *around: str) -> tuple[int, int]:
        pids = tmp_path / f"pids-{len(groups)}"
        process = subprocess.Popen(
            [*around, "sh", "-c", script], env={**os.environ, "PIDS": str(pids)}, start_new_session=True
        )
        groups.append(process)
        return process.pid, _number_in(pids)

    yield start
    for process in groups:
        end_group(process.pid)
        process.wait()


def _number_in(path: Path) -> int:
    deadline = time.monotonic() + 20
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def test_a_unit_keeps_its_main_process_and_what_that_runs_but_no_orphan(started, tmp_path, monkeypatch):
    """Stand-ins for systemctl and the unit's control group; the processes are real."""
    monkeypatch.setattr(keepers, "unit_of", lambda cgroups: ("gitlab-runner.service", []))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def is_main(pid: int) -> None:
        (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho MainPID={pid}\necho Restart=always\n")
        (tmp_path / "systemctl").chmod(0o755)

    main, server = started(f"{SERVER} > $PIDS; true")
    is_main(main)
    kept = {"kind": "systemd", "name": "gitlab-runner.service"}
    assert keeper_of(main) == kept and keeper_of(server) == kept
    main, orphan = started(f"(nohup {SERVER} > $PIDS &); sleep 600")
    is_main(main)
    assert keeper_of(main) == kept and keeper_of(orphan) is None
    is_main(orphan)
    assert keeper_of(orphan) == kept


CONFIG = """
[supervisord]
logfile={d}/supervisord.log
pidfile={d}/supervisord.pid
nodaemon=true
[program:kept]
command=sh -c "{server} > {d}/kept; true"
stopasgroup=true
[program:once]
command=sh -c "nohup {server} > {d}/orphan &"
startsecs=0
autorestart=false
"""


def test_supervisord_keeps_its_programs_and_no_orphan_that_it_was_given(tmp_path):
    (tmp_path / "supervisord.conf").write_text(CONFIG.format(d=tmp_path, server=SERVER))
    adopt = ctypes.CDLL(None).prctl
    daemon = subprocess.Popen(
        [Path(sys.executable).with_name("supervisord"), "-c", tmp_path / "supervisord.conf"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: adopt(SUBREAPER, 1, 0, 0, 0),
    )
    orphan = 0
    try:
        kept, orphan = _number_in(tmp_path / "kept"), _number_in(tmp_path / "orphan")
        assert keeper_of(kept) == {"kind": "supervisor", "name": f"supervisord (process {daemon.pid})"}
        while int(Path(f"/proc/{orphan}/stat").read_text().rsplit(")", 1)[1].split()[1]) != daemon.pid:
            time.sleep(0.02)  # its shell has yet to end
        assert keeper_of(orphan) is None
    finally:
        if orphan:
            os.kill(orphan, 9)
        daemon.terminate()
        daemon.wait(60)


def test_process_ids_of_its_own_make_no_container(started):
    around = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
    if subprocess.run([*around, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    outer, _ = started(f"{SERVER} > $PIDS; true", *around)
    inner = int(Path(f"/proc/{outer}/task/{outer}/children").read_text())
    assert os.readlink(f"/proc/{inner}/ns/pid") != os.readlink("/proc/self/ns/pid")
    assert keeper_of(inner) is None


@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [
        (f"0::/system.slice/docker-{ID}.scope\n", True),
        (f"12:cpu:/\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service\n", True),
        (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container\n", True),
        (f"4:memory:/kubepods/burstable/pod01-ab/{ID}\n", True),
        (f"0::/kubepods.slice/kubepods-pod01.slice/cri-containerd-{ID}.scope\n", True),
        (f"0::/machine.slice/crio-{ID}.scope\n", True),
        ("0::/system.slice/docker.service\n", False),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", False),
        ("0::/user.slice/user-1000.slice/user@1000.service/user.slice/apptainer-4711.scope\n", False),
        ("9:name=systemd:/\n0::/\n", False),
        ("", False),
    ],
)
def test_the_control_groups_of_container_engines(cgroups, expected):
    assert of_engine(cgroups) is expected
