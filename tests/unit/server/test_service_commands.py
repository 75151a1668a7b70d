"""The systemd, docker and command adapters: the commands they run, and what they make of the answers, by fakes."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from patcher.errors import AuthenticationProblem, NotReady, UsageProblem
from patcher.hosts import ServiceSettings
from patcher.installation.command_line import apply_flags, port_of
from patcher.server.services.base import UNREADABLE
from patcher.server.services.registry import ServiceHost, make_service
from patcher.smoke.checks import no_greedy_fallback_logged
from patcher.ssh.connection import Completed
from tests.support.builders import process

SHOWN = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "MainPID": "77",
    "Result": "success",
    "ExecMainStatus": "0",
    "NRestarts": "0",
}


class FakeCommands:
    """A connection that answers from a table (first match of the argv's beginning) and records what was run."""

    def __init__(self, *answers):
        self.answers = answers
        self.ran = []

    def run(self, argv, *, input=b"", timeout=None, on_stderr=None):
        self.ran.append(argv)
        for beginning, (rc, out, err) in self.answers:
            if argv[: len(beginning)] == beginning:
                return Completed(rc, out.encode(), err.encode())
        return Completed(0, b"", b"")


def FakeSystemctl(shown=SHOWN, *answers, prefix=()):
    text = "".join(f"{name}={value}\n" for name, value in shown.items())
    return FakeCommands(
        *answers,
        ([*prefix, "systemctl", "show"], (0, text, "")),
        ([*prefix, "systemctl", "--user", "show"], (0, text, "")),
        (["id", "-u"], (0, "1000\n", "")),
    )


def FakeDocker(container, *answers):
    return FakeCommands(*answers, (["docker", "inspect"], (0, json.dumps([container]), "")))


class FakeHostScript:
    """Answers the agent's run_python with fixed replies of host_script.py, by operation, and records the requests."""

    def __init__(self, **replies):
        self.replies = replies
        self.requests = []

    def __call__(self, op, **fields):
        assert op == "run_python" and "def read_log" in fields["source"]
        request = json.loads(fields["argv"][0])
        self.requests.append(request)
        return {"rc": 0, "stdout": json.dumps(self.replies[request["op"]]), "stderr": ""}


SERVER = {
    "pid": 77,
    "ticks": 5,
    "start_time": 10.0,
    "argv": ["python", "--api-key", "k"],
    "cwd": "/",
    "log": None,
    "tree": [77],
}
STATUS = {"now": 1700000000.25, "server": SERVER, "listener": {"owner": "server", "process": None}}


def service_of(kind, commands, script=None, port=30000, **settings):
    script = script or FakeHostScript(status=STATUS)
    host = ServiceHost("host", commands, script, "/state", port)
    return make_service(ServiceSettings(kind=kind, **settings), host)


@pytest.mark.parametrize(
    ("kind", "settings", "place"),
    [
        ("systemd", {"unit": "x.service"}, "journalctl --unit=x.service --boot"),
        ("systemd", {"unit": "x.service", "scope": "user"}, "journalctl --user-unit=x.service --boot"),
        ("docker", {"container": "x"}, "docker logs x"),
        (
            "supervisor",
            {"program": "x"},
            "supervisorctl tail -1048576 x stdout and supervisorctl tail -1048576 x stderr",
        ),
        ("command", {}, "not known here; service.log in hosts.toml can name it"),
        ("command", {"log": "/var/log/x"}, "/var/log/x"),
    ],
)
def test_where_the_log_is(kind, settings, place):
    commands = FakeCommands(([], (0, "", "")))
    service = service_of(kind, commands, **settings)
    commands.sudo = False
    service._seen = {"log": None}  # it writes to no file
    assert service.log_at() == place


# ---- systemd -----------------------------------------------------------------------------------------------


def test_systemd_of_the_system():
    commands = FakeSystemctl()
    service = service_of("systemd", commands, unit="sglang.service")
    service.restart()
    service.stop()
    service.start()
    assert [argv for argv in commands.ran if argv[1] not in ("show", "reset-failed")] == [
        ["systemctl", "restart", "sglang.service"],
        ["systemctl", "stop", "sglang.service"],
        ["systemctl", "start", "sglang.service"],
    ]
    assert service.live()["pid"] == 77
    assert service.failure() is None


def test_systemd_of_a_user_needs_the_runtime_directory():
    prefix = ["env", "XDG_RUNTIME_DIR=/run/user/1000"]
    commands = FakeSystemctl(prefix=prefix)
    service_of("systemd", commands, unit="sglang", scope="user").restart()
    assert commands.ran[-1] == [*prefix, "systemctl", "--user", "restart", "sglang"]


def test_systemd_of_a_user_that_does_not_run():
    refusal = (1, "", "Failed to connect to bus: No such file or directory")
    commands = FakeCommands((["id", "-u"], (0, "1000\n", "")), (["env"], refusal))
    with pytest.raises(NotReady) as caught:
        service_of("systemd", commands, unit="sglang", scope="user").restart()
    assert "enable-linger" in caught.value.next_step


def test_systemd_unit_that_is_not_there():
    commands = FakeSystemctl({**SHOWN, "LoadState": "not-found"})
    with pytest.raises(UsageProblem, match="no system unit nope"):
        service_of("systemd", commands, unit="nope").restart()
    assert all(argv[1] == "show" for argv in commands.ran)


def test_systemd_that_refuses():
    refusal = (1, "", "Failed to restart sglang.service: Interactive authentication required.")
    commands = FakeSystemctl(SHOWN, (["systemctl", "restart"], refusal))
    with pytest.raises(NotReady) as caught:
        service_of("systemd", commands, unit="sglang").restart()
    assert "Interactive authentication required" in caught.value.what and "sudo" in caught.value.next_step


def test_systemd_unit_that_failed():
    commands = FakeSystemctl(
        {
            **SHOWN,
            "ActiveState": "failed",
            "MainPID": "0",
            "Result": "exit-code",
            "ExecMainStatus": "1",
            "NRestarts": "5",
        }
    )
    script = FakeHostScript(status={**STATUS, "server": None})
    service = service_of("systemd", commands, script, unit="sglang")
    assert service.live() is None and script.requests[0]["pid"] == 0
    assert service.failure() == "sglang is failed (exit-code, exit status 1, restarted 5 times)"


def test_systemd_journal_from_a_cursor_on():
    commands = FakeSystemctl(SHOWN, (["journalctl"], (0, "text\n-- cursor: s=abc;i=1\n", "")))
    service = service_of("systemd", commands, unit="sglang")
    marker = service.log_marker()
    assert marker == {"cursor": "s=abc;i=1"}
    service.log_since(marker)
    assert commands.ran[-1] == [
        "journalctl",
        "--no-pager",
        "--quiet",
        "--unit=sglang",
        "--output=cat",
        "--after-cursor=s=abc;i=1",
    ]


@pytest.mark.parametrize("kind", ["systemd", "docker"])
def test_a_log_that_may_not_be_read_stops_nothing_and_is_no_log(kind):
    refusal = (1, "", "insufficient permissions")
    service = (
        service_of("systemd", FakeSystemctl(SHOWN, (["journalctl"], refusal)), unit="sglang")
        if kind == "systemd"
        else service_of("docker", FakeDocker(CONTAINER, (["docker", "logs"], refusal)), container="sgl")
    )
    marker = service.log_marker()
    assert service.log_since(marker).startswith(UNREADABLE) and "insufficient permissions" in service.last_log(marker)
    check = no_greedy_fallback_logged(service, marker)
    assert check.skipped and "insufficient permissions" in check.detail


def test_what_is_typed_by_hand():
    commands = FakeSystemctl()
    commands.sudo = True
    assert service_of("systemd", commands, unit="sglang").by_hand() == [
        "sudo systemctl reset-failed sglang",
        "sudo systemctl restart sglang",
    ]
    commands.sudo = False
    assert service_of("systemd", commands, unit="sglang", scope="user").by_hand()[-1] == (
        "env XDG_RUNTIME_DIR=/run/user/1000 systemctl --user restart sglang"
    )
    assert service_of("docker", commands, container="sgl").by_hand() == ["docker restart sgl"]
    assert service_of("command", commands, restart=("a", "b c")).by_hand() == ["a 'b c'"]


def test_a_named_log_file_is_read_instead():
    script = FakeHostScript(read_log={"text": "from the file", "size": 9, "offset": 4, "problem": None})
    service = service_of("systemd", FakeSystemctl(), script, unit="sglang", log="/var/log/sglang.log")
    marker = service.log_marker()
    assert marker == {"path": "/var/log/sglang.log", "offset": 9}
    assert service.log_since(marker) == "from the file"
    assert script.requests[-1]["offset"] == 9


def test_a_description_has_no_secrets():
    described = service_of("systemd", FakeSystemctl(), unit="sglang").describe()
    assert described["argv"] == ["python", "--api-key", "***"]
    assert described["unit"] == "sglang" and described["state"] == "active (running)" and described["running"]


def test_another_accounts_server_is_told_as_that():
    script = FakeHostScript(status={"error": "not permitted: /proc/77/fd", "permission": True})
    with pytest.raises(AuthenticationProblem, match="another account"):
        service_of("systemd", FakeSystemctl(), script, unit="sglang").live()


# ---- docker ------------------------------------------------------------------------------------------------

RUNNING = {"Status": "running", "Pid": 88, "ExitCode": 0, "OOMKilled": False, "StartedAt": "2026-01-01T00:00:00Z"}
PUBLISHED = {"9/tcp": None, "30000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "31000"}]}
CONTAINER = {"State": RUNNING, "NetworkSettings": {"Ports": PUBLISHED}}


def test_docker_restarts_and_looks_into_the_containers_network():
    commands, script = FakeDocker(CONTAINER), FakeHostScript(status=STATUS)
    service = service_of("docker", commands, script, container="sgl", port=31000)
    service.restart()
    assert commands.ran == [["docker", "restart", "-t", "60", "sgl"]]
    assert service.live()["pid"] == 77
    assert script.requests[0]["pid"] == 88 and script.requests[0]["port"] == 30000
    service.stop()
    service.start()
    assert commands.ran[-2:] == [["docker", "stop", "-t", "60", "sgl"], ["docker", "start", "sgl"]]


def test_docker_on_the_hosts_network_and_another_tool():
    container = {**CONTAINER, "NetworkSettings": {"Ports": {}}}
    commands = FakeCommands((["podman", "inspect"], (0, json.dumps([container]), "")))
    script = FakeHostScript(status=STATUS)
    service_of("docker", commands, script, container="sgl", control=("podman",)).live()
    assert script.requests[0]["port"] == 30000


def test_docker_container_that_ended():
    state = {"Status": "exited", "Pid": 0, "ExitCode": 137, "OOMKilled": True, "StartedAt": ""}
    service = service_of("docker", FakeDocker({**CONTAINER, "State": state}), container="sgl")
    assert service.failure() == "container sgl is exited (exit code 137, out of memory)"


def test_docker_container_that_is_not_there():
    commands = FakeCommands((["docker", "inspect"], (1, "[]", "Error: No such container: nope")))
    with pytest.raises(UsageProblem, match="no container nope"):
        service_of("docker", commands, container="nope").live()


def test_docker_without_its_daemon():
    commands = FakeCommands((["docker", "inspect"], (1, "", "Cannot connect to the Docker daemon")))
    with pytest.raises(NotReady, match="Cannot connect"):
        service_of("docker", commands, container="sgl").live()


def test_docker_logs_since_a_moment_of_the_hosts_clock():
    commands = FakeDocker(CONTAINER, (["docker", "logs"], (0, "out", "err")))
    service = service_of("docker", commands, container="sgl")
    marker = service.log_marker()
    assert marker == {"since": "2023-11-14T22:13:20.250000+00:00"}
    assert service.log_since(marker) == "outerr"
    assert commands.ran[-1] == ["docker", "logs", "--since", marker["since"], "sgl"]
    service.log_since()
    assert commands.ran[-1][3] == "2026-01-01T00:00:00Z"


# ---- command, none, flags -----------------------------------------------------------------------------------


def test_command_runs_what_it_was_given_and_names_what_it_was_not():
    script = FakeHostScript(run={"rc": 0})
    service = service_of("command", FakeCommands(), script, restart=("a", "b c"), start=("s",))
    service.restart()
    service.start()
    assert [request["argv"] for request in script.requests] == [["a", "b c"], ["s"]]
    assert all(request["log"].startswith("/state/logs/command-") for request in script.requests)
    with pytest.raises(UsageProblem, match=r"service\.stop is not set"):
        service.stop()


def test_command_that_fails_is_told_with_what_it_said():
    script = FakeHostScript(run={"rc": 3}, read_log={"text": "no such service\n", "size": 16, "problem": None})
    with pytest.raises(NotReady, match="failed with exit code 3: no such service"):
        service_of("command", FakeCommands(), script, restart=("a", "b c")).restart()


def test_command_takes_the_launcher_that_serves_the_port():
    processes = [
        process(1, port=31000, start_time=3.0),
        process(2, port=30000, argv=("python",), start_time=1.0),
        process(3, argv=("python", "--port=30000"), start_time=2.0),
    ]

    def ask(op):
        return {"processes": msgspec.to_builtins(processes), "missing": []}

    host = ServiceHost("host", None, ask, "/state", 30000)
    assert host.serving_pid() == 2
    processes[1] = process(2, argv=("python",), start_time=1.0)
    assert host.serving_pid() == 3  # the youngest that was told this port
    processes.clear()
    assert host.serving_pid() is None


def test_no_service():
    assert make_service(ServiceSettings(kind="none"), SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("argv", "flags", "expected"),
    [
        ("p --a 1 --b 2", {"--a": "9"}, "p --a 9 --b 2"),
        ("p --a=1 --b 2", {"--a": "9"}, "p --a 9 --b 2"),
        ("p --b 2", {"--a": "9", "--c": True}, "p --b 2 --a 9 --c"),
        ("p --a 1 2 3 --b", {"--a": "9"}, "p --a 9 --b"),
        ("p --a 1 --b --a 2", {"--a": "9"}, "p --a 9 --b"),
        ("p --a -1 --b", {"--a": False}, "p --b"),
        ("p --a --b", {"--a": True}, "p --a --b"),
        ("p --ab 1", {"--a": "9"}, "p --ab 1 --a 9"),
        ("p", {"--a": False}, "p"),
    ],
)
def test_flags(argv, flags, expected):
    assert apply_flags(argv.split(), flags) == expected.split()
    assert apply_flags(expected.split(), flags) == expected.split()


def test_port_of():
    assert port_of(["p"]) == 30000
    assert port_of(["p", "--port", "31000"]) == 31000
    assert port_of(["p", "--port=31000"]) == 31000
    assert port_of(["p", "--port"]) == 30000
