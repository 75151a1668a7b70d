"""A service of a real runit, through the adapter `command`, over the real sshd."""

import shutil
import signal
import subprocess

import pytest
from served import Served, documented, put_in, ssh

pytestmark = pytest.mark.skipif(shutil.which("runsv") is None, reason="runit is not installed (apt-get install runit)")


@pytest.fixture
def served(stub_host, tool, sshd, monkeypatch):
    service, log = stub_host.home / "service/sglang", stub_host.home / "logs"
    log.mkdir()
    scripts = {
        service / "run": put_in(
            documented("command: runit, s6 and others", "sh"),
            {"/opt/sglang/venv": stub_host.venv, "30000": stub_host.port},
        ),
        service / "log/run": f"#!/bin/sh\nexec svlogd {log}\n",
    }
    for script, text in scripts.items():
        script.parent.mkdir(parents=True)
        script.write_text(text)
        script.chmod(0o755)
    daemon = subprocess.Popen(["runsvdir", service.parent], cwd=stub_host.home, start_new_session=True)
    stub_host.wait_answer()
    login = sshd(alias="demo")
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(login.ssh_config))
    yield Served(
        stub_host,
        tool,
        "command: runit, s6 and others",
        {"/etc/service/sglang": service, "/var/log/sglang/current": log / "current"},
        ssh(login.ssh_config),
    )
    daemon.send_signal(signal.SIGHUP)  # it ends its runsv, and they their services
    daemon.wait(30)
    subprocess.run(["sv", "-w", "30", "exit", service], check=False)  # waits until they have


def test_there_and_back(served):
    served.there_and_back()


def test_the_kind_process_is_refused(served):
    served.refused_as_a_process("is kept running by runsv (process ")


@pytest.mark.long
def test_a_server_that_does_not_come_up_is_rolled_back(served):
    said = served.failed_readiness()
    assert "no kernel image is available" in said.error["detail"]


def test_a_server_that_fails_the_smoke_suite_is_rolled_back(served):
    served.failed_smoke()


@pytest.mark.long
def test_a_rollback_that_fails_is_finished_by_hand(served):
    served.failed_rollback()


@pytest.mark.long
def test_a_server_that_is_down_and_cannot_be_stopped_is_left_down(served):
    """It could not be put back, were it started and did it fail."""
    config = served.stub.config
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith("stop")))
    service = config.parent / "service/sglang"
    subprocess.run(["sv", "-w", "30", "force-stop", service], check=True)
    said = served.run("apply")
    assert any("no server is running" in line for line in said.host["not_done"])
    assert b"down" in subprocess.run(["sv", "status", service], check=True, capture_output=True).stdout
