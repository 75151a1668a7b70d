"""The supervisor adapter on a real supervisord that runs the stub server."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patcher.errors import NotReady, UsageProblem
from patcher.hosts import ServiceSettings
from patcher.server import readiness
from patcher.server.client import SglangClient
from patcher.server.readiness import wait_ready
from patcher.server.services.registry import ServiceHost, make_service
from patcher.smoke.suite import Prompt
from patcher.ssh.connection import LocalConnection
from patcher.wire.call import call_agent
from tests.support.stub_venv import make_stub_venv

BIN = Path(sys.executable).parent
CONFIG = """
[unix_http_server]
file={d}/supervisor.sock
[supervisord]
logfile={d}/supervisord.log
pidfile={d}/supervisord.pid
nodaemon=true
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl=unix://{d}/supervisor.sock
[program:stub]
command={python} -m sglang.launch_server --port {port}
stopasgroup=true
killasgroup=true
startsecs=0
autorestart=false
redirect_stderr={redirect}
[program:broken]
command={python} -m sglang.launch_server --port {port} --stub-fail
startsecs=3
startretries=0
autostart=false
"""


@pytest.fixture(scope="module")
def stub_python(tmp_path_factory):
    return make_stub_venv(tmp_path_factory.mktemp("stub") / "venv")


@pytest.fixture(params=["true", "false"], ids=["one log", "two logs"])
def supervised(request, stub_python, tmp_path, monkeypatch):
    """Factory: the adapter for a program of a supervisord that runs; and the port."""
    monkeypatch.setattr(readiness, "POLL_S", 0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    config = tmp_path / "supervisord.conf"
    config.write_text(CONFIG.format(d=tmp_path, python=stub_python, port=port, redirect=request.param))
    control = (str(BIN / "supervisorctl"), "-c", str(config))
    daemon = subprocess.Popen([BIN / "supervisord", "-c", config], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "supervisor.sock").exists():
        assert time.monotonic() < deadline and daemon.poll() is None
        time.sleep(0.1)
    connection = LocalConnection()

    def ask(op, **fields):
        return call_agent(connection, str(stub_python), {"op": op, "package": "sglang", **fields})

    def make(program="stub", **settings):
        host = ServiceHost("host", connection, ask, str(tmp_path), port)
        return make_service(ServiceSettings(kind="supervisor", program=program, control=control, **settings), host)

    yield make, port
    daemon.terminate()  # supervisord ends its programs
    daemon.wait(60)


def wait(service, port, **options):
    client = SglangClient(LocalConnection(), "127.0.0.1", port)
    return wait_ready(
        service,
        client,
        ["temperature"],
        Prompt("p", input_ids=(1,)),
        deadline_s=60,
        **{"started_after": 0.0, **options},
    )


def test_restart_stop_start(supervised):
    make, port = supervised
    service = make()
    first = wait(service, port)
    assert service.describe()["state"] == "RUNNING" and service.describe()["pid"] == first.pid
    marker, commit_time = service.log_marker(), time.time()
    service.restart()
    second = wait(service, port, started_after=commit_time)
    assert second.pid != first.pid and second.listener_verified
    assert not os.path.exists(f"/proc/{first.pid}")
    logged = service.log_since(marker)
    assert logged.count("stub: listening") == 1
    assert service.log_since().count("stub: listening") == 2
    service.stop()
    assert service.live() is None and "STOPPED" in service.failure()
    service.stop()  # a second time changes nothing
    service.start()
    third = wait(service, port, started_after=second.start_time)
    service.stop()
    service.restart()  # of what does not run is a start
    wait(service, port, started_after=third.start_time)


def test_what_fails_is_told(supervised):
    make, port = supervised
    with pytest.raises(UsageProblem, match="no program nonsense"):
        make("nonsense").live()
    make().stop()
    broken = make("broken")
    with pytest.raises(NotReady) as caught:
        broken.start()
    assert "broken" in caught.value.what
    with pytest.raises(NotReady) as caught:
        wait(broken, port)
    assert "does not start: broken is" in caught.value.what
    assert "no kernel image is available" in caught.value.detail


def test_no_supervisor(supervised, tmp_path):
    make, _ = supervised
    service = make()
    service.settings = ServiceSettings(kind="supervisor", program="stub", control=("/nowhere/supervisorctl",))
    with pytest.raises(NotReady) as caught:
        service.restart()
    assert "/nowhere/supervisorctl" in caught.value.what
