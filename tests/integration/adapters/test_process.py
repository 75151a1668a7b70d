"""A server that nothing supervises, over the real sshd."""

import pytest
from served import Served, ssh


@pytest.fixture
def served(stub_host, tool, sshd, monkeypatch):
    daemon = sshd(alias="demo")
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(daemon.ssh_config))
    stub_host.start_server()
    return Served(stub_host, tool, "process", {}, ssh(daemon.ssh_config))


@pytest.mark.long
def test_there_and_back(served):
    served.there_and_back()


@pytest.mark.long
def test_a_rollback_that_fails_is_finished_by_hand(served):
    """With the environment and the directory that the server had, which only the host knows."""
    served.failed_rollback()
