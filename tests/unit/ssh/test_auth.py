"""Servers that want no key, or take none: OpenSSH is not easily made to, so the server is paramiko's own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from patcher.errors import AuthenticationProblem
from patcher.ssh.auth import authenticate
from patcher.ssh.config import SshTarget


class StandInServer(paramiko.ServerInterface):
    """Lets everyone in who asks without a key, if `open`; takes nothing else, and says that it takes `methods`."""

    def __init__(self, methods: str, open: bool) -> None:
        self.methods, self.open = methods, open

    def get_allowed_auths(self, username: str) -> str:
        return self.methods

    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL if self.open else paramiko.AUTH_FAILED

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_FAILED


@pytest.fixture
def transport_to() -> Iterator[Callable[..., paramiko.Transport]]:
    ends: list[paramiko.Transport] = []

    def start(methods: str, open: bool = False) -> paramiko.Transport:
        ours, theirs = socket.socketpair()
        server = paramiko.Transport(theirs)
        server.add_server_key(paramiko.ECDSAKey.generate())
        ends.append(server)
        threading.Thread(
            target=server.start_server, kwargs={"server": StandInServer(methods, open)}, daemon=True
        ).start()
        ends.append(paramiko.Transport(ours))
        ends[-1].start_client(timeout=30)
        return ends[-1]

    yield start
    for end in ends:
        end.close()


def target(*keys: Path) -> SshTarget:
    return SshTarget("gpu", "127.0.0.1", 22, "root", identity_files=keys, identities_only=True)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    paramiko.ECDSAKey.generate().write_private_key_file(str(path))
    return path


@pytest.mark.parametrize("with_key", [False, True])
def test_no_key_is_wanted(transport_to, key, with_key):
    transport = transport_to("publickey", open=True)
    authenticate(transport, target(*([key] if with_key else [])))
    assert transport.is_authenticated()


@pytest.mark.parametrize("with_key", [False, True])
def test_only_passwords_are_taken(transport_to, key, with_key):
    with pytest.raises(AuthenticationProblem) as failure:
        authenticate(transport_to("password"), target(*([key] if with_key else [])))
    assert "takes no keys for root, only password" in failure.value.what


def test_the_key_is_refused(transport_to, key):
    with pytest.raises(AuthenticationProblem) as failure:
        authenticate(transport_to("publickey"), target(key))
    assert "refuses root with 1 keys" in failure.value.what
