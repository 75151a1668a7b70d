"""A machine that takes connections and then says nothing: what the operator reads, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from patcher.errors import HostUnreachable
from patcher.ssh.auth import authenticate
from patcher.ssh.config import SshTarget
from patcher.ssh.connection import SshConnection
from tests.support.builders import make_package, make_series
from tests.support.command_line import said_by, start_tool


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Takes connections (the kernel does), and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def target(listener: socket.socket, **settings: object) -> SshTarget:
    return SshTarget("gpu", "127.0.0.1", listener.getsockname()[1], "root", connect_timeout=0.5, **settings)


def reads(failure: HostUnreachable, awaited: str) -> bool:
    """Whether it says what was waited for, how long, and what to do."""
    assert type(failure) is HostUnreachable and failure.where == "gpu"
    return (
        re.search(rf"127.0.0.1:\d+ took the connection, .* waited 0.5 s for {awaited}", failure.what) is not None
        and "`ssh -v gpu true`" in failure.next_step
        and "ConnectTimeout" in failure.next_step
    )


def test_no_first_line(silent):
    with pytest.raises(HostUnreachable) as failed:
        SshConnection(target(silent))
    assert reads(failed.value, "the first line of its SSH server")


def test_no_key_exchange(silent):
    def greet() -> None:
        link, _ = silent.accept()
        with link:
            link.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            while link.recv(1 << 16):
                pass

    threading.Thread(target=greet, daemon=True).start()
    with pytest.raises(HostUnreachable) as failed:
        SshConnection(target(silent))
    assert reads(failed.value, "the key exchange")


class Sleeping(paramiko.ServerInterface):
    """Falls asleep when it is asked for `what`, and says yes to all before. OpenSSH is not easily made to."""

    def __init__(self, what: str) -> None:
        self.what, self.awake = what, threading.Event()

    def _answer(self, what: str, yes: int) -> int:
        if what == self.what:
            self.awake.wait(60)
        return yes

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return self._answer("login", paramiko.AUTH_SUCCESSFUL)

    def check_auth_none(self, username: str) -> int:
        return self._answer("login", paramiko.AUTH_SUCCESSFUL)

    def check_channel_request(self, kind: str, number: int) -> int:
        return self._answer("session", paramiko.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        return bool(self._answer("program", True))


@pytest.fixture
def served(silent: socket.socket) -> Iterator[Callable[[Sleeping], paramiko.PKey]]:
    """Serves one connection with a Sleeping; gives the host's key."""
    ends: list[tuple[Sleeping, paramiko.Transport]] = []

    def start(sleeping: Sleeping) -> paramiko.PKey:
        key = paramiko.ECDSAKey.generate()

        def serve() -> None:
            server = paramiko.Transport(silent.accept()[0])
            ends.append((sleeping, server))
            server.add_server_key(key)
            server.start_server(server=sleeping)

        threading.Thread(target=serve, daemon=True).start()
        return key

    yield start
    for sleeping, server in ends:
        sleeping.awake.set()
        server.close()


@pytest.mark.parametrize("with_key", [True, False])
def test_no_answer_to_the_login(silent, served, tmp_path, with_key):
    """As where a name service behind sshd hangs."""
    served(Sleeping("login"))
    key = tmp_path / "key"
    paramiko.ECDSAKey.generate().write_private_key_file(str(key))
    with contextlib.closing(paramiko.Transport(socket.create_connection(silent.getsockname()))) as client:
        client.start_client(timeout=60)
        client.auth_timeout = 0.5
        with pytest.raises(HostUnreachable) as failed:
            authenticate(client, target(silent, identity_files=(key,) if with_key else (), identities_only=True))
    assert reads(failed.value, "an answer to the login of root")


@pytest.mark.parametrize(
    ("what", "awaited"), [("session", "a channel, after the login"), ("program", "a program to start")]
)
def test_no_answer_after_the_login(silent, served, tmp_path, what, awaited):
    key = served(Sleeping(what))
    (tmp_path / "known_hosts").write_text(
        f"[127.0.0.1]:{silent.getsockname()[1]} {key.get_name()} {key.get_base64()}\n"
    )
    patient = dataclasses.replace(
        target(silent, known_hosts=(tmp_path / "known_hosts",), identities_only=True), connect_timeout=60
    )
    with SshConnection(patient) as connection:
        connection.target = target(silent)
        with pytest.raises(HostUnreachable) as failed:
            connection.run(["true"])
    assert reads(failed.value, awaited)


@pytest.fixture
def hosts(silent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """hosts.toml with `tree`, a tree of this machine, and `hung`, which hangs for as long as one waits."""
    make_series(tmp_path / "series/sglang-0.5.11")
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(tmp_path / "series"))
    (tmp_path / "ssh_config").write_text(
        f"Host hung\n HostName 127.0.0.1\n Port {silent.getsockname()[1]}\n ConnectTimeout 3600\n"
    )
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(tmp_path / "ssh_config"))
    config = tmp_path / "hosts.toml"
    config.write_text(
        f'[hosts.tree]\nlocal = true\nsite_packages = "{make_package(tmp_path / "site-packages")}"\n[hosts.hung]\n'
    )
    return config


def read_to(program: subprocess.Popen, words: str) -> None:
    """Read its messages to the line with these words, which must come."""
    while words not in (line := program.stderr.readline()):
        assert line, program.wait()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_twice_ends_at_once_with_130_and_the_list(hosts, by):
    """The first lets the hosts end what they are at, the second waits for nothing; each host is in the list. So does a
    supervisor that ends the program, and a terminal that is closed."""
    # What started these tests may ignore signals, as a shell does for what it runs in the background; it is inherited.
    program = start_tool(
        "apply",
        "--config",
        hosts,
        "--host",
        "tree",
        "--host",
        "hung",
        "--json",
        around=("env", "--default-signal=INT,TERM,HUP"),
    )
    connecting = seen = False
    while not (connecting and seen):
        line = program.stderr.readline()
        assert line, program.wait()
        connecting |= line == "hung: connect\n"
        seen |= line == "tree: plan\n"
    program.send_signal(by)
    read_to(program, "Ctrl-C again stops at once")
    time.sleep(1)  # signals that come together count once
    program.send_signal(by)
    said = said_by(program)
    assert said.code == 130 and said.json["exit_code"] == 130 and "0 of 2 hosts" in said.error["what"], said.stderr
    tree, hung = said.json["hosts"]
    assert hung["error"]["exit_code"] == 130 and "connect" in hung["error"]["what"]
    assert tree["error"]["exit_code"] == 130 and tree["installation"]["version"] == "0.5.11"
    assert "ddtree-patch status" in said.stderr


def test_what_ignores_a_closed_terminal_goes_on(hosts):
    program = start_tool(
        "list",
        "--config",
        hosts,
        "--host",
        "hung",
        "--json",
        around=("env", "--default-signal=TERM", "--ignore-signal=HUP"),
    )
    read_to(program, "hung: connect")
    program.send_signal(signal.SIGHUP)
    program.send_signal(signal.SIGTERM)
    read_to(program, "Ctrl-C again stops at once")
    time.sleep(1)
    program.send_signal(signal.SIGTERM)
    assert said_by(program).code == 130


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_come_together_are_one(hosts, by):
    """As from timeout(1), or from a terminal that is closed: what a host is at is still waited for."""
    program = start_tool(
        "apply", "--config", hosts, "--host", "hung", "--json", around=("env", "--default-signal=INT,TERM,HUP")
    )
    read_to(program, "hung: connect")
    program.send_signal(by)
    program.send_signal(by)
    read_to(program, "Ctrl-C again stops at once")
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(2)
    program.send_signal(by)
    said = said_by(program)
    assert said.code == 130 and [host["host"] for host in said.json["hosts"]] == ["hung"]


def test_an_interrupt_before_the_command_line_could_see_to_it_is_one_document_too():
    source = (
        "import sys, patcher.cli\n"
        "def interrupted(): raise KeyboardInterrupt\n"
        "patcher.cli.main = interrupted\n"
        "from patcher.__main__ import run\n"
        "sys.exit(run())"
    )
    done = subprocess.run([sys.executable, "-c", source, "list", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and "error: stopped" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 130
