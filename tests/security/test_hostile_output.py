"""What a host prints reaches the operator's memory bounded, his terminal and reports without control characters."""

from __future__ import annotations

import http.server
import io
import json
import threading
import xml.etree.ElementTree as ET

import pytest

from patcher.commands.findings import Differs, Done, Smoked, State
from patcher.errors import BadAnswer, HostUnreachable, RollbackFailed
from patcher.plan.states import FileState
from patcher.report.findings import Facts
from patcher.report.junit import to_junit
from patcher.report.outcome import HostResult, Outcome
from patcher.report.progress import Progress
from patcher.report.render import console_for, print_error, print_outcome, to_json
from patcher.server import client
from patcher.server.client import ServerBroke, SglangClient
from patcher.smoke.result import Check, SmokeResult
from patcher.ssh import connection, streams
from patcher.ssh.connection import LocalConnection
from patcher.wire.call import call_agent
from patcher.wire.types import HistoryLine

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\x08\r\x00text"
FORBIDDEN = [c for c in ESCAPES if not c.isprintable()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Says(LocalConnection):
    """A host that prints the same whatever it is asked."""

    def __init__(self, script: str):
        super().__init__()
        self.script = script

    def _run(self, argv, input, timeout, on_stderr):
        return super()._run(["sh", "-c", self.script], input, timeout, on_stderr)


@pytest.mark.parametrize("script", ["yes", "yes >&2", "cat /dev/zero"])
def test_output_without_an_end_is_ended(monkeypatch, script):
    monkeypatch.setattr(streams, "LIMIT", 4 << 20)
    monkeypatch.setattr(connection, "LIMIT", 4 << 20)
    with pytest.raises(BadAnswer, match="printed more than 4 MiB"):
        call_agent(Says(script), "python3", {"op": "inspect"}, timeout=60)


@pytest.mark.parametrize("script", ["head -c 100000 /dev/urandom", "printf '\\033[2Jowned'", "exit 0"])
def test_output_that_is_no_reply(script):
    with pytest.raises(HostUnreachable) as caught:
        call_agent(Says(script), "python3", {"op": "inspect"}, timeout=60)
    assert not any(c in shown(caught.value) for c in FORBIDDEN)


def test_an_answer_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(client, "ANSWER_LIMIT", 1 << 20)

    class Endless(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * 65536)
            except OSError:
                pass

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(ServerBroke, match="more than 1 MiB"):
            SglangClient(LocalConnection(), "127.0.0.1", server.server_port).server_info(timeout=30)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b"[]",
        b"\xff",
        b'{"internal_states": 1}',
        b'{"internal_states": [1]}',
        b'{"internal_states": [{"ddtree_patch": []}]}',
        b'{"speculative_algorithm": []}',
    ],
)
def test_answers_of_another_form(monkeypatch, body):
    monkeypatch.setattr(SglangClient, "_request", lambda *arguments: body)
    with pytest.raises(ServerBroke):
        SglangClient(LocalConnection(), "127.0.0.1", 1).server_info()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"meta_info": 1},
        {"meta_info": {}, "output_ids": "12"},
        {"meta_info": {}, "output_ids": [{}]},
        {"meta_info": {}, "text": []},
        {"meta_info": {"completion_tokens": "many"}},
        {"meta_info": {"spec_verify_ct": []}},
    ],
)
def test_generations_of_another_form(monkeypatch, answer):
    monkeypatch.setattr(SglangClient, "_request", lambda *arguments: json.dumps(answer).encode())
    with pytest.raises(ServerBroke, match="makes no sense"):
        SglangClient(LocalConnection(), "127.0.0.1", 1).generate({}, timeout=1)


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_no_control_character_reaches_the_terminal(monkeypatch, stream):
    monkeypatch.setenv("TERM", "dumb")  # rich's own colours are escapes too
    out = stream()
    Progress(console_for(out)).for_host("h")(ESCAPES)
    for outcome in outcomes():
        print_outcome(outcome, console_for(out))
        print_error(outcome.hosts[0].error, console_for(out))
    said = out.getvalue()
    assert "text" in said and not any(c in said for c in FORBIDDEN)


def test_a_diff_is_made_visible_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    host = HostResult("h")
    host.keep(Differs(f"-{ESCAPES}\n+new\n"))
    print_outcome(Outcome("diff", (host,)), console_for(out))
    assert "\\x1b[2J" in out.getvalue() and not any(c in out.getvalue() for c in FORBIDDEN)


def test_no_control_character_reaches_a_report():
    for outcome in outcomes():
        for report in (to_json(outcome), to_junit(outcome).decode()):
            assert not any(c in report for c in FORBIDDEN)
        ET.fromstring(to_junit(outcome))


def outcomes() -> list[Outcome]:
    """Host text in every place that a host's text can come to."""
    error = RollbackFailed(ESCAPES, commands=[ESCAPES], where=ESCAPES, next_step=ESCAPES, detail=f"{ESCAPES}\n" * 3)
    host = HostResult("h", summary=ESCAPES, error=error, not_done=[ESCAPES])
    facts = Facts()
    facts.add(ESCAPES, ESCAPES)
    check = Check("answers", False, ESCAPES)
    for finding in (
        facts,
        Done((HistoryLine(event=ESCAPES, time=0.0, who=ESCAPES),)),
        State(ESCAPES, ESCAPES, (FileState(ESCAPES, ESCAPES, (ESCAPES,)),)),
        Smoked(SmokeResult(ESCAPES, (check,), ())),
    ):
        host.keep(finding)
    with host.step("look") as step:
        step.detail = ESCAPES
    without = HostResult("h", error=error)
    return [Outcome("status", (host,)), Outcome("status", (without,))]


def shown(error) -> str:
    out = io.StringIO()
    print_error(error, console_for(out))
    return out.getvalue()
