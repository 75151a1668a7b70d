"""The command line: exit codes, and stdout that holds the result and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from patcher import cli
from patcher.commands.findings import Smoked
from patcher.commands.selection import Selection
from patcher.errors import RollbackFailed
from patcher.report.outcome import HostResult, Outcome
from patcher.smoke.result import Check, SmokeResult
from tests.support.builders import make_package, make_series
from tests.support.command_line import start_tool

COMMANDS = ("list", "doctor", "diff", "apply", "verify", "status", "revert", "restart", "smoke-test", "history")


@pytest.fixture(autouse=True)
def _no_hosts_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def run(capfd, *args):
    capfd.readouterr()
    return cli.main(list(args)), *capfd.readouterr()


def test_the_commands_and_their_common_options():
    assert set(cli.cli.commands) == {*COMMANDS, "fork"}
    for name in COMMANDS:
        options = {opt for param in cli.cli.commands[name].params for opt in param.opts}
        assert {"--json", "--host", "--local", "--venv", "--site-packages", "--config"} <= options, name


def test_options_of_single_commands():
    def options(name):
        return {opt for param in cli.cli.commands[name].params for opt in param.opts}

    assert {"--dry-run", "--up-to", "--no-restart", "--no-smoke"} <= options("apply")
    assert {"--junit", "--suite"} <= options("smoke-test")
    assert all("--report" in options(name) for name in ("apply", "revert", "restart"))


@pytest.mark.parametrize(
    "args",
    [
        ["apply", "--nonsense"],
        ["nonsense"],
        ["apply"],
        ["apply", "--local", "--venv", "/v", "--site-packages", "/s"],
        ["apply", "--local", "--config", "/no/such/hosts.toml"],
        ["apply", "--host", "-oProxyCommand=x"],
        ["smoke-test", "--local", "--suite", "/no/such/suite.toml"],
    ],
)
def test_usage_problems_exit_2_with_one_json_document(capfd, args):
    code, out, err = run(capfd, *args, "--json")
    document = json.loads(out)
    assert code == 2 and document["ok"] is False and document["exit_code"] == 2
    assert document["error"]["error"] == "UsageProblem" and document["error"]["what"]
    assert "error: " in err
    code, out, err = run(capfd, *args)
    assert code == 2 and out == "" and "error: " in err


def test_help_and_version_exit_0(capfd):
    assert run(capfd, "--version")[0] == 0
    code, out, _ = run(capfd, "apply", "--help")
    assert code == 0 and "--dry-run" in out


@pytest.mark.parametrize("group", [(), ("fork",)])
def test_help_cuts_no_line(capfd, group):
    code, out, _ = run(capfd, *group, "--help")
    assert code == 0 and "..." not in out.partition("Commands:")[2]


def test_help_lists_commands_in_the_order_of_work(capfd):
    listed = [
        line.split()[0] for line in run(capfd, "--help")[1].partition("Commands:")[2].splitlines() if line.strip()
    ]
    work = ["doctor", "apply", "verify", "smoke-test", "status", "revert"]
    assert [name for name in listed if name in work] == work


def test_a_bug_exits_1_with_a_log_to_paste(capfd, monkeypatch):
    def broken(*job):
        raise ZeroDivisionError("seven")

    monkeypatch.setattr(Selection, "look", broken)
    code, out, err = run(capfd, "status", "--local", "--json")
    assert code == 1 and json.loads(out)["error"]["exit_code"] == 1
    assert "ZeroDivisionError: seven" in err and "Traceback" in err


@pytest.mark.parametrize("stop", [KeyboardInterrupt, click.Abort])
def test_an_interrupt_exits_130(capfd, monkeypatch, stop):
    def stopped(*job):
        raise stop

    monkeypatch.setattr(Selection, "look", stopped)
    code, out, _ = run(capfd, "status", "--local", "--json")
    assert code == 130 and json.loads(out)["error"]["error"] == "Interrupted"


def test_the_commands_of_a_failed_rollback_are_printed(capfd, monkeypatch):
    failed = HostResult("h", error=RollbackFailed("no way back", commands=["systemctl restart sglang"]))
    monkeypatch.setattr(Selection, "change", lambda *job: Outcome("apply", (failed,)))
    code, out, err = run(capfd, "apply", "--local")
    assert code == 8 and "    systemctl restart sglang\n" in err
    _, out, _ = run(capfd, "apply", "--local", "--json")
    assert json.loads(out)["error"]["commands"] == ["systemctl restart sglang"]


def test_junit_is_written_also_when_the_suite_fails(capfd, monkeypatch, tmp_path):
    failed = HostResult("h", error=RollbackFailed("x"))
    failed.keep(Smoked(SmokeResult("tiny", (Check("diverse", False, "equal"),), ())))
    monkeypatch.setattr(Selection, "look", lambda *job: Outcome("smoke-test", (failed,)))
    run(capfd, "smoke-test", "--local", "--junit", str(tmp_path / "report.xml"))
    assert 'failures="1"' in (tmp_path / "report.xml").read_text()


def test_the_report_of_a_client_that_is_killed_has_the_batches_before(tmp_path, monkeypatch):
    make_series(tmp_path / "series/sglang-0.5.11")
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(tmp_path / "series"))
    config, report = tmp_path / "hosts.toml", tmp_path / "report.json"
    config.write_text(
        "".join(f'[hosts.{name}]\nlocal = true\nsite_packages = "{make_package(tmp_path / name)}"\n' for name in "abc")
    )
    program = start_tool(
        "apply", "--config", config, "--host", "a", "--host", "b", "--host", "c", "--batch", "1", "--report", report
    )
    for line in program.stderr:
        if line.startswith("c: ") and report.exists() and json.loads(report.read_bytes())["hosts"][1]["ok"]:
            break
    program.kill()
    program.communicate()
    document = json.loads(report.read_bytes())
    assert document["command"] == "apply" and [host["host"] for host in document["hosts"]] == ["a", "b", "c"]
    assert [host["changed"] for host in document["hosts"][:2]] == [True, True]
    assert (tmp_path / "a/sglang/srt/ddtree.py").exists() and (tmp_path / "b/sglang/srt/ddtree.py").exists()
    last = document["hosts"][2]
    assert last["changed"] or last["error"]["error"] == "Interrupted"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """One that apply can patch."""
    make_series(tmp_path / "series/sglang-0.5.11")
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(tmp_path / "series"))
    return make_package(tmp_path / "tree")


def test_a_report_that_cannot_be_written_hides_no_result(capfd, tree):
    code, out, err = run(capfd, "apply", "--site-packages", str(tree), "--report", "/dev/full", "--json")
    assert code == 2 and json.loads(out)["hosts"][0]["changed"] and "cannot write the report" in err


@pytest.mark.parametrize("report", ["", "/proc/report.json", "missing/report.json", "."])
def test_a_report_that_can_never_be_written_is_refused_first(capfd, tree, report):
    code, out, _ = run(capfd, "apply", "--site-packages", str(tree), "--report", report)
    assert (code, out) == (2, "") and not (tree / "sglang/srt/ddtree.py").exists()


@pytest.mark.parametrize("report", ["/dev/stdout > out.txt", ">(cat > out.txt); wait $!"])
def test_a_report_on_stdout_or_in_a_pipe_is_one_document(tree, tmp_path, report):
    script = f'"$0" -m patcher apply --site-packages "$1" --report {report}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, tree],
        check=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parent.parent)},
    )
    said = (tmp_path / "out.txt").read_text()
    document, end = json.JSONDecoder().raw_decode(said)
    assert document["hosts"][0]["changed"] and document["hosts"][0]["summary"] in said[end:] + done.stdout


def test_without_a_host_the_places_that_were_searched_are_named(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code, out, _ = run(capfd, "status", "--json")
    where = json.loads(out)["error"]["where"]
    assert code == 2 and f"{tmp_path}/configs/hosts.toml" in where
    assert f"{tmp_path}/home/.config/ddtree-patch/hosts.toml" in where


def test_as_a_program_without_a_terminal():
    """No prompt, no colour, nothing but ASCII; the progress is not on stdout."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from patcher.cli import main; sys.exit(main())", "list"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"\x1b" not in done.stdout and done.stderr == b""


@pytest.mark.parametrize("option", ["--site-packages", "--venv", "--host", "--up-to"])
def test_an_empty_value_is_refused(capfd, option):
    code, out, err = run(capfd, "apply", "--local", option, "")
    assert (code, out) == (2, "")
    assert option in err


@pytest.mark.parametrize(("redirection", "expected"), [("| head -c1", 0), (">&-", 0), ("2>&-", 0), ("> /dev/full", 1)])
def test_a_stdout_that_takes_nothing(redirection, expected):
    script = f'set -o pipefail; "$0" -m patcher list {redirection}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parent.parent)},
    )
    assert done.returncode == expected
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stderr", ["2> >(true)", "2>/dev/full"])
def test_work_goes_on_when_nobody_takes_the_messages(stub_host, stderr):
    config = stub_host.configure("local")
    stub_host.start_server()
    script = f'"$0" -m patcher apply --local --config "$1" --json {stderr}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, config],
        stdout=subprocess.PIPE,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parent.parent)},
    )
    assert done.returncode == 0 and json.loads(done.stdout)["hosts"][0]["changed"]
    assert stub_host.served_identity()
