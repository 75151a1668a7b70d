"""apply with a server, over the real sshd: kept when all is well, and everything put back when it is not."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from patcher.commands.apply import Apply
from patcher.commands.revert import Revert
from patcher.commands.serve import Restart
from tests.support.builders import make_package
from tests.support.stub_host import StubHost, free_port

DDTREE = {"--speculative-algorithm": "DDTREE"}


@pytest.fixture
def over_ssh(stub_host, sshd, monkeypatch):
    """`stub_host`, reached as `demo` over a real sshd."""
    server = sshd(alias="demo")
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(server.ssh_config))
    return stub_host


def test_the_whole_way_and_back(over_ssh, tool, tmp_path):
    target, before = over_ssh, over_ssh.hashes()
    options = ("--host", "demo", "--config", target.configure("demo", args=DDTREE), "--json")
    first = target.start_server()

    dry = tool("apply", *options, "--dry-run")
    assert dry.code == 0 and target.hashes() == before and first.poll() is None

    done = tool("apply", *options)
    assert done.code == 0, done.stderr
    assert done.host["plan"] == dry.host["plan"]
    assert done.host["round_trips_before_restart"] <= 12
    assert target.served_identity() == target.series.identity("temperature")
    assert target.info()["speculative_algorithm"] == "DDTREE"
    checks = {check["name"]: check for check in done.host["checks"]}
    assert checks["greedy_as_before"]["passed"] and not checks["greedy_as_before"]["skipped"]
    assert checks["diverse"]["passed"] and checks["patch_identity"]["passed"]

    pid, patched = done.host["ready"]["pid"], target.hashes()
    again = tool("apply", *options)
    assert again.code == 0 and not again.host["changed"] and "nothing to change" in again.host["summary"]
    assert target.hashes() == patched
    os.kill(pid, 0)  # a healthy server is not restarted

    assert tool("verify", *options).code == 0
    assert tool("status", *options).host["state"] == "temperature"
    report = tmp_path / "smoke.xml"
    assert tool("smoke-test", *options, "--junit", report).code == 0
    assert ET.parse(report).getroot().find("testsuite").get("failures") == "0"

    back = tool("revert", *options)
    assert back.code == 0, back.stderr
    assert target.hashes() == before
    assert target.served_identity() is None and target.info()["speculative_algorithm"] is None


def test_without_a_venv_it_is_the_serving_processes_own(over_ssh, tool):
    target = over_ssh
    config = target.configure("demo")
    config.write_text(config.read_text().replace(f'venv = "{target.venv}"\n', ""))
    target.start_server()
    said = tool("status", "--host", "demo", "--config", config, "--json")
    assert said.code == 0, said.stderr
    assert said.host["installation"]["root"] == str(target.site_packages)


def test_a_missing_kernel_ends_it_before_anything_is_touched(stub_host, tool):
    before, server = stub_host.hashes(), stub_host.start_server()
    said = tool("apply", "--local", "--config", stub_host.configure("local", require=True), "--json")
    assert said.code == 5 and "sgl_kernel" in said.error["what"]
    assert stub_host.hashes() == before and server.poll() is None


def test_a_rollback_that_fails_exits_8_with_the_commands(stub_host, tool, tmp_path):
    """The directory in which the server was started is gone: neither the new nor the old one can be started."""
    before = stub_host.hashes()
    (stub_host.home / "cwd").mkdir()
    stub_host.start_server(cwd=stub_host.home / "cwd")
    (stub_host.home / "cwd").rmdir()
    said = tool("apply", "--local", "--config", stub_host.configure("local"), "--json")
    assert said.code == 8, said.stderr
    assert stub_host.hashes() == before, "the files are back all the same"
    restart, start = said.error["commands"]
    assert restart.startswith(f"ddtree-patch restart --local --config {stub_host.config} --venv ")
    assert f"service-{stub_host.port}.env" in start and f"-m sglang.launch_server --port {stub_host.port}" in start


def test_a_server_that_runs_another_copy_is_refused(stub_host, tool, tmp_path):
    """Changing files that no server runs would be reported as a success."""
    stub_host.start_server()
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    make_package(next((other / "lib").glob("python3*")) / "site-packages")
    config = stub_host.configure("local")
    said = tool("apply", "--local", "--venv", other, "--config", config, "--json")
    assert said.code == 4 and "another copy" in said.error["what"] and str(stub_host.port) in said.error["detail"]
    only_files = tool("apply", "--local", "--venv", other, "--config", config, "--no-restart", "--json")
    assert only_files.code == 0 and any("--no-restart" in line for line in only_files.host["not_done"])


def test_no_restart_leaves_the_server_and_the_next_apply_restarts_it(stub_host, tool):
    server = stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local"), "--json")
    assert tool("apply", *options, "--no-restart").code == 0
    assert server.poll() is None and stub_host.served_identity() is None
    stale = tool("verify", *options)
    assert stale.code == 6 and "older than the patched files" in stale.error["what"]
    said = tool("apply", *options)
    assert said.code == 0 and not said.host["changed"] and "older than the patched files" in said.host["summary"]
    assert stub_host.served_identity() == stub_host.series.identity("temperature")


@pytest.mark.parametrize("job", [Apply, Restart, Revert])
def test_a_server_that_was_replaced_since_the_plan_is_a_conflict(stub_host, tool, monkeypatch, job):
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local"), "--json")
    if job is Revert:
        assert tool("apply", *options, "--no-restart").code == 0
    before, planned = stub_host.hashes(), job.prepare

    def prepare(self):
        planned(self)
        stub_host.stop()
        stub_host.start_server()

    monkeypatch.setattr(job, "prepare", prepare)
    said = tool(job.__name__.lower(), *options)
    (pid,) = {server.pid for server in stub_host.servers if server.poll() is None}
    assert said.code == 4 and f"{pid} now" in said.error["what"]
    assert stub_host.hashes() == before and not said.host["changed"]


def test_a_dry_run_and_diff_say_what_becomes_of_the_server(stub_host, tool):
    pid = stub_host.start_server().pid
    options = ("--local", "--config", stub_host.configure("local", args=DDTREE), "--json")
    dry, diff = tool("apply", *options, "--dry-run", "--no-smoke").host, tool("diff", *options).host
    for server in (dry["plan"]["server"], diff["plan"]["server"]):
        assert (server["kind"], server["before"]["pid"]) == ("restart", pid)
        assert server["flags"] == ["--speculative-algorithm", "DDTREE"]
    assert diff["plan"]["server"]["checks"] == ["kernel probe", "import check", "smoke suite"]
    assert dry["plan"]["server"]["left_out"] == [{"name": "smoke suite", "why": "--no-smoke was given"}]
    assert diff["diff"].startswith(f"# process {pid} would be restarted with --speculative-algorithm DDTREE")


def test_flags_that_the_server_does_not_start_with_leave_it_running_as_it_was(stub_host, tool):
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local", args=DDTREE), "--json")
    assert tool("apply", *options).code == 0
    stub_host.configure("local", args=DDTREE | {"--stub-fail": True})
    dry = tool("apply", *options, "--dry-run")
    assert dry.code == 0 and "--stub-fail, because its command line had not" in dry.host["summary"]
    said = tool("apply", *options)
    assert said.code == 6 and "the server runs again as before" in said.host["error"]["next"]
    assert stub_host.served_identity() == stub_host.series.identity("temperature")
    assert stub_host.info()["speculative_algorithm"] == "DDTREE"

    stub_host.configure("local", args=DDTREE)
    assert tool("apply", *options).code == 0


CUT = """
import os, sys
from patcher.cli import main
from patcher.server.services.process import ProcessService
ProcessService.start = lambda service, patched=True: os._exit(137)
sys.exit(main())
"""


def killed_before_the_start(stub_host, *args, seconds_ago=600):
    """The tool as a program of its own, which is gone between the end of the server and the start of the next one."""
    ended = subprocess.run([sys.executable, "-c", CUT, *map(str, args)], capture_output=True, text=True, check=False)
    assert ended.returncode == 137, ended.stderr
    kept = stub_host.venv / ".ddtree-patch/sglang/state.json"
    state = json.loads(kept.read_text())
    state[f"service_{stub_host.port}"]["ended"]["since"] -= seconds_ago
    kept.write_text(json.dumps(state))


def test_no_server_is_started_while_another_command_may_be_about_to(stub_host, tool):
    """Two would load at once."""
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local", args=DDTREE), "--json")
    killed_before_the_start(stub_host, "apply", *options, seconds_ago=0)
    patched = stub_host.hashes()
    for command in ("apply", "restart", "revert"):
        said = tool(command, *options)
        assert said.code == 9 and "a command began to restart the server" in said.error["what"]
        assert said.error["next"].startswith("run again in ")
    assert not stub_host.server_pids() and stub_host.hashes() == patched


def test_a_command_that_failed_holds_up_no_other(stub_host, tool):
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local", args={"--stub-fail": True}), "--json")
    assert tool("restart", *options).code == 0, "nothing is patched, so that service.args do not count"
    assert tool("apply", *options, "--no-restart").code == 0
    assert tool("restart", *options).code == 6 and not stub_host.server_pids()
    stub_host.configure("local", args=DDTREE)
    assert tool("restart", *options).code == 0


def test_a_server_of_another_copy_that_came_in_place_of_the_stopped_one_is_refused(stub_host, tool, tmp_path):
    stub_host.start_server()
    options = ("--local", "--config", without("endpoint", stub_host.configure("local", args=DDTREE)), "--json")
    killed_before_the_start(stub_host, "apply", *options)
    (tmp_path / "other").mkdir()
    other = StubHost(tmp_path / "other")
    other.port = stub_host.port
    try:
        server = other.start_server()
        for command in ("apply", "restart", "revert"):
            said = tool(command, *options, "--venv", stub_host.venv)
            assert said.code == 4 and "another copy" in said.error["what"], said.stderr
        assert server.poll() is None
    finally:
        other.stop()


def test_what_was_started_by_hand_once_more_does_not_become_the_original(stub_host, tool):
    """The very line of the patched server, before args were changed."""
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local", args=DDTREE), "--json")
    assert tool("apply", *options).code == 0
    stub_host.stop()
    stub_host.start_server("--speculative-algorithm", "DDTREE")
    stub_host.configure("local", args=DDTREE | {"--stub-start-s": "0.1"})
    assert tool("apply", *options).code == 0
    back = tool("revert", *options)
    assert back.code == 0, back.stderr
    assert stub_host.info()["speculative_algorithm"] is None


@pytest.mark.parametrize("command", ["verify", "smoke-test"])
def test_a_server_that_was_found_healthy_is_missing_no_longer(stub_host, tool, command):
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local"), "--json")
    killed_before_the_start(stub_host, "apply", *options)
    stub_host.start_server()
    assert tool(command, *options).code == 0
    stub_host.stop()
    assert tool("status", *options).host["facts"]["server"] == f"none runs on port {stub_host.port}"
    assert any("no server is running" in line for line in tool("revert", *options).host["not_done"])


def command_line_on(port):
    lines = [path.read_text().split("\0")[:-1] for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return next(line for line in lines if line[3:5] == ["--port", str(port)])


def test_two_servers_of_one_venv_are_each_restarted_as_they_were(stub_host, tool):
    first_port = stub_host.port
    stub_host.start_server("--stub-start-s", "0.1")
    options = ("--local", "--config", stub_host.configure("local", args=DDTREE), "--json")
    assert tool("apply", *options).code == 0
    first = stub_host.server_pids()
    stub_host.port = free_port()
    second = stub_host.start_server("--stub-start-s", "0.2")
    stub_host.configure("local", args=DDTREE)
    assert tool("restart", *options).code == 0
    assert second.poll() is not None and set(first) < set(stub_host.server_pids())
    assert tool("revert", *options).code == 0 and set(first) < set(stub_host.server_pids())
    assert command_line_on(stub_host.port)[-2:] == ["--stub-start-s", "0.2"]
    stub_host.port = first_port
    stub_host.configure("local", args=DDTREE)
    assert tool("revert", *options).code == 0
    assert command_line_on(stub_host.port)[-2:] == ["--stub-start-s", "0.1"]


def without(key, config):
    lines = config.read_text().splitlines(True)
    config.write_text("".join(line for line in lines if not line.startswith(key)))
    return config


def test_an_apply_that_was_killed_while_the_server_was_down_is_gone_on_with(stub_host, tool):
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local", args=DDTREE))
    killed_before_the_start(stub_host, "apply", *options)
    assert not stub_host.server_pids()
    missing = "an earlier command had stopped it, and no other was ready in its place"
    assert missing in tool("status", *options, "--json").host["facts"]["server"]
    verified = tool("verify", *options, "--json")
    assert verified.code == 6 and missing in verified.error["what"]
    dry = tool("apply", *options, "--dry-run", "--json")
    assert f"the server would be started with --speculative-algorithm DDTREE, because {missing}" in dry.host["summary"]

    stub_host.configure("local", args=DDTREE | {"--stub-fail": True})
    failed = tool("apply", *options, "--json")
    assert failed.code == 6 and "the server runs again as before" in failed.error["next"]
    assert stub_host.served_identity() == stub_host.series.identity("temperature")
    assert stub_host.info()["speculative_algorithm"] is None, "the command line that the server had"
    stub_host.configure("local", args=DDTREE)
    assert tool("apply", *options, "--json").code == 0
    assert stub_host.info()["speculative_algorithm"] == "DDTREE"


@pytest.mark.long
def test_a_revert_that_was_killed_while_the_server_was_down_is_gone_on_with(stub_host, tool, tmp_path, monkeypatch):
    """With no venv in hosts.toml: it was known by the process alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    before = stub_host.hashes()
    stub_host.start_server()
    options = ("--local", "--config", without("venv", stub_host.configure("local", args=DDTREE)), "--json")
    assert tool("apply", *options).code == 0
    killed_before_the_start(stub_host, "revert", *options)
    assert not stub_host.server_pids() and stub_host.hashes() == before
    back = tool("revert", *options)
    assert back.code == 0, back.stderr
    assert "the server was started again, because an earlier command had stopped it" in back.host["summary"]
    assert stub_host.served_identity() is None and stub_host.info()["speculative_algorithm"] is None
    assert not (tmp_path / ".ddtree-patch").exists(), "nothing is kept of a server that is back"
    again = tool("revert", *options)
    assert again.code == 0 and again.host["summary"] == "not patched: nothing to revert"


@pytest.mark.long
def test_a_restart_that_was_killed_while_the_server_was_down_is_gone_on_with_by_any_command(stub_host, tool):
    """With no port in hosts.toml: it was known by the process alone."""
    stub_host.start_server()
    options = ("--local", "--config", without("endpoint", stub_host.configure("local", args=DDTREE)), "--json")
    for command in ("restart", "apply", "restart", "revert"):
        killed_before_the_start(stub_host, "restart", *options)
        assert not stub_host.server_pids()
        said = tool(command, *options)
        assert said.code == 0, said.stderr
        assert len(stub_host.server_pids()) > 0 and stub_host.info()


def test_a_server_that_its_operator_ended_stays_down(stub_host, tool):
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local"), "--json")
    assert tool("apply", *options).code == 0
    stub_host.stop()
    assert any("no server is running" in line for line in tool("apply", *options).host["not_done"])
    assert tool("status", *options).host["facts"]["server"] == f"none runs on port {stub_host.port}"
    assert any("no server is running" in line for line in tool("revert", *options).host["not_done"])
    assert not stub_host.server_pids()


def test_a_flag_that_is_no_longer_in_the_settings_is_taken_off(stub_host, tool):
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local", args=DDTREE | {"--stub-start-s": "0.1"}), "--json")
    assert tool("apply", *options).code == 0
    stub_host.configure("local", args=DDTREE)
    assert (
        "because service.args no longer make its --stub-start-s" in tool("apply", *options, "--dry-run").host["summary"]
    )
    said = tool("apply", *options)
    assert said.code == 0 and "no longer make its --stub-start-s" in said.host["summary"]
    again = tool("apply", *options)
    assert again.host["summary"] == "already at stage temperature: nothing to change"


@pytest.mark.parametrize(
    ("args", "code"), [({"--stub-mode": "greedy"}, 7), pytest.param({"--stub-fail": True}, 6, marks=pytest.mark.long)]
)
def test_a_failed_server_s_log_is_named(stub_host, tool, args, code):
    stub_host.start_server()
    said = tool("apply", "--local", "--config", stub_host.configure("local", args=args), "--json")
    assert said.code == code, said.stderr
    log = Path(said.error["next"].partition("; the server's log, on the host: ")[2])
    assert log.parent == stub_host.venv / ".ddtree-patch/sglang/logs" and log.read_text()


def test_a_server_that_a_supervisor_keeps_running_is_refused(stub_host, tool, tmp_path):
    """A fake runsv: the name of its process is what counts. The real ones are among the tests of the adapters."""
    before = stub_host.hashes()
    fake_runsv = tmp_path / "runsv"
    fake_runsv.symlink_to(os.path.realpath(sys.executable))
    server = [f"{stub_host.venv}/bin/python", "-m", "sglang.launch_server", "--port", str(stub_host.port)]
    keeper = subprocess.Popen(
        [fake_runsv, "-I", "-S", "-c", f"import subprocess; subprocess.run({server})"], start_new_session=True
    )
    try:
        stub_host.wait_answer()
        options = ("--local", "--config", stub_host.configure("local"), "--json")
        for command in ("apply", "restart"):
            said = tool(command, *options)
            assert said.code == 4 and f"is kept running by runsv (process {keeper.pid})" in said.error["what"]
            assert 'kind = "command"' in said.error["next"]
        assert stub_host.hashes() == before and stub_host.served_identity() is None
        assert tool("apply", *options, "--no-restart").code == 0
    finally:
        stub_host.stop()
        keeper.wait(30)


def test_who_reverts_while_another_waits_has_the_last_word(stub_host, tool):
    stub_host.start_server()
    config = stub_host.configure("local", args={"--stub-start-s": "600"})
    command = [sys.executable, "-m", "patcher", "apply", "--local", "--config", config, "--json"]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in waiting.stderr:
        if "waiting for the server to listen" in line:
            break
    assert tool("revert", "--local", "--config", config, "--json").code == 0
    out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 9, err
    (host,) = json.loads(out)["hosts"]
    assert "the installation was changed by" in host["error"]["what"] and "applied" not in host["summary"]
    assert stub_host.served_identity() is None


def test_without_a_server_the_files_are_patched_and_the_rest_is_said_to_be_missing(stub_host, tool):
    options = ("--local", "--config", stub_host.configure("local"), "--json")
    said = tool("apply", *options)
    assert said.code == 0 and said.host["changed"]
    assert any("no server is running" in line for line in said.host["not_done"])
    assert tool("verify", *options).code == 6


def test_a_stage_before_the_last_is_not_tried_above_temperature_0(stub_host, tool):
    stub_host.start_server()
    config = stub_host.configure("local", args={"--stub-mode": "refuses"}, require=True)
    said = tool("apply", "--local", "--config", config, "--up-to", "ddtree", "--json")
    assert said.code == 0, said.stderr
    assert stub_host.served_identity() == stub_host.series.identity("ddtree")


def test_two_hosts_of_which_one_has_drifted(stub_host, sshd, tool, monkeypatch, tmp_path):
    trees = {name: make_package(tmp_path / name) for name in ("one", "two")}
    configs = [sshd(alias=name).ssh_config.read_text() for name in trees]
    (tmp_path / "ssh_config").write_text("\n".join(configs))
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(tmp_path / "ssh_config"))
    stub_host.config.write_text("".join(f'[hosts.{n}]\nsite_packages = "{t}"\n' for n, t in trees.items()))
    (trees["two"] / "sglang/srt/args.py").write_bytes(b"drifted\n")
    start = {name: _hash_tree(tree) for name, tree in trees.items()}
    options = ("--host", "one", "--host", "two", "--config", stub_host.config, "--json")

    said = tool("apply", *options)
    assert said.code == 10 and said.error["error"] == "MixedOutcome"
    assert {name: _hash_tree(tree) for name, tree in trees.items()} == start, "none is touched"
    assert [host["error"]["exit_code"] for host in said.json["hosts"]] == [10, 4]

    said = tool("apply", *options, "--keep-going")
    assert said.code == 10 and [host["ok"] for host in said.json["hosts"]] == [True, False]
    assert _hash_tree(trees["one"]) != start["one"] and _hash_tree(trees["two"]) == start["two"]


@pytest.mark.parametrize("command", ["status", "apply"])
def test_a_host_that_cannot_be_reached(over_ssh, sshd, tool, monkeypatch, command):
    unknown = tool(command, "--host", "no-such-host.invalid", "--json")
    assert unknown.code == 3 and "no-such-host.invalid" in unknown.error["what"] + unknown.error["where"]
    gone = sshd(alias="gone")
    gone.stop()
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(gone.ssh_config))
    assert tool(command, "--host", "gone", "--json").code == 3


def test_a_wrong_venv(over_ssh, tool, tmp_path):
    absent = tool("apply", "--host", "demo", "--venv", "/no/such/venv", "--json")
    assert absent.code == 4 and "/no/such/venv" in absent.error["what"]
    relative = tool("apply", "--host", "demo", "--venv", "venv", "--json")
    assert relative.code == 2 and "absolute" in relative.error["what"]
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(empty)], check=True)
    without = tool("apply", "--host", "demo", "--venv", empty, "--json")
    assert without.code == 4 and without.error["error"] == "NoInstallation"


def test_an_interrupt_while_waiting_exits_130_and_the_next_apply_goes_on(stub_host):
    """As an operator's Ctrl-C: the signal reaches the tool while it waits for a slow server."""
    stub_host.start_server()
    config = stub_host.configure("local", args={"--stub-start-s": "5"})
    program = [
        sys.executable,
        "-c",
        "import sys; from patcher.cli import main; sys.exit(main())",
        "apply",
        "--local",
        "--config",
        str(config),
    ]
    # What started these tests may ignore SIGINT, as a shell does for what it runs in the background; it is inherited.
    run = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in run.stderr:
        if "waiting for the server to listen" in line:
            run.send_signal(signal.SIGINT)
            break
    _, told = run.communicate(timeout=60)
    assert run.returncode == 130 and "ddtree-patch status" in told
    again = subprocess.run(program, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert stub_host.served_identity() == stub_host.series.identity("temperature")


def _hash_tree(root):
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
