"""What /proc says of processes, of those too that have ended or bear a strange name."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time

import pytest

from patcher.agent import proc


def test_a_name_with_brackets_and_spaces_does_not_move_the_fields(tmp_path):
    program = tmp_path / "a) R 1 (b"
    shutil.copy(shutil.which("sleep"), program)
    process = subprocess.Popen([program, "600"], start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while proc.command_line(process.pid)[:1] != [str(program)] and time.monotonic() < deadline:
            time.sleep(0.01)
        found = proc.stat(process.pid)
        assert (found.name, found.parent) == (program.name, os.getpid())
        assert (found.group, found.session) == (process.pid, process.pid)
        assert proc.start_time(found.ticks) == pytest.approx(time.time(), abs=11)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_ended_does_not_run():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert proc.stat(process.pid).is_over and proc.start_ticks(process.pid) is None  # a zombie still has its id
    process.wait()
    assert proc.stat(process.pid) is None and proc.start_ticks(process.pid) is None
    assert (proc.command_line(process.pid), proc.sockets(process.pid)) == ([], set())


def test_a_listening_socket_is_its_process_s():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        inodes = {inode for inode, other in proc.listening().items() if other == port}
        assert len(inodes) == 1 and inodes <= proc.sockets(os.getpid())
