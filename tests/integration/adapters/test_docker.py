"""A container of a stand-in engine, steered by the real docker command where there is one, over the real sshd."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from fake_docker_engine import FakeDockerEngine
from served import Served, ssh

FAKE_DOCKER = [sys.executable, str(Path(__file__).with_name("fake_docker_engine.py"))]
DOCKER = shutil.which("docker")


@pytest.fixture
def serve(stub_host, tool, sshd, monkeypatch):
    """Factory: `serve(command)` -> Served, by the real docker command or the stand-in."""
    engine = FakeDockerEngine(
        stub_host.home,
        "sglang",
        [f"{stub_host.venv}/bin/python", "-m", "sglang.launch_server", "--port", str(stub_host.port)],
        stub_host.home,
    )
    engine.start()
    stub_host.wait_answer()
    login = sshd(alias="demo")
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(login.ssh_config))

    def make(command=(DOCKER,) if DOCKER else FAKE_DOCKER):
        control = json.dumps([*command, "--host", engine.address])
        return Served(
            stub_host,
            tool,
            "docker",
            {'container = "sglang"': f'container = "sglang"\ncontrol = {control}'},
            ssh(login.ssh_config),
        )

    yield make
    engine.close()


def test_there_and_back(serve):
    serve().there_and_back()


def test_status_knows_a_server_behind_a_published_port(serve, stub_host):
    served = serve()
    config = stub_host.config.read_text()
    assert f"port = {stub_host.port}" in config
    stub_host.config.write_text(config.replace(f"port = {stub_host.port}", "port = 1"))
    facts = served.run("status").host["facts"]
    assert "server" not in facts and any(name.startswith("server ") for name in facts), facts


@pytest.mark.long
def test_there_and_back_by_the_stand_in_command(serve):
    serve(FAKE_DOCKER).there_and_back()


@pytest.mark.long
def test_a_server_that_does_not_come_up_is_rolled_back(serve):
    said = serve().failed_readiness()
    assert "sglang is exited (exit code 1)" in said.error["what"]
    assert "no kernel image is available" in said.error["detail"]


@pytest.mark.long
def test_a_server_that_fails_the_smoke_suite_is_rolled_back(serve):
    serve().failed_smoke()


@pytest.mark.long
def test_a_rollback_that_fails_is_finished_by_hand(serve):
    serve().failed_rollback()


def test_a_container_that_is_not_there(serve):
    served = serve()
    config = served.stub.config
    config.write_text(config.read_text().replace('container = "sglang"', 'container = "nope"'))
    said = served.run("apply", code=2)
    assert "there is no container nope" in said.error["what"]
    assert served.stub.hashes() == served.before and served.serves(None)
