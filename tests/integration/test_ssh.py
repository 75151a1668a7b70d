"""Connections through a real sshd."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patcher.errors import AuthenticationProblem, HostKeyProblem, HostUnreachable, UsageProblem
from patcher.hosts import HostSettings
from patcher.ssh.connection import Connection, connect
from patcher.wire.call import call_agent
from scripts.rig.sshd import Sshd
from tests.support.installations import Installation
from tests.support.ssh_keys import RunningAgent, new_key
from tests.support.web import Pages

Dial = Callable[..., Connection]


@pytest.fixture
def dial(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dial]:
    """Connect as the client configuration of a rig's sshd says, with more lines of ssh_config if given."""
    opened: list[Connection] = []
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)

    def start(server: Sshd, *, first: str = "", alias: str | None = None, **settings) -> Connection:
        # the first value that ssh_config gives counts, so more lines go in front
        config = server.home / f"config-{len(opened)}"
        lines = "".join(f"  {line.strip()}\n" for line in first.splitlines())
        config.write_text(f"Host {server.alias}\n{lines}" + server.ssh_config.read_text())
        monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(config))
        opened.append(connect(HostSettings(name="gpu", address=alias or server.alias, **settings)))
        return opened[-1]

    yield start
    for connection in opened:
        connection.close()


# ---------------------------------------------------------------- programs and ports


def test_what_a_program_leaves(sshd, dial: Dial):
    link = dial(sshd())
    done = link.run(["sh", "-c", 'cat; echo "$1" >&2; exit 3', "sh", "a 'b'; $HOME\n!"], input=b"in\r\n\0")
    assert (done.rc, done.stdout, done.stderr) == (3, b"in\r\n\0", b"a 'b'; $HOME\n!\n")
    assert link.run(["/no/such/program"]).rc == 127
    assert (link.name, link.round_trips) == ("gpu", 2)


def test_large_streams_on_all_sides(sshd, dial: Dial):
    script = "head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2; cat"
    done = dial(sshd()).run(["sh", "-c", script], input=b"x" * 3_000_000)
    assert (len(done.stdout), len(done.stderr)) == (6_000_000, 3_000_000)


def test_input_that_nobody_reads(sshd, dial: Dial):
    assert dial(sshd()).run(["true"], input=b"x" * 3_000_000).rc == 0


def test_a_signal_is_no_lost_connection(sshd, dial: Dial):
    link = dial(sshd())
    assert link.run(["sh", "-c", "kill -9 $$"]).rc < 0
    assert link.run(["true"]).rc == 0


def test_a_program_that_does_not_end(sshd, dial: Dial):
    with pytest.raises(HostUnreachable, match=r"within 0\.3 s"):
        dial(sshd()).run(["sleep", "3"], timeout=0.3)


def test_a_child_that_keeps_the_streams_open(sshd, dial: Dial):
    done = dial(sshd()).run(["sh", "-c", "sleep 600 & echo $!"])
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.rc == 0


def test_several_programs_at_once(sshd, dial: Dial):
    link = dial(sshd())
    found: dict[int, bytes] = {}

    def echo(number: int) -> None:
        found[number] = link.run(["echo", str(number)]).stdout

    threads = [threading.Thread(target=echo, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: b"%d\n" % n for n in range(8)}


@pytest.mark.parametrize("path", ["/large", "/close", "/chunks"])
def test_http_through_the_connection(sshd, dial: Dial, path: str):
    link = dial(sshd())
    with Pages() as pages:
        for _ in range(2):
            web = http.client.HTTPConnection("127.0.0.1", pages.port)
            web.sock = link.open_socket("127.0.0.1", pages.port)
            web.request("GET", path)
            assert web.getresponse().read() == pages.large
            web.close()
    with pytest.raises(ConnectionRefusedError):
        link.open_socket("127.0.0.1", pages.port)
    assert link.round_trips == 0


def test_forwarding_that_is_forbidden(sshd, dial: Dial):
    with Pages() as pages, pytest.raises(HostUnreachable, match="forbids forwarding"):
        dial(sshd(extra="AllowTcpForwarding no")).open_socket("127.0.0.1", pages.port)


def test_noise_of_the_login(sshd, dial: Dial, tmp_path: Path):
    banner = tmp_path / "banner"
    banner.write_text("<<ddtree-agent>> Authorised use only\n")
    noise = 'ForceCommand echo "last login: never"; echo noise >&2; eval "$SSH_ORIGINAL_COMMAND"; echo bye'
    link = dial(sshd(extra=f"Banner {banner}\n{noise}"))
    host = Installation.tree(tmp_path / "tree")
    host.connection = link
    host.commit("ddtree")
    assert host.is_stage("ddtree")


# ---------------------------------------------------------------- host keys


def test_an_unknown_host_key_is_never_added(sshd, dial: Dial):
    server = sshd()
    server.known_hosts.write_text("")
    with pytest.raises(HostKeyProblem, match="not known") as failure:
        dial(server)
    assert failure.value.exit_code == 3
    assert f"ssh-keyscan -p {server.port} 127.0.0.1 >> {server.known_hosts}" in failure.value.next_step
    shown = subprocess.run(["ssh-keygen", "-lf", str(server.host_key)], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[1] in failure.value.detail
    assert server.known_hosts.read_text() == ""
    command = failure.value.next_step.split("then: ")[1]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    assert dial(server).run(["true"]).rc == 0


def test_a_changed_host_key(sshd, dial: Dial, tmp_path: Path):
    server = sshd()
    public = new_key(tmp_path / "other").with_suffix(".pub").read_text()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public}")
    before = server.known_hosts.read_text()
    with pytest.raises(HostKeyProblem, match="changed") as failure:
        dial(server)
    assert server.known_hosts.read_text() == before
    command = failure.value.next_step.split(": ", 1)[1]
    assert command.startswith(f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {server.known_hosts} && ")
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    assert dial(server).run(["true"]).rc == 0


def test_hashed_entries(sshd, dial: Dial):
    server = sshd()
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(server.known_hosts)], check=True, capture_output=True)
    assert "127.0.0.1" not in server.known_hosts.read_text()
    assert dial(server).run(["true"]).rc == 0


def test_the_entry_of_another_port_does_not_count(sshd, dial: Dial):
    server = sshd()
    server.known_hosts.write_text(server.known_hosts.read_text().replace(str(server.port), "4"))
    with pytest.raises(HostKeyProblem, match="not known"):
        dial(server)


def test_the_same_key_under_the_plain_name_counts_as_for_ssh(sshd, dial: Dial):
    server = sshd()
    server.known_hosts.write_text("127.0.0.1 " + server.known_hosts.read_text().split(" ", 1)[1])
    assert subprocess.run(["ssh", "-F", server.ssh_config, server.alias, "true"], check=False).returncode == 0
    assert dial(server).run(["true"]).rc == 0


def test_patterns(sshd, dial: Dial):
    server = sshd()
    key = server.known_hosts.read_text().split(" ", 1)[1]
    server.known_hosts.write_text(f"!127.0.0.1,[127.*]:{server.port} {key}")
    assert dial(server).run(["true"]).rc == 0


def test_an_alias_for_the_host_key(sshd, dial: Dial):
    server = sshd()
    server.known_hosts.write_text("the-gpu " + server.known_hosts.read_text().split(" ", 1)[1])
    assert dial(server, first="HostKeyAlias the-gpu").run(["true"]).rc == 0
    server.known_hosts.write_text("")
    with pytest.raises(HostKeyProblem) as failure:
        dial(server, first="HostKeyAlias the-gpu")
    subprocess.run(["sh", "-c", failure.value.next_step.split("then: ")[1]], check=True, capture_output=True)
    assert dial(server, first="HostKeyAlias the-gpu").run(["true"]).rc == 0


def test_a_revoked_key(sshd, dial: Dial):
    server = sshd()
    line = server.known_hosts.read_text()
    server.known_hosts.write_text(f"{line}@revoked {line}")
    with pytest.raises(HostKeyProblem, match="revokes"):
        dial(server)


def test_a_server_with_several_keys_shows_the_known_one(sshd, dial: Dial, tmp_path: Path):
    key = new_key(tmp_path / "rsa_host", "rsa")
    server = sshd(extra=f"HostKey {key}")
    public = key.with_suffix(".pub").read_text()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public}")
    assert dial(server).run(["true"]).rc == 0


def test_a_key_of_another_type(sshd, dial: Dial, tmp_path: Path):
    server = sshd()
    public = new_key(tmp_path / "rsa", "rsa").with_suffix(".pub").read_text()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public}")
    with pytest.raises(HostKeyProblem, match=r"\(ssh-rsa\), but not the ssh-ed25519 key"):
        dial(server)


# ---------------------------------------------------------------- keys of the user


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dial: Dial) -> Iterator[Callable[..., None]]:
    """A key agent; call it with a key, and its passphrase, to add that."""
    running = RunningAgent(tmp_path)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(running.socket))
    yield running.add
    running.stop()


def test_an_agent_with_many_keys(sshd, dial: Dial, agent, tmp_path: Path):
    """Three attempts only: the keys that the configuration names go first, and alone under IdentitiesOnly."""
    for number in range(8):
        agent(new_key(tmp_path / f"key{number}"))
    server = sshd(extra="MaxAuthTries 3")
    assert dial(server).run(["true"]).rc == 0
    assert dial(server, first="IdentitiesOnly no").run(["true"]).rc == 0
    agent(server.client_key)
    (server.home / "client_key").rename(server.home / "kept_elsewhere")  # only the public half is on disk
    assert dial(server).run(["true"]).rc == 0


def test_too_many_keys_are_told(sshd, dial: Dial, agent, tmp_path: Path):
    for number in range(8):
        agent(new_key(tmp_path / f"key{number}"))
    server = sshd(extra="MaxAuthTries 3")
    (server.home / "client_key").unlink()
    (server.home / "client_key.pub").rename(server.home / "authorized")
    with pytest.raises(AuthenticationProblem) as failure:
        dial(server, first="IdentitiesOnly no")
    assert "IdentitiesOnly" in failure.value.next_step
    assert failure.value.exit_code == 3


def test_an_encrypted_key_without_a_terminal(sshd, dial: Dial, agent):
    server = sshd()
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(server.client_key)],
        check=True,
        capture_output=True,
    )
    with pytest.raises(AuthenticationProblem) as failure:
        dial(server)
    assert failure.value.next_step == f"unlock the key in an agent first: ssh-add {server.client_key}"
    agent(server.client_key, "secret")
    assert dial(server).run(["true"]).rc == 0


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_other_kinds_of_keys(sshd, dial: Dial, tmp_path: Path, kind: str):
    server = sshd()
    key = new_key(tmp_path / kind, kind)
    shutil.copy(key.with_suffix(".pub"), server.home / "client_key.pub")
    assert dial(server, first=f"IdentityFile {key}").run(["true"]).rc == 0


def test_a_stranger(sshd, dial: Dial, tmp_path: Path):
    server = sshd()
    key = new_key(tmp_path / "stranger")
    shutil.copy(key, server.client_key)
    with pytest.raises(AuthenticationProblem, match="refuses") as failure:
        dial(server)
    assert str(server.client_key) in failure.value.detail


def test_no_key_at_all(sshd, dial: Dial):
    server = sshd()
    server.client_key.unlink()
    with pytest.raises(AuthenticationProblem, match="no key to offer"):
        dial(server)


def test_an_agent_that_is_gone(sshd, dial: Dial, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "none"))
    server = sshd()
    assert dial(server).run(["true"]).rc == 0
    server.client_key.unlink()
    with pytest.raises(AuthenticationProblem) as failure:
        dial(server)
    assert "does not answer" in failure.value.detail


# ---------------------------------------------------------------- ways to the host


def test_two_jumps(sshd, dial: Dial):
    outer, inner, goal = sshd(alias="outer"), sshd(alias="inner", address="127.0.0.2"), sshd(alias="goal")
    goal.ssh_config.write_text("".join(server.ssh_config.read_text() for server in (goal, inner, outer)))
    link = dial(goal, first="ProxyJump outer,inner")
    done = link.run(["sh", "-c", "echo $SSH_CONNECTION"])
    assert done.stdout.split()[3] == str(goal.port).encode()
    assert b"127.0.0.1" in done.stdout
    with Pages() as pages:
        web = http.client.HTTPConnection("127.0.0.1", pages.port)
        web.sock = link.open_socket("127.0.0.1", pages.port)
        web.request("GET", "/chunks")
        assert web.getresponse().read() == pages.large
    assert "Accepted publickey" in outer.log.read_text() and "Accepted publickey" in inner.log.read_text()
    inner.known_hosts.write_text("")
    with pytest.raises(HostKeyProblem) as failure:  # a jump is checked as any other host
        dial(goal, first="ProxyJump outer,inner")
    assert failure.value.where == "inner"


def test_a_jump_that_cannot_reach_the_host(sshd, dial: Dial):
    outer, goal = sshd(alias="outer"), sshd(alias="goal")
    goal.ssh_config.write_text(goal.ssh_config.read_text() + outer.ssh_config.read_text())
    goal.stop()
    with pytest.raises(HostUnreachable, match=str(goal.port)):
        dial(goal, first="ProxyJump outer")


def write_relay(folder: Path) -> Path:
    """A program for ProxyCommand: HOST PORT [BYTES]; it ends after so many bytes upwards."""
    relay = folder / "relay.py"
    relay.write_text("""
import os, socket, sys, threading
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
left = int(sys.argv[3]) if len(sys.argv) > 3 else sys.maxsize
def up():
    global left
    while data := os.read(0, min(left, 65536)):
        link.sendall(data)
        left -= len(data)
    os._exit(0)
threading.Thread(target=up, daemon=True).start()
while data := link.recv(65536): os.write(1, data)
""")
    return relay


def test_a_proxy_command(sshd, dial: Dial, tmp_path: Path):
    server, relay = sshd(), write_relay(tmp_path)
    link = dial(
        server,
        first=f"HostName elsewhere.invalid\nHostKeyAlias [127.0.0.1]:{server.port}\n"
        f"ProxyCommand python3 {relay} 127.0.0.1 %p 2>&1",
    )
    assert len(link.run(["head", "-c", "3000000", "/dev/zero"]).stdout) == 3_000_000
    with pytest.raises(HostUnreachable, match="no SSH server answers"):
        dial(server, first="ProxyCommand false")


def test_a_host_that_does_not_answer_leaves_no_trace_on_the_terminal(tmp_path: Path):
    code = (
        "from patcher.hosts import HostSettings; from patcher.ssh.connection import connect\n"
        "try: connect(HostSettings(name='gpu', address='gpu'))\nexcept Exception as error: print(error)"
    )
    with Pages() as pages:
        (tmp_path / "config").write_text(f"Host gpu\n HostName 127.0.0.1\n Port {pages.port}\n")
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "DDTREE_PATCH_SSH_CONFIG": str(tmp_path / "config")},
        )
    assert "no SSH server answers" in done.stdout
    assert done.stderr == ""


def test_hosts_that_do_not_answer(sshd, dial: Dial):
    server = sshd()
    with pytest.raises(HostUnreachable, match="no address"):
        dial(server, first="HostName no-such-host.invalid")
    server.stop()
    with pytest.raises(HostUnreachable, match="refused") as failure:
        dial(server)
    assert failure.value.exit_code == 3
    with Pages() as pages, pytest.raises(HostUnreachable, match="no SSH server answers"):
        dial(server, first=f"Port {pages.port}\nConnectTimeout 3")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(HostUnreachable, match="nothing came"):
        dial(server, first=f"Port {silent.getsockname()[1]}\nConnectTimeout 1")
    with pytest.raises(UsageProblem):
        dial(server, alias="-oProxyCommand=true")


# ---------------------------------------------------------------- connections that break


def test_a_connection_lost_during_the_commit(sshd, dial: Dial, tmp_path: Path):
    """The agent is at its import check when sshd goes: it finishes what it began."""
    host = Installation.in_venv(tmp_path / "venv")
    started, go = tmp_path / "started", tmp_path / "go"
    (host.site / "slow.py").write_text(
        "import pathlib, time\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n"
    )
    server = sshd()
    link = dial(server)

    def hang_up() -> None:
        while not started.exists():
            time.sleep(0.02)
        server.stop()

    thread = threading.Thread(target=hang_up)
    thread.start()
    with pytest.raises(HostUnreachable, match="lost"):
        call_agent(
            link,
            host.python,
            {"op": "commit", "package": "sglang", "site_packages": None, **host.request("ddtree"), "imports": ["slow"]},
        )
    thread.join()
    assert host.ask("inspect")["lock"] is not None
    go.touch()
    while host.ask("inspect")["lock"]:
        time.sleep(0.05)
    look = host.ask("inspect")
    assert (look["receipt"]["stage"], look["receipt_state"]) == ("ddtree", "valid")
    assert host.is_stage("ddtree")
    assert host.leftovers() == []


def test_a_connection_lost_during_the_upload(sshd, dial: Dial, tmp_path: Path):
    host = Installation.tree(tmp_path / "tree")
    link = dial(sshd(), first=f"ProxyCommand python3 {write_relay(tmp_path)} %h %p 100000")
    request = host.request("ddtree")
    with pytest.raises(HostUnreachable):
        call_agent(
            link,
            host.python,
            {
                "op": "commit",
                "package": "sglang",
                "site_packages": str(host.site),
                **request,
                "padding": os.urandom(200_000).hex(),
            },
        )
    assert host.is_stage("pristine")
    assert not host.state.exists()
    assert host.ask("recover")["recovered"] == "nothing"


def test_the_whole_way_over_ssh(sshd, dial: Dial, tmp_path: Path):
    host = Installation.in_venv(tmp_path / "venv")
    before = host.snapshot()
    host.connection = dial(sshd())
    host.ask("inspect")
    host.commit("ddtree")
    host.commit("temperature")
    host.commit("pristine")
    assert host.snapshot() == before
    assert host.connection.round_trips == 4  # one a request
