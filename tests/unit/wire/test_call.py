"""What is sent to a host: the modules of the agent that an operation needs, and no others."""

from __future__ import annotations

import sys
import zlib

import pytest

from patcher.agent.operations import ON_A_SITE, ON_THE_HOST
from patcher.errors import BadAnswer, NoInstallation
from patcher.ssh.connection import Completed, LocalConnection
from patcher.wire import call
from patcher.wire.call import call_agent


class Recorded(LocalConnection):
    """This machine; keeps the program that was sent to it."""

    def _run(self, argv, input, timeout, on_stderr):
        self.program = zlib.decompress(input[: int(argv[4])]).decode()
        return super()._run(argv, input, timeout, on_stderr)

    def was_sent(self, module: str) -> bool:
        return f"'{module}': " in self.program


@pytest.mark.parametrize("op", sorted(ON_A_SITE))
def test_an_operation_on_an_installation_is_sent_all_that_it_imports(op, tmp_path):
    host = Recorded("here")
    with pytest.raises(NoInstallation, match="there is no sglang here"):  # its modules are imported before that is seen
        call_agent(host, sys.executable, {"op": op, "site_packages": str(tmp_path)})
    assert host.was_sent("journal")
    assert host.was_sent("commit") == (op == "commit")


@pytest.mark.parametrize("op", sorted(ON_THE_HOST))
def test_an_operation_on_the_host_is_sent_nothing_that_changes_files(op):
    host = Recorded("here")
    assert call_agent(host, sys.executable, {"op": op})
    assert not host.was_sent("journal") and not host.was_sent("commit")


@pytest.mark.parametrize(
    "damaged", [lambda data: data[:-5], lambda data: b"{}", lambda data: data[:1] + b"?" + data[2:]]
)
def test_a_reply_that_does_not_unpack_is_refused(damaged, monkeypatch):
    monkeypatch.setattr(call.secrets, "token_hex", lambda size: "n")

    class Liar(LocalConnection):
        def _run(self, argv, input, timeout, on_stderr):
            data = damaged(zlib.compress(b'{"recovered": "nothing"}'))
            return Completed(0, b"<<ddtree-agent n %d>>\n%s\n" % (len(data), data), b"")

    with pytest.raises(BadAnswer):
        call_agent(Liar("liar"), "python3", {"op": "inspect"})


def test_a_reply_that_unpacks_to_more_than_is_taken_is_refused(monkeypatch):
    monkeypatch.setattr(call.secrets, "token_hex", lambda size: "n")
    monkeypatch.setattr(call, "MAX_REPLY", 1000)

    class Bomb(LocalConnection):
        def _run(self, argv, input, timeout, on_stderr):
            data = zlib.compress(b'{"left": "' + b"x" * 5000 + b'"}')
            return Completed(0, b"<<ddtree-agent n %d>>\n%s\n" % (len(data), data), b"")

    with pytest.raises(BadAnswer, match="too long"):
        call_agent(Bomb("bomb"), "python3", {"op": "inspect"})
