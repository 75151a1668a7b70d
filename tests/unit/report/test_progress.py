"""Progress: waits do not flood a log, and an interrupt arrives at the next line."""

import io

import pytest

from patcher.errors import Interrupted
from patcher.report.progress import REPEAT_S, Progress
from patcher.report.render import console_for


def test_a_wait_is_repeated_now_and_then_only():
    stream, clock = io.StringIO(), [0.0]
    tell = Progress(console_for(stream), lambda: clock[0]).for_host("gpu")
    for second in range(0, 61, 2):
        clock[0] = float(second)
        tell(f"waiting for the server to listen, {second} s so far")
    assert len(stream.getvalue().splitlines()) == 1 + 60 // REPEAT_S
    tell("smoke suite")
    assert stream.getvalue().endswith("gpu: smoke suite\n")


def test_hosts_do_not_silence_each_other():
    stream = io.StringIO()
    progress = Progress(console_for(stream))
    for name in ("a", "b"):
        progress.for_host(name)("plan")
    assert stream.getvalue() == "a: plan\nb: plan\n"


def test_after_cancel_the_next_line_raises_also_one_that_would_not_be_printed():
    progress = Progress(console_for(io.StringIO()))
    tell = progress.for_host("gpu")
    tell("waiting, 1 s so far")
    progress.cancel()
    with pytest.raises(Interrupted, match="stopped before its next step"):
        tell("waiting, 2 s so far")
