"""A result as text, JSON and JUnit: host data is never markup; no assurance is claimed that was not given."""

import io
import json
import os
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from patcher.commands.findings import RoundTrips, Smoked, State
from patcher.errors import Drift, KernelProblem, RollbackFailed, SmokeFailed, UsageProblem
from patcher.plan.states import FileState
from patcher.report.file import ReportFile
from patcher.report.findings import Facts, Finding
from patcher.report.junit import to_junit
from patcher.report.outcome import FAILED, SKIPPED, HostResult, Outcome, Step
from patcher.report.render import console_for, error_to_json, print_error, print_outcome, to_json
from patcher.smoke.result import Check, SmokeResult, TemperatureRow


def text_of(outcome: Outcome, detail: bool = False) -> str:
    stream = io.StringIO()
    print_outcome(outcome, console_for(stream), detail)
    return stream.getvalue()


def with_findings(name: str, *findings: Finding, error=None) -> HostResult:
    result = HostResult(name, error=error)
    for finding in findings:
        result.keep(finding)
    return result


def smoked(*checks: Check, detail: bool = False) -> Smoked:
    row = TemperatureRow(0.6, 1, 8, 2.8123456, None, None, None, None, None, None, False)
    return Smoked(SmokeResult("tiny", checks, (row,)), detail)


def failed(name: str, error) -> HostResult:
    return HostResult(name, error=error)


def test_step_records_time_and_failure_and_lets_the_exception_pass():
    told = []
    result = HostResult("h", tell=told.append)
    with result.step("inspect") as step:
        step.detail = "sglang 0.5.11"
    with pytest.raises(ValueError), result.step("commit"):
        raise ValueError("boom")
    result.skip("restart", "--no-restart was given")
    assert told == ["inspect", "commit"]
    assert [(s.name, s.state) for s in result.steps] == [("inspect", "done"), ("commit", FAILED), ("restart", SKIPPED)]
    assert result.steps[1].detail == "boom" and result.not_done == ["restart: --no-restart was given"]


def test_json_is_one_document_with_a_fixed_shape():
    good = HostResult("a", summary="patched", changed=True)
    good.keep(RoundTrips(4, None))
    document = json.loads(to_json(Outcome("apply", (good,))))
    assert set(document) == {"ok", "command", "tool", "exit_code", "hosts", "error"}
    assert set(document["hosts"][0]) == {
        "host",
        "ok",
        "summary",
        "changed",
        "steps",
        "not_done",
        "error",
        "round_trips",
    }
    assert document["ok"] is True and document["exit_code"] == 0 and document["error"] is None
    early = json.loads(error_to_json(Drift("x.py differs", where="h", next_step="restore it"), "apply"))
    assert early["ok"] is False and early["hosts"] == [] and early["exit_code"] == 4
    assert early["error"] == {
        "error": "Drift",
        "what": "x.py differs",
        "where": "h",
        "next": "restore it",
        "detail": "",
        "exit_code": 4,
    }


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([None, None], 0),
        ([Drift("d"), None], 10),
        ([Drift("d"), SmokeFailed("s")], 10),
        ([Drift("d"), Drift("e")], 4),
        ([SmokeFailed("s")], 7),
    ],
)
def test_exit_code_of_several_hosts(errors, code):
    outcome = Outcome("apply", tuple(failed(f"h{i}", error) for i, error in enumerate(errors)))
    assert outcome.as_dict()["exit_code"] == code
    assert outcome.as_dict()["ok"] is (code == 0)


def test_text_is_ascii_without_markup_or_control_characters():
    result = HostResult("h[bold]", summary="caf\u00e9 [red]done[/red] \x1b[31m", not_done=["smoke: --no-smoke"])
    shown = text_of(Outcome("apply", (result, HostResult("other"))))
    assert shown.isascii() and "\x1b" not in shown
    assert "h[bold]" in shown and "[red]done[/red]" in shown and "not done: smoke: --no-smoke" in shown


def test_the_result_comes_first_one_line_a_host_then_what_was_not_done():
    good = HostResult("a", summary="patched", not_done=["restart: --no-restart was given"])
    with good.step("commit") as step:
        step.detail = "27 files written"
    bad = HostResult("b", summary="rolled back", error=Drift("drifted"))
    lines = text_of(Outcome("apply", (good, bad))).splitlines()
    assert lines[:2] == ["a: patched", "b: rolled back"]
    assert lines[2] == "not done: restart: --no-restart was given (a)" and not any("27 files" in line for line in lines)
    assert "27 files written" in text_of(Outcome("apply", (good, bad)), detail=True)


def test_what_an_error_or_a_line_says_is_not_said_again_by_its_step():
    host = HostResult("a", error=Drift("drifted"))
    host.steps.append(Step("plan", FAILED, "drifted"))
    host.skip("restart", "--no-restart was given")
    shown = text_of(Outcome("apply", (host,)), detail=True)
    assert "drifted" not in shown and shown.count("--no-restart was given") == 1


def test_files_are_shown_where_they_are_asked_for_or_stand_out():
    files = [FileState("pkg/a.py", "a" * 64, ("pristine",)), FileState("pkg/b.py", "b" * 64, ())]
    result = with_findings("h", State("pristine", "s", files))
    assert "pkg/b.py" in text_of(Outcome("status", (result,)))
    assert all(line == line.rstrip() for line in text_of(Outcome("status", (result,)), detail=True).splitlines())
    assert "pkg/a.py" not in text_of(Outcome("status", (result,)))
    assert "aaaaaaaaaaaa" in text_of(Outcome("status", (result,)), detail=True)
    assert [row["state"] for row in result.as_dict()["files"]] == ["pristine", "unknown"]


@pytest.mark.parametrize("detail", [False, True])
def test_checks_are_shown_by_the_command_that_is_for_them(detail):
    facts = Facts()
    facts.add("installed", "sglang 0.5.11")
    failed_check = Check("diverse", False, "16 equal texts")
    result = with_findings("h", facts, smoked(failed_check, detail=detail))
    shown = text_of(Outcome("x", (result,)))
    assert "sglang 0.5.11" in shown
    assert [word in shown for word in ("FAIL", "16 equal texts", "2.812")] == [not detail] * 3
    assert result.as_dict()["facts"] == {"installed": "sglang 0.5.11"} and result.as_dict()["suite"] == "tiny"


def test_error_text_has_what_where_next_and_the_commands_on_lines_of_their_own():
    stream = io.StringIO()
    long_command = "python3 -m sglang.launch_server " + " ".join(f"--flag-{i} value" for i in range(40))
    error = RollbackFailed(
        "the old server did not start", where="h", next_step="run these", commands=[long_command], detail="last line\n"
    )
    print_error(error, console_for(stream))
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["error: the old server did not start", "  where: h", "  next: run these"]
    assert f"    {long_command}" in lines, "a command that is wrapped cannot be copied"


def test_commands_that_only_a_failure_of_the_others_needs_are_printed_as_such():
    stream = io.StringIO()
    error = RollbackFailed("down", commands=["ddtree-patch restart --local"], last_resort=["systemctl restart sglang"])
    print_error(error, console_for(stream))
    assert stream.getvalue().splitlines()[1:] == [
        "    ddtree-patch restart --local",
        "  only if the last of these fails, and on the host itself:",
        "    systemctl restart sglang",
    ]
    assert error.as_dict()["commands"] == ["ddtree-patch restart --local", "systemctl restart sglang"]
    assert error.as_dict()["last_resort"] == ["systemctl restart sglang"]


def test_terminal_output_keeps_unicode():
    stream = io.StringIO()
    print_error(Drift("caf\u00e9"), Console(file=stream, force_terminal=True, markup=False))
    assert "caf\u00e9" in stream.getvalue()


def test_junit_has_a_case_a_check_and_an_error_where_nothing_was_checked():
    checks = Check("repeatable", True), Check("diverse", False, "equal \x00 texts")
    checked = with_findings("a", smoked(*checks), error=SmokeFailed("1 of 2 checks failed"))
    broken = HostResult("b", error=KernelProblem("no op"))
    root = ET.fromstring(to_junit(Outcome("smoke-test", (checked, broken))))
    first, second = root.findall("testsuite")
    assert (first.get("tests"), first.get("failures"), first.get("errors")) == ("2", "1", "0")
    assert (second.get("tests"), second.get("failures"), second.get("errors")) == ("1", "0", "1")
    assert second.find("testcase/error").get("type") == "KernelProblem"


def test_junit_of_a_command_without_checks_uses_its_steps():
    result = HostResult("a")
    with result.step("inspect"):
        pass
    root = ET.fromstring(to_junit(Outcome("apply", (result,))))
    assert [case.get("name") for case in root.iter("testcase")] == ["inspect"]


def test_junit_tells_what_was_skipped_and_is_xml_whatever_the_names_are():
    odd = HostResult("a\x01b<&\x1b[31m\udcff")
    odd.skip("smoke suite", "another host answers")
    root = ET.fromstring(to_junit(Outcome("smoke-test", (odd,))))
    (suite,) = root
    assert suite.get("skipped") == "1" and suite.get("name").startswith("a?b<&?[31m")
    assert suite.find("testcase/skipped").get("message") == "another host answers"


@pytest.mark.parametrize(
    ("path", "why"),
    [("missing/report.xml", "directory does not exist"), (".", "is a directory"), ("/proc/report.xml", "cannot write")],
)
def test_a_report_nowhere_is_refused(tmp_path, path, why):
    with pytest.raises(UsageProblem, match=why):
        ReportFile(tmp_path / path, to_junit)
    assert not list(tmp_path.iterdir())


def test_a_report_stays_whole_and_a_link_to_it_stays_one(tmp_path):
    (tmp_path / "real.xml").write_text("of last week")
    (tmp_path / "real.xml").chmod(0o640)
    link = tmp_path / "report.xml"
    link.symlink_to("real.xml")
    report = ReportFile(link, to_junit)
    for outcome in (Outcome("apply"), Outcome("apply", (HostResult("a"),))):
        report.keep(outcome)
        assert link.read_bytes() == to_junit(outcome) and report.failure is None
    assert link.is_symlink() and (tmp_path / "real.xml").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["real.xml", "report.xml"]


def test_a_pipe_gets_one_report(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    report = ReportFile(pipe, to_junit)
    report.keep(Outcome("apply", (HostResult("a"),)))
    report.write(Outcome("apply"))
    assert os.read(reader, 1 << 16) == to_junit(Outcome("apply")) and pipe.is_fifo()
    os.close(reader)
