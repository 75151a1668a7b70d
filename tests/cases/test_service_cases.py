"""Cases 33 to 41: the server after an apply. Stub servers with one trouble each, and a real stock one for case 36.

Whatever goes wrong with the patched server, the user finds the files and the server of before, and it answers.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable

import pytest

from patcher.server import readiness, restart
from patcher.server.services import process
from patcher.smoke.checks import GREEDY_FALLBACK
from tests.support.command_line import Said
from tests.support.stub_host import StubHost

long = functools.partial(pytest.param, marks=pytest.mark.long)  # more of the same kind
ALL_PATHS = ["temperature", "top_k", "top_p", "top_k_top_p", "min_p"]


@pytest.fixture
def site(stub_host: StubHost, monkeypatch: pytest.MonkeyPatch) -> StubHost:
    """A stub installation, looked at more often than a real one need be."""
    monkeypatch.setattr(readiness, "POLL_S", 0.2)
    return stub_host


@pytest.fixture
def apply(site: StubHost, tool) -> Callable[..., Said]:
    """`apply("--stub-...", deadline=...)`: apply, when the patched server takes these flags and the old one did not."""

    def run(*flags: object, deadline: float = 60, paths: list[str] | None = None) -> Said:
        if paths:
            site.suite.write_text(site.suite.read_text().replace('["temperature", "top_p"]', json.dumps(paths)))
        site.files_before = site.hashes()
        site.first = site.start_server()
        site.misbehave(patched=[str(flag) for flag in flags])
        config = site.configure("local", args={"--speculative-algorithm": "DDTREE"}, deadline=deadline)
        return tool("apply", "--local", "--config", config, "--json")

    return run


class Clock:
    """Moves when someone waits, however slow this machine is. `meanwhile`: what goes on while it moves to a time.

    tick: seconds that it moves when it is read, for waits that are real.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[float], None], tick: float = 0.0) -> None:
        self.time = 0.0
        self.meanwhile, self.tick = meanwhile, tick
        wait = functools.partial(readiness.wait_ready, now=self.now, sleep=self.sleep)
        monkeypatch.setattr(restart, "wait_ready", wait)

    def now(self) -> float:
        self.time += self.tick
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.meanwhile(self.time)


def checks(said: Said) -> dict[str, dict]:
    return {check["name"]: check for check in said.host["checks"]}


def failed(said: Said) -> set[str]:
    return {name for name, check in checks(said).items() if not check["passed"]}


def is_rolled_back(site: StubHost, tool, said: Said, code: int) -> None:
    """Exit code, message, files, receipt, and which server answers."""
    assert said.code == code, said.stderr
    assert said.error["next"].startswith("everything was rolled back; ") and said.error["where"] == "local"
    assert said.host["summary"] == "rolled back: the files and the server are as before" and not said.host["changed"]
    assert {step["name"]: step["state"] for step in said.host["steps"]}["bring back the old server"] == "done"
    assert site.hashes() == site.files_before
    assert site.served_identity() is None and site.info()["speculative_algorithm"] is None, "its own command line again"
    after = tool("status", "--local", "--config", site.config, "--json")
    assert (after.host["state"], after.host["receipt_state"]) == ("pristine", "none")


# ---------------------------------------------------------------- 33


@pytest.mark.parametrize(
    "flags",
    [
        long(("--stub-start-s", 2), id="refused"),
        long(("--stub-unavailable", 8), id="503"),
        pytest.param(("--stub-start-s", 1, "--stub-unavailable", 4), id="refused, then 503"),
    ],
)
def test_case_33_readiness(site, tool, apply, flags):
    """/v1/models says 200 whenever it listens; that is no reason to go on before /health does."""
    said = apply(*flags)
    assert said.code == 0, said.stderr
    if "--stub-unavailable" in flags:
        assert "waiting for /health (HTTP 503)" in said.stderr
    assert said.stderr.index("restart and wait until ready") < said.stderr.index("waiting for first temperature")
    assert site.served_identity() == site.series.identity("temperature")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        long(("--stub-start-s", 600), "waiting for the server to listen", id="never listens"),
        long(("--stub-unavailable", 10_000), "waiting for /health (HTTP 503)", id="503 for ever"),
        pytest.param(("--stub-mode", "hangs"), "waiting for first temperature request", id="/generate hangs"),
    ],
)
def test_case_33_never_ready(site, tool, apply, monkeypatch, flags, what):

    def meanwhile(now: float) -> None:
        if "--stub-start-s" not in flags or site.hashes() == site.files_before:  # one that is going to listen
            site.wait_answer()

    Clock(monkeypatch, meanwhile, tick=1.0)
    said = apply(*flags, deadline=40)
    is_rolled_back(site, tool, said, 6)
    assert what in said.error["what"] and "the deadline of 40 s is over" in said.error["what"]
    assert "stub server" in said.error["detail"], "the last lines of its log"


# ---------------------------------------------------------------- 34


@pytest.mark.parametrize(("at", "code"), [long(1200.0, 0), long(1799.0, 0), long(1801.0, 6)])
def test_case_34_start_up_takes_minutes(site, tool, apply, monkeypatch, tmp_path, at, code):
    """The deadline is 1800 s, the default. Until second `at` of it the new server does not listen."""
    go = tmp_path / "go"

    def meanwhile(now: float) -> None:
        if now >= at:
            go.touch()
            site.wait_answer()

    Clock(monkeypatch, meanwhile)
    monkeypatch.setattr(readiness, "POLL_S", 60.0)
    said = apply("--stub-ready-file", go, deadline=1800)
    if code:
        is_rolled_back(site, tool, said, code)
        assert "1800 s is over; still waiting for the server to listen" in said.error["what"]
    else:
        assert said.code == 0, said.stderr
        assert said.host["ready"]["seconds"] >= at
        assert site.served_identity() == site.series.identity("temperature")


def test_case_34_exit_at_second_3(site, tool, apply):
    """The deadline is half an hour; the failure comes with the process's end, and shows what it said last."""
    said = apply("--stub-fail", "--stub-fail-after-s", 3, deadline=1800)
    is_rolled_back(site, tool, said, 6)
    assert "died" in said.error["what"] or "does not start" in said.error["what"]
    assert said.error["detail"].endswith("stub: no kernel image is available for execution on the device")


@pytest.mark.long
def test_case_34_neither_comes_up(site, tool, apply):
    """Exit code 8; the commands, typed as they are printed once the cause is gone, bring the old server back."""
    site.misbehave()
    site.files_before = site.hashes()
    site.start_server()
    site.misbehave(always=["--stub-fail"])
    said = tool("apply", "--local", "--config", site.configure("local"), "--json")
    assert (said.code, said.error["error"]) == (8, "RollbackFailed"), said.stderr
    assert site.hashes() == site.files_before, "the files are back all the same"
    restart, start = said.error["commands"]
    assert said.error["what"].count("ended") or said.error["what"].count("died")
    site.misbehave()
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {restart}"], capture_output=True, text=True, check=True)
    program, *options = words.stdout.splitlines()
    assert program == "ddtree-patch" and tool(*options).code == 0
    assert site.served_identity() is None
    site.stop()
    site.servers.append(
        subprocess.Popen(
            ["sh", "-c", start], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
    )
    site.wait_answer()
    assert site.served_identity() is None


# ---------------------------------------------------------------- 35


def test_case_35_another_port(site, tool, monkeypatch):
    """The operator's restart leaves the old server where it is; the new one finds the port busy and takes another."""
    monkeypatch.setattr(readiness, "OLD_LISTENER_S", 2.0)
    first = site.start_server()
    site.misbehave(always=["--stub-next-port"])
    server = f"{site.venv}/bin/python -m sglang.launch_server --port {site.port}"
    config = site.configure("local")
    config.write_text(
        config.read_text().replace(
            'kind = "process"\n[hosts.local.service.args]\n',
            f"""
kind = "command"
restart = ["sh", "-c", "cd {site.home} && exec setsid {server} >> server.log 2>&1 < /dev/null &"]
""",
        )
    )
    before = site.hashes()
    said = tool("apply", "--local", "--config", config, "--json")
    assert said.code == 6, said.stderr
    assert f"the port is held by process {first.pid} from before the restart" in said.error["what"]
    assert "; started meanwhile: pid " in said.error["next"] and server in said.error["next"]
    assert site.hashes() == before and not said.host["changed"]
    steps = {step["name"]: step["detail"] for step in said.host["steps"]}
    assert f"process {first.pid} was never ended" in steps["bring back the old server"]
    assert first.poll() is None and site.served_identity() is None


@pytest.mark.long
def test_case_35_the_port_is_another_program_s(site, tool, monkeypatch):
    """It holds the port before the new server can: nothing is started beside it, and its process is named."""
    monkeypatch.setattr(process, "GRACE_S", 10.0)
    first = site.start_server()
    config = site.configure("local")
    taker = subprocess.Popen(["python3", "-c", TAKER, str(site.port), str(first.pid)], stdout=subprocess.PIPE)
    before = site.hashes()
    said = tool("apply", "--local", "--config", config, "--json")
    taker.kill()
    taker.wait()
    assert said.code == 8, said.stderr  # neither the new nor the old server can have its port
    assert f"process {taker.pid}" in said.error["what"]
    assert site.hashes() == before
    assert tool(*said.error["commands"][0].split()[1:]).code == 0
    assert site.served_identity() is None


# Takes the port as soon as a process is gone.
TAKER = """
import os, socket, sys, time
taker = socket.socket()
taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
while True:
    try:
        taker.bind(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        time.sleep(0.001)
taker.listen()
time.sleep(600)
"""


# ---------------------------------------------------------------- 36


@pytest.mark.parametrize("mode", ["greedy-after-first", long("greedy"), long("fixed")])
def test_case_36_silently_greedy(site, tool, apply, mode):
    """HTTP 200 each time. The identical answers are named, and the line in the log."""
    said = apply("--stub-mode", mode)
    is_rolled_back(site, tool, said, 7)
    assert "diverse" in failed(said) and "diverse" in said.error["what"]
    told = "only that first token is sampled" if mode == "greedy-after-first" else "the server decodes greedily"
    assert told in said.error["detail"]
    if mode != "fixed":
        assert failed(said) == {"diverse", "no_greedy_fallback_logged"}
        assert GREEDY_FALLBACK in said.error["detail"]


@pytest.mark.long
@pytest.mark.server
def test_case_36_a_real_stock_server(target_venv, cpu_server, tool, tmp_path):
    """SGLang 0.5.11 as it is, DFLASH, on a CPU, where its sampling kernel is missing."""
    server = cpu_server(target_venv, algorithm="DFLASH")
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(f"""[hosts.local]
venv = "{target_venv}"
endpoint = {{ port = {server.port} }}
smoke = {{ suite = "tiny" }}
service = {{ kind = "command", restart = ["false"] }}
""")
    said = tool("smoke-test", "--local", "--config", hosts, "--json")
    assert said.code == 7, said.stderr
    assert "diverse" in failed(said) <= {"diverse", "no_greedy_fallback_logged"}
    assert "the server decodes greedily" in said.error["detail"] or "only that first token" in said.error["detail"]
    assert {name for name, check in checks(said).items() if check["skipped"]} == {"greedy_as_before", "patch_identity"}
    greedy = said.host["temperatures"][0]
    assert greedy["temperature"] == 0.0 and greedy["acceptance"] > 1.5
    plain = tool("smoke-test", "--local", "--config", hosts)
    assert plain.code == 7 and "diverse" in plain.stdout + plain.stderr


# ---------------------------------------------------------------- 37


@pytest.mark.parametrize(("mode", "code"), [("dies", 6), long("dies-together", 7)])
def test_case_37_sampling_kills_the_scheduler(site, tool, apply, mode, code):
    """/health was 200. The first sampled request belongs to readiness (6); what a batch brings out, to smoke (7)."""
    said = apply("--stub-mode", mode)
    is_rolled_back(site, tool, said, code)
    if code == 6:
        assert "died" in said.error["what"] and "CUDA error" in said.error["detail"]
    else:
        assert "answers" in failed(said) and "new_process" in failed(said) and "healthy_after" in failed(said)
        assert "sampling at T=1" in checks(said)["answers"]["detail"]


# ---------------------------------------------------------------- 38


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("ignores-top_k", "top_k_1_is_greedy"),
        long("ignores-top_p", "top_p_0_is_greedy"),
        long("ignores-min_p", "min_p_1_is_greedy"),
        long("fixed", "prompts_differ"),
        long("unstable", "greedy_repeatable"),
    ],
)
def test_case_38_parameters_ignored(site, tool, apply, mode, expected):
    """Each parameter at its narrowest, at T = 1, must equal greedy; different prompts must not give one output."""
    said = apply("--stub-mode", mode, paths=ALL_PATHS)
    is_rolled_back(site, tool, said, 7)
    assert expected in failed(said) and expected in said.error["what"]
    if mode.startswith("ignores"):
        assert failed(said) == {expected}


# ---------------------------------------------------------------- 39


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        long("collapses", "one at a time x"),
        ("collapses-together", "concurrent x"),
        long("accepts-nothing", "exactly 1.0: no draft token was accepted"),
        long("says-nothing", "say nothing of acceptance"),
    ],
)
def test_case_39_acceptance(site, tool, apply, mode, told):
    site.suite.write_text(site.suite.read_text().replace("max_new_tokens = 8", "max_new_tokens = 48"))
    said = apply("--stub-mode", mode)
    is_rolled_back(site, tool, said, 7)
    assert failed(said) == {"acceptance"}
    detail = checks(said)["acceptance"]["detail"]
    assert told in detail and detail in said.error["detail"]
    if "x" in told[-1]:
        assert "(below x0.25)" in detail
    if mode == "collapses-together":
        assert "one at a time x1.00" in detail


# ---------------------------------------------------------------- 40


def test_case_40_greedy_differs_from_before(site, tool, apply):
    """Where it parts from what the old server said, and that this is no matter of rounding."""
    said = apply("--stub-mode", "drifts")
    is_rolled_back(site, tool, said, 7)
    assert failed(said) == {"greedy_as_before"}
    assert "one: first difference at 2, not a near-tie (drawn " in said.error["detail"]


@pytest.mark.long
def test_case_40_a_near_tie(site, tool, apply):
    """Two correct servers may part there, so it passes, and is told all the same."""
    said = apply("--stub-mode", "near-tie")
    assert said.code == 0, said.stderr
    check = checks(said)["greedy_as_before"]
    assert check["passed"] and "one: first difference at 2, a near-tie (drawn " in check["detail"]
    assert check["figures"]["differing"] == {"one": 2, "two": 2}


@pytest.mark.long
def test_case_40_compared_with_before_the_first_apply(site, tool, apply):
    """Not with what a patched server said: a second apply keeps the outputs of the stock one."""
    assert apply().code == 0
    site.misbehave(patched=["--stub-mode", "drifts"])
    said = tool("restart", "--local", "--config", site.config, "--json")
    assert said.code == 0, said.stderr
    said = tool("smoke-test", "--local", "--config", site.config, "--json")
    assert said.code == 7 and failed(said) == {"greedy_as_before"}, said.stderr


# ---------------------------------------------------------------- 41


def test_case_41_first_requests_compile(site, tool, apply):
    """Each sampling path of the suite is asked once before the server is called ready, and the wait is shown."""
    said = apply("--stub-mode", "compiles", "--stub-compile-s", 0.6, paths=ALL_PATHS)
    assert said.code == 0, said.stderr
    assert list(said.host["ready"]["warmed"]) == ALL_PATHS
    for path in ("temperature", "top_k", "top_p", "top_k+top_p", "min_p"):
        assert f"waiting for first {path} request: kernels may compile for minutes" in said.stderr
    assert said.stderr.index("waiting for first min_p request") < said.stderr.index("smoke suite")
    log = next((site.venv / ".ddtree-patch/sglang/logs").glob("server-*.log")).read_text()
    assert log.count("stub: compiling") == len(ALL_PATHS), "and the suite met no path that had not been tried"


@pytest.mark.long
def test_case_41_a_compilation_that_outlasts_the_deadline(site, tool, apply, monkeypatch):
    Clock(monkeypatch, lambda now: site.wait_answer(), tick=1.0)
    said = apply("--stub-mode", "compiles", "--stub-compile-s", 600, deadline=40)
    is_rolled_back(site, tool, said, 6)
    assert "still waiting for first temperature request: kernels may compile" in said.error["what"]
    assert "ready.deadline" in said.error["next"]
