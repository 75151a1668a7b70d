"""Keys and passwords of the server stay on its command line and in its environment."""

from __future__ import annotations

import http.server
import threading

import pytest

from patcher.agent import server
from patcher.installation.find import describe_process, redacted, without_secrets
from patcher.report.junit import to_junit
from patcher.report.outcome import HostResult, Outcome
from patcher.report.render import to_json
from patcher.server.client import HttpStatus, ServerBroke, SglangClient
from patcher.ssh.connection import LocalConnection
from tests.support.builders import process

KEY = "sk-3cr3t-Value"


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key", "--ssl-keyfile-password"])
def test_command_lines_are_shown_without_them(flag):
    for argv in (["python", flag, KEY, "--tp", "2"], ["python", f"{flag}={KEY}", "--tp", "2"]):
        assert KEY not in " ".join(redacted(argv)) and "--tp 2" in " ".join(redacted(argv))
        assert KEY not in describe_process(process(1, argv=tuple(argv)))


@pytest.mark.parametrize(
    "line",
    [
        f"server_args=ServerArgs(model_path='m', api_key='{KEY}', tp_size=2)",
        f"api_key={KEY}, tp_size=2",
        f'admin_api_key="{KEY}", tp_size=2',
        f"python --api-key {KEY} --tp_size=2",
        f"--api-key={KEY} tp_size=2",
        f"Authorization: Bearer {KEY} tp_size=2",
        f"{{'authorization': 'Bearer {KEY}'}} tp_size=2",
        f"ssl_keyfile_password: '{KEY}' tp_size=2",
        f'{{"api_key": "{KEY}"}} tp_size=2',
    ],
)
def test_log_tails_are_shown_without_them(line):
    assert KEY not in without_secrets(line) and "tp_size=2" in without_secrets(line)


@pytest.mark.parametrize("status", [401, 200])
def test_a_server_that_repeats_the_key_it_was_sent(status):
    class Repeats(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(f"no: {self.headers['Authorization']}".encode())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Repeats)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises((HttpStatus, ServerBroke)) as caught:
            SglangClient(LocalConnection(), "127.0.0.1", server.server_port, KEY).server_info(timeout=30)
    finally:
        server.shutdown()
        server.server_close()
    outcome = Outcome("verify", (HostResult("h", error=caught.value),))
    assert KEY not in to_json(outcome) and KEY.encode() not in to_junit(outcome)


def test_the_remembered_environment_is_private_and_follows_no_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "state"
    victim.write_text("kept")
    folder.mkdir(mode=0o755)
    (folder / "service.env.new").symlink_to(victim)
    pid = server.os.getpid()
    ticks = server.read_stat(pid)[4]
    answer = server.remember({"pid": pid, "ticks": ticks, "env_file": str(folder / "service.env")})
    assert set(answer) == {"argv", "cwd", "uid", "gid", "umask"}  # and nothing of the environment
    assert victim.read_text() == "kept" and (folder / "service.env").stat().st_mode & 0o777 == 0o600


def test_what_runs_in_a_new_directory_of_logs_is_private(tmp_path):
    log = tmp_path / "state" / "logs" / "command.log"
    assert server.run({"argv": ["echo", KEY], "log": str(log)}) == {"rc": 0}
    assert log.stat().st_mode & 0o777 == 0o600 and log.parent.stat().st_mode & 0o077 == 0
