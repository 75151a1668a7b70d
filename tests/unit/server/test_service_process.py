"""The process adapter on real processes: a stub server, started by the test, is ended and started by the adapter."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from patcher.agent.server import left_behind
from patcher.errors import Locked, NotReady
from patcher.hosts import ServiceSettings
from patcher.server import readiness
from patcher.server.client import SglangClient
from patcher.server.readiness import wait_ready
from patcher.server.services.process import state_name
from patcher.server.services.registry import ServiceHost, make_service
from patcher.smoke.suite import Prompt
from patcher.ssh.connection import LocalConnection
from patcher.wire.call import call_agent
from tests.support.stub_venv import make_stub_venv

SECRET = "hunter2-hunter2"
PATCHED = {"--speculative-algorithm": "DDTREE", "--stub-mode": "samples"}


@pytest.fixture(scope="session")
def stub_python(tmp_path_factory):
    return make_stub_venv(tmp_path_factory.mktemp("stub") / "venv")


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Site:
    """The stub installation, its service, and what the test started on it."""

    def __init__(self, python, port, directory):
        self.python, self.port, self.directory = python, port, directory
        self.connection = LocalConnection()
        self.exchanged = []
        self.started = []
        self.state_dir = self.ask("inspect", paths=[])["state_dir"]

    def ask(self, op, **request):
        reply = call_agent(self.connection, str(self.python), {"op": op, "package": "sglang", **request})
        self.exchanged.append((op, request, reply))
        return reply

    def service(self, args=None, kind="process", **settings):
        host = ServiceHost("host", self.connection, self.ask, self.state_dir, self.port)
        return make_service(ServiceSettings(kind=kind, args=args or {}, **settings), host)

    def start(self, *flags):
        """Start a stub server as an operator would, in a session of its own."""
        log = self.directory / "by-hand.log"
        argv = [str(self.python), "-m", "sglang.launch_server", "--port", str(self.port), "--stub-mode=greedy", *flags]
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv,
                cwd=self.directory,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "STUB_SECRET": SECRET},
                umask=0o027,
            )
        self.started.append(process)
        return process

    def wait(self, service, started_after, deadline_s=60.0):
        client = SglangClient(self.connection, "127.0.0.1", self.port)
        return wait_ready(
            service,
            client,
            ["temperature", "top_k"],
            Prompt("p", input_ids=(1, 2)),
            deadline_s=deadline_s,
            started_after=started_after,
        )

    def info(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=10) as answer:
            return json.load(answer)

    def until(self, condition, seconds=30):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def let_go(self):
        """What was ended was ended long ago."""
        name = state_name(self.port)
        kept = self.ask("state", get=[name])["values"][name] or {}
        if "ended" in kept:
            self.ask("state", put={name: {**kept, "ended": {**kept["ended"], "since": 0}}})

    def clean_up(self):
        self.let_go()
        with contextlib.suppress(NotReady):
            self.service().stop()
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(readiness, "POLL_S", 0.3)


@pytest.fixture
def site(stub_python, port, tmp_path):
    site = Site(stub_python, port, tmp_path)
    site.ask("state", put={state_name(site.port): None})
    yield site
    site.clean_up()


def test_restart_and_back(site):
    by_hand = site.start()
    service = site.service(PATCHED)
    first = site.wait(service, 0.0)
    assert first.pid == by_hand.pid
    scheduler = [pid for pid in service.live()["tree"] if pid != by_hand.pid]
    assert len(scheduler) == 1
    marker, commit_time = service.log_marker(), time.time()

    service.restart(patched=True)
    second = site.wait(service, commit_time)
    assert second.pid != first.pid and second.start_time > commit_time and second.listener_verified
    assert not alive(by_hand.pid) and not alive(scheduler[0])
    live = service.live()
    assert live["argv"] == [
        str(site.python),
        "-m",
        "sglang.launch_server",
        "--port",
        str(site.port),
        "--stub-mode",
        "samples",
        "--speculative-algorithm",
        "DDTREE",
    ]
    info = site.info()
    assert info["speculative_algorithm"] == "DDTREE" and info["secret_is_set"]
    assert info["cwd"] == str(site.directory)
    assert os.getsid(live["pid"]) == live["pid"]
    assert os.readlink(f"/proc/{live['pid']}/fd/0") == "/dev/null"
    assert "Umask:\t0027" in Path(f"/proc/{live['pid']}/status").read_text()
    assert live["log"].startswith(f"{site.state_dir}/logs/server-")
    assert "stub: listening" in service.log_since(marker)
    assert stat.S_IMODE(os.stat(live["log"]).st_mode) == 0o600

    service = site.service(PATCHED)  # another command, on another day
    service.restart(patched=False)
    third = site.wait(service, second.start_time)
    assert third.pid not in (first.pid, second.pid)
    assert service.live()["argv"] == by_hand.args
    assert site.info()["speculative_algorithm"] is None and site.info()["secret_is_set"]
    assert service.live()["log"] != live["log"]


def test_the_environment_stays_on_the_host_in_a_private_file(site):
    site.start()
    service = site.service(PATCHED)
    site.wait(service, 0.0)
    service.restart()
    site.wait(service, 0.0)
    environment = Path(site.state_dir) / f"service-{site.port}.env"
    assert SECRET.encode() in environment.read_bytes()
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    assert len(site.exchanged) > 5
    assert SECRET not in json.dumps([site.exchanged, service.describe(), service.log_since()])


def test_start_when_the_server_is_dead(site):
    site.start()
    service = site.service(PATCHED)
    site.wait(service, 0.0)
    service.restart()
    running = site.wait(service, 0.0)
    service.settled()
    scheduler = next(pid for pid in service.live()["tree"] if pid != running.pid)
    os.kill(running.pid, signal.SIGKILL)
    site.until(lambda: not alive(running.pid))
    assert alive(scheduler)  # as SGLang's do
    service = site.service(PATCHED)
    assert service.live() is None
    assert "ended" in service.failure()
    service.restart(patched=False)
    assert not alive(scheduler)
    assert site.wait(service, running.start_time).pid != running.pid
    assert site.info()["secret_is_set"]


def test_a_server_that_was_stopped_is_missing_until_another_is_ready(site):
    by_hand = site.start()
    service = site.service(PATCHED)
    site.wait(service, 0.0)
    assert service.ended() is None
    service.stop()
    assert site.service(PATCHED).ended() == by_hand.args
    service.start()
    later = site.service(PATCHED)  # the one that was started need not come up
    site.wait(later, 0.0)
    later.restart()
    assert later.ended() == by_hand.args
    site.wait(later, 0.0)
    later.settled()
    assert site.service(PATCHED).ended() is None and site.info()["speculative_algorithm"] == "DDTREE"


def test_of_two_commands_one_starts_the_server(site):
    site.start()
    first, second = site.service(), site.service()
    site.wait(first, 0.0)
    assert second.ended() is None
    first.stop()
    with pytest.raises(Locked, match="a command began to restart the server"):
        second.restart()
    site.let_go()  # as if the first were slower than any command is
    second.restart()
    with pytest.raises(Locked, match="another command began"):
        first.start()


def test_a_server_whose_start_was_not_kept_any_more_does_not_become_the_original(site):
    by_hand = site.start()
    service = site.service(PATCHED)
    site.wait(service, 0.0)
    service.restart()
    name = state_name(site.port)
    kept = site.ask("state", get=[name])["values"][name]
    site.ask("state", put={name: {key: value for key, value in kept.items() if key != "running"}})
    later = site.service({"--speculative-algorithm": "STUB"})  # the flags were changed meanwhile
    site.wait(later, 0.0)
    later.restart(patched=False)
    site.wait(later, 0.0)
    assert later.live()["argv"] == by_hand.args


def test_a_port_that_somebody_else_holds_is_told_before_the_start(site, monkeypatch):
    monkeypatch.setattr("patcher.server.services.process.GRACE_S", 2.0)
    site.start()
    service = site.service()
    site.wait(service, 0.0)
    service.stop()
    with socket.create_server(("127.0.0.1", site.port)), pytest.raises(NotReady, match=f"process {os.getpid()}"):
        service.restart()


def test_a_patched_command_line_started_by_hand_does_not_become_the_original(site):
    by_hand = site.start()
    service = site.service(PATCHED)
    site.wait(service, 0.0)
    service.restart()
    site.wait(service, 0.0)
    patched = service.live()["argv"]
    service.stop()
    # An operator starts what `ps` had shown him.
    site.started.append(subprocess.Popen(patched, cwd=site.directory, start_new_session=True, stdin=subprocess.DEVNULL))
    service = site.service(PATCHED)
    site.wait(service, 0.0)
    service.restart(patched=False)
    site.wait(service, 0.0)
    assert service.live()["argv"] == by_hand.args


def test_no_server_was_ever_seen(site):
    with pytest.raises(NotReady) as caught:
        site.service().restart()
    assert "none was ever seen" in caught.value.what and caught.value.next_step


def test_a_server_that_dies_at_its_start_is_told_with_its_log(site):
    site.start()
    service = site.service({"--stub-fail": True})
    site.wait(service, 0.0)
    marker = service.log_marker()
    service.restart()
    with pytest.raises(NotReady) as caught:
        wait_ready(
            service,
            SglangClient(site.connection, "127.0.0.1", site.port),
            [],
            Prompt("p", text="x"),
            deadline_s=60,
            started_after=0.0,
            log_marker=marker,
        )
    assert "no kernel image is available" in caught.value.detail
    service.restart(patched=False)  # the rollback
    site.wait(service, 0.0)


def test_a_server_that_dies_at_its_first_sampled_request(site):
    site.start()
    service = site.service({"--stub-mode": "dies"})
    site.wait(service, 0.0)
    service.restart()
    with pytest.raises(NotReady) as caught:
        site.wait(service, 0.0)
    assert "died" in caught.value.what and "CUDA error" in caught.value.detail


def test_a_scheduler_left_behind_is_ended_and_bystanders_are_not(site):
    by_hand = site.start("--stub-orphan")
    service = site.service()
    site.wait(service, 0.0)
    scheduler = next(pid for pid in service.live()["tree"] if pid != by_hand.pid)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        service.stop()
        assert not alive(by_hand.pid) and not alive(scheduler)
        assert bystander.poll() is None
        assert service.live() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_two_servers_are_told_apart_by_their_ports(site, stub_python, tmp_path):
    site.start()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        other_port = listener.getsockname()[1]
    other = Site(stub_python, other_port, tmp_path)
    neighbour = other.start()
    try:
        service = site.service()
        site.wait(service, 0.0)
        other.until(lambda: other.service().live() is not None)
        service.stop()
        assert neighbour.poll() is None
    finally:
        neighbour.terminate()
        neighbour.wait()


def test_a_reused_process_id_is_not_signalled(site):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        host = site.service().host
        ticks = host.script("status", port=site.port, pid=victim.pid)["server"]["ticks"]
        host.script("stop", pid=victim.pid, ticks=ticks - 1, port=site.port, grace=2.0)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_only_a_session_that_a_launcher_led_is_taken_for_left_behind():
    stat = ("S", 1, 7, 7, 500)  # state, parent, group, session, start tick
    outsiders = {20: ("S", 0, 0, 0, 500), 21: ("S", 1, 1, 1, 500)}
    processes = {8: stat, 9: stat, **outsiders}
    assert left_behind(7, 400, processes) == [8, 9]
    assert left_behind(7, 600, processes) == []  # of an earlier session with that id
    assert left_behind(7, 400, {**processes, 7: stat}) == []  # the id is another process's now
    # Session 0 is whatever was started outside this pid namespace, session 1 init's: never a server's.
    assert left_behind(0, 0, processes) == left_behind(1, 0, processes) == []


def test_a_port_that_stays_taken_is_an_error_that_names_the_holder(site):
    site.start()
    service = site.service()
    site.wait(service, 0.0)
    server = service.live()
    # A second socket on the same port, in another program.
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket, time; s = socket.socket(); "
            "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
            f"s.bind(('127.0.0.2', {site.port})); s.listen(); time.sleep(600)",
        ]
    )
    try:
        site.until(lambda: ":".join(["0200007F", f"{site.port:04X}"]) in Path("/proc/net/tcp").read_text())
        with pytest.raises(NotReady, match=f"process {holder.pid}"):
            service.host.script("stop", pid=server["pid"], ticks=server["ticks"], port=site.port, grace=2.0)
    finally:
        holder.kill()
        holder.wait()


def test_command_adapter_finds_the_process_by_its_port(site):
    by_hand = site.start()
    service = site.service(kind="command", restart=("/bin/sh", "-c", f"kill {by_hand.pid}"))
    assert site.wait(service, 0.0).pid == by_hand.pid
    service.restart()
    by_hand.wait(30)
    assert service.live() is None and service.failure() is None
    with pytest.raises(NotReady, match="exit code 3"):
        site.service(kind="command", restart=("/bin/sh", "-c", "echo no >&2; exit 3")).restart()
