"""A program of a real supervisord, over the real sshd."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from served import Served, documented, put_in, ssh

BIN = Path(sys.executable).parent
DAEMON = """
[unix_http_server]
file={home}/supervisor.sock
[supervisord]
logfile={home}/supervisord.log
pidfile={home}/supervisord.pid
childlogdir={home}
nodaemon=true
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl=unix://{home}/supervisor.sock
"""


@pytest.fixture
def served(stub_host, tool, sshd, monkeypatch):
    config = stub_host.home / "supervisord.conf"
    config.write_text(
        DAEMON.format(home=stub_host.home)
        + put_in(documented("supervisor", "ini"), {"/opt/sglang/venv": stub_host.venv, "30000": stub_host.port})
    )
    daemon = subprocess.Popen([BIN / "supervisord", "-c", config], stdout=subprocess.DEVNULL, cwd=stub_host.home)
    stub_host.wait_answer()
    login = sshd(alias="demo")
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(login.ssh_config))
    yield Served(
        stub_host,
        tool,
        "supervisor",
        {"/opt/supervisor/bin/supervisorctl": BIN / "supervisorctl", "/etc/supervisord.conf": config},
        ssh(login.ssh_config),
    )
    daemon.terminate()  # it ends its programs
    deadline = time.monotonic() + 60
    while daemon.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_there_and_back(served):
    served.there_and_back()


def test_the_kind_process_is_refused(served):
    served.refused_as_a_process("is kept running by supervisord (process ")


@pytest.mark.long
def test_a_server_that_does_not_come_up_is_rolled_back(served):
    """It dies within its first second, so that supervisord gives it up; the old one is started all the same."""
    said = served.failed_readiness()
    assert "no kernel image is available" in said.error["detail"]


@pytest.mark.long
def test_a_server_that_fails_the_smoke_suite_is_rolled_back(served):
    served.failed_smoke()


@pytest.mark.long
def test_a_rollback_that_fails_is_finished_by_hand(served):
    served.failed_rollback()
