"""Several hosts: nothing is changed before all are prepared, one host's failure does not hide another's result."""

import io
import threading

import pytest

from patcher.errors import Drift, HostUnreachable, Interrupted, MixedOutcome, SmokeFailed
from patcher.hosts import HostSettings
from patcher.report.progress import Progress
from patcher.report.render import console_for
from patcher.rollout import lane
from patcher.rollout import run as rollout


class FakeConnection:
    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


class FakeJob:
    """Fails as its host's name says; `log` has what was done on which host."""

    def __init__(self, host, connection, result, log):
        self.host, self.result, self.log = host, result, log

    def prepare(self):
        if self.host.name.startswith("drift"):
            raise Drift("drifted", where=self.host.name)
        self.log.append(("prepare", self.host.name))

    def execute(self):
        self.log.append(("execute", self.host.name))
        if self.host.name.startswith("smoke"):
            raise SmokeFailed("greedy", where=self.host.name)
        if self.host.name.startswith("bug"):
            raise KeyError("oops")
        self.result.summary = "done"


@pytest.fixture
def connections(monkeypatch):
    """Host name -> its connection; hosts called `down` have none."""
    made = {}

    def connect(host):
        if host.name.startswith("down"):
            raise HostUnreachable("no route", where=host.name)
        made[host.name] = FakeConnection()
        return made[host.name]

    monkeypatch.setattr(lane, "connect", connect)
    return made


def run(*names, keep_going=False, job=FakeJob, batch=0, so_far=lambda outcome: None):
    log = []
    progress = Progress(console_for(io.StringIO()))
    hosts = [HostSettings(name) for name in names]
    outcome = rollout.run_on_hosts(
        "apply",
        hosts,
        lambda unit: job(unit.nodes[0].host, unit.nodes[0].reached, unit.nodes[0].result, log),
        progress,
        rollout.Rollout(keep_going=keep_going, batch=batch),
        so_far,
    )
    return outcome, log


def codes(outcome):
    return {host.host: host.error.exit_code if host.error else 0 for host in outcome.hosts}


def test_all_good(connections):
    outcome, log = run("a", "b")
    assert outcome.error is None and codes(outcome) == {"a": 0, "b": 0}
    assert {step for step, _ in log[:2]} == {"prepare"}, "every host is prepared before one is changed"
    assert all(connection.closed for connection in connections.values())


@pytest.mark.parametrize("bad", ["drift", "down"])
def test_none_is_touched_when_one_cannot_be_prepared(connections, bad):
    outcome, log = run("a", bad, "b")
    assert not [entry for entry in log if entry[0] == "execute"]
    assert isinstance(outcome.error, MixedOutcome) and outcome.error.exit_code == 10
    assert outcome.hosts[0].summary == "not touched" and bad in outcome.hosts[0].error.what


def test_keep_going_changes_the_good_ones(connections):
    outcome, log = run("a", "drift", keep_going=True)
    assert ("execute", "a") in log and codes(outcome) == {"a": 0, "drift": 4}
    assert outcome.error.exit_code == 10


def test_one_host_fails_while_it_is_changed(connections):
    outcome, _ = run("a", "smoke")
    assert codes(outcome) == {"a": 0, "smoke": 7} and outcome.error.exit_code == 10


def test_all_fail_alike(connections):
    outcome, _ = run("drift-1", "drift-2")
    assert outcome.error.exit_code == 4


def test_a_single_host_keeps_its_own_code(connections):
    assert run("down")[0].error.exit_code == 3
    assert run("smoke")[0].error.exit_code == 7


def test_a_bug_on_one_host_is_reported_with_its_trace_and_the_others_go_on(connections):
    outcome, log = run("a", "bug")
    assert ("execute", "a") in log and codes(outcome) == {"a": 0, "bug": 1}
    assert "KeyError" in outcome.hosts[1].error.detail and "Traceback" in outcome.hosts[1].error.detail


def test_an_interrupt_ends_each_job_before_its_next_step(connections, monkeypatch):
    """The job that waits is told by its own next line of progress; the one that had ended stays as it is."""
    waiting, cancelled = threading.Event(), threading.Event()
    real_cancel = Progress.cancel
    monkeypatch.setattr(Progress, "cancel", lambda self: (real_cancel(self), cancelled.set()))
    real_wait = rollout.wait

    def interrupted_wait(futures, timeout=None):
        if futures and waiting.wait(5) and not cancelled.is_set():
            raise KeyboardInterrupt
        return real_wait(futures, timeout)

    class Waiter(FakeJob):
        def prepare(self):
            waiting.set()
            cancelled.wait(10)
            self.result.tell("the next step")
            raise AssertionError("the step went on after the interrupt")

        def execute(self):
            raise AssertionError("nothing is executed after an interrupt")

    monkeypatch.setattr(rollout, "wait", interrupted_wait)
    outcome, _ = run("a", job=Waiter)
    assert isinstance(outcome.error, Interrupted) and outcome.error.exit_code == 130
    assert connections["a"].closed


def test_what_is_known_is_told_after_every_wave(connections):
    told = []
    outcome, _ = run("a", "b", "smoke", batch=1, so_far=lambda outcome: told.append(codes(outcome)))
    assert (
        told
        == [
            {"a": 130, "b": 130, "smoke": 130},
            {"a": 0, "b": 130, "smoke": 130},
            {"a": 0, "b": 0, "smoke": 130},
            {"a": 0, "b": 0, "smoke": 7},
        ]
        and codes(outcome) == told[-1]
    )


class Hung(FakeJob):
    """Host `hung` says nothing until its connection is closed, which its job takes for the end of the host."""

    reached = threading.Event()

    def __init__(self, host, connection, result, log):
        super().__init__(host, connection, result, log)
        self.connection = connection

    def execute(self):
        if self.host.name != "hung":
            return super().execute()
        with self.result.step("restart"):
            self.reached.set()
            while not self.connection.closed:
                threading.Event().wait(0.01)
            raise HostUnreachable("the connection was lost", where=self.host.name)


def ctrl_c(monkeypatch, times):
    """Ctrl-C `times` times, from the moment on when the host hangs."""
    Hung.reached.clear()
    left = [times]
    real_wait = rollout.wait

    def interrupted_wait(futures, timeout=None):
        while left[0] and not all(future.done() for future in futures):
            if Hung.reached.wait(0.01):
                left[0] -= 1
                raise KeyboardInterrupt
        return real_wait(futures, timeout)

    monkeypatch.setattr(rollout, "wait", interrupted_wait)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_a_host_hangs_exits_130_with_what_is_known_of_each(connections, monkeypatch, times):
    """The host did not end by itself: that its connection was closed is no failure of it, and not the outcome."""
    monkeypatch.setattr(rollout, "_PATIENCE", 0.05 if times == 1 else 3600)
    ctrl_c(monkeypatch, times)
    outcome, log = run("a", "hung", "later", batch=1, job=Hung)
    assert outcome.error.exit_code == 130 and "1 of 3 hosts" in outcome.error.what
    assert codes(outcome) == {"a": 0, "hung": 130, "later": 130}
    assert outcome.hosts[0].summary == "done"
    assert "restart" in outcome.hosts[1].error.what and "status" in outcome.hosts[1].error.next_step
    assert "nothing was changed here" in outcome.hosts[2].error.what and ("execute", "later") not in log
    for connection in connections.values():
        connection.close()


def test_ctrl_c_exits_130_whatever_becomes_of_the_host_meanwhile(connections, monkeypatch):
    ctrl_c(monkeypatch, 1)

    class Fails(Hung):
        def execute(self):
            self.reached.set()
            threading.Event().wait(0.1)
            raise HostUnreachable("no route", where=self.host.name)

    outcome, _ = run("a", job=Fails)
    assert codes(outcome) == {"a": 3} and outcome.error.exit_code == 130 and outcome.as_dict()["exit_code"] == 130
