"""Running programs on this machine, and what both kinds of connection promise."""

from __future__ import annotations

import http.client
import os
import signal
from pathlib import Path

import pytest

from patcher.errors import AuthenticationProblem, HostUnreachable
from patcher.hosts import HostSettings
from patcher.ssh.connection import LocalConnection, connect
from tests.support.web import Pages


@pytest.fixture
def local() -> LocalConnection:
    return LocalConnection()


def test_what_a_program_leaves(local: LocalConnection):
    done = local.run(["sh", "-c", 'cat; echo "$1" >&2; exit 3', "sh", "a b; $HOME"], input=b"in\r\n\0")
    assert (done.rc, done.stdout, done.stderr) == (3, b"in\r\n\0", b"a b; $HOME\n")
    assert local.round_trips == 1


def test_large_streams_on_all_sides(local: LocalConnection):
    script = "head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2; cat"
    done = local.run(["sh", "-c", script], input=b"x" * 3_000_000)
    assert (len(done.stdout), len(done.stderr)) == (6_000_000, 3_000_000)


def test_input_that_nobody_reads(local: LocalConnection):
    assert local.run(["true"], input=b"x" * 3_000_000).rc == 0


def test_standard_error_as_it_comes(local: LocalConnection):
    pieces: list[bytes] = []
    local.run(["sh", "-c", "echo one >&2; echo two >&2"], on_stderr=pieces.append)
    assert b"".join(pieces) == b"one\ntwo\n"


def test_programs_that_are_not_there(local: LocalConnection, tmp_path: Path):
    assert local.run(["/no/such/program"]).rc == 127
    (tmp_path / "plain").write_text("")
    assert local.run([str(tmp_path / "plain")]).rc == 126


def test_a_signal(local: LocalConnection):
    assert local.run(["sh", "-c", "kill -9 $$"]).rc == -signal.SIGKILL


def test_a_program_that_does_not_end(local: LocalConnection):
    with pytest.raises(HostUnreachable, match=r"within 0\.2 s"):
        local.run(["sleep", "600"], timeout=0.2)


def test_a_child_that_keeps_the_streams_open(local: LocalConnection):
    done = local.run(["sh", "-c", "sleep 600 & echo $!"])
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.rc == 0


def test_http(local: LocalConnection):
    with Pages() as pages:
        link = http.client.HTTPConnection("127.0.0.1", pages.port)
        link.sock = local.open_socket("127.0.0.1", pages.port)
        link.request("GET", "/large")
        assert link.getresponse().read() == pages.large
    with pytest.raises(ConnectionRefusedError):
        local.open_socket("127.0.0.1", pages.port)


@pytest.fixture
def sudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sudo that lets one interpreter through, as sudoers would say NOPASSWD for it alone."""
    stand_in = tmp_path / "sudo"
    stand_in.write_text(
        '#!/bin/sh\n[ "$1 $2" = "-n --" ] || exit 99\nshift 2\n'
        'case "$1" in */allowed) shift; exec "$@";; esac\n'
        'echo "sudo: a password is required" >&2\nexit 1\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return stand_in


def test_sudo(sudo: Path):
    with connect(HostSettings(name="here", local=True, sudo=True)) as local:
        assert local.run(["/venv/allowed", "echo", "hi"]).stdout == b"hi\n"
        with pytest.raises(AuthenticationProblem, match="without a password") as failure:
            local.run(["/usr/bin/python3"])
    assert "NOPASSWD: /usr/bin/python3" in failure.value.next_step
    assert failure.value.exit_code == 3
    assert failure.value.where == "here"


def test_a_program_that_fails_under_sudo_is_no_refusal(sudo: Path):
    done = LocalConnection(sudo=True).run(["/venv/allowed", "sh", "-c", "echo oops >&2; exit 1"])
    assert (done.rc, done.stderr) == (1, b"oops\n")
