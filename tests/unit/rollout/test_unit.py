"""A unit of hosts: a phase runs on all of them at once, and what one does is taken back when another fails."""

import threading

import pytest

from patcher.errors import Drift, HostUnreachable, Interrupted, NotReady
from patcher.report.outcome import FAILED, HostResult
from patcher.rollout.unit import Abandoned, NodeFailed, PhaseFailed, Unit


class Host:
    def __init__(self, name: str) -> None:
        self.result = HostResult(name)


def unit(*names: str) -> Unit[Host]:
    return Unit([Host(name) for name in names])


def only(name: str, error: Exception):
    def phase(node: Host) -> str:
        if node.result.host == name:
            raise error
        return node.result.host

    return phase


def test_a_phase_runs_on_all_nodes_at_the_same_time():
    meeting = threading.Barrier(3, timeout=10)
    assert unit("a", "b", "c").each(lambda node: meeting.wait() >= 0 and node.result.host) == ["a", "b", "c"]


@pytest.mark.parametrize("names", [("bad",), ("good", "bad"), ("bad", "good", "other")])
def test_all_fail_when_one_does_and_each_has_an_error_of_its_own(names):
    with pytest.raises(PhaseFailed) as caught:
        unit(*names).each(only("bad", Drift("drifted", where="bad")))
    errors = caught.value.errors
    assert set(errors) == set(names) and isinstance(errors["bad"], Drift)
    others = [errors[name] for name in names if name != "bad"]
    assert all(isinstance(error, NodeFailed) and error.exit_code == Drift.exit_code for error in others)


def test_a_bug_in_a_phase_is_an_error_of_its_host():
    with pytest.raises(PhaseFailed) as caught:
        unit("a", "bad").each(only("bad", KeyError("oops")))
    assert caught.value.errors["bad"].exit_code == 1 and "KeyError" in caught.value.errors["bad"].detail


def test_only_what_was_done_is_undone_and_a_failure_to_undo_counts_for_its_host():
    undone = []

    def undo(node: Host, why: NodeFailed) -> None:
        undone.append((node.result.host, why.cause.what))
        if node.result.host == "c":
            raise NotReady("stuck", where="c")

    with pytest.raises(PhaseFailed) as caught:
        unit("a", "bad", "c").each(only("bad", Drift("drifted")), undo=undo)
    assert sorted(undone) == [("a", "drifted"), ("c", "drifted")]
    assert [type(error) for error in caught.value.errors.values()] == [NodeFailed, Drift, NotReady]


def test_who_waits_ends_as_soon_as_the_head_is_ready():
    def phase(node: Host, over: threading.Event) -> str:
        return "ready" if node.result.host == "head" else "watched" if over.wait(10) else "late"

    assert unit("head", "a", "b").until_one(phase) == ["ready", "watched", "watched"]


def test_a_watcher_that_fails_ends_the_wait_for_the_head():
    def phase(node: Host, over: threading.Event) -> None:
        if node.result.host == "a":
            raise NotReady("died", where="a")
        assert over.wait(10)
        raise Abandoned

    with pytest.raises(PhaseFailed) as caught:
        unit("head", "a").until_one(phase)
    assert [type(error) for error in caught.value.errors.values()] == [NodeFailed, NotReady]


def test_a_step_of_all_hosts_tells_each_one_its_own_error():
    both = unit("a", "bad")
    with pytest.raises(PhaseFailed), both.step("commit"):
        both.each(only("bad", HostUnreachable("no route")))
    (one,), (other,) = (node.result.steps for node in both.nodes)
    assert (one.state, one.detail) == (FAILED, "node bad of the same server failed")
    assert (other.state, other.detail) == (FAILED, "no route")


def test_an_interrupt_at_a_step_of_all_hosts_is_the_error_of_all():
    both = unit("a", "b")

    def stopped(text: str) -> None:
        raise Interrupted("stopped")

    both.nodes[1].result.tell = stopped
    with pytest.raises(PhaseFailed) as caught, both.step("restart"):
        raise AssertionError("the step went on after the interrupt")
    assert {error.exit_code for error in caught.value.errors.values()} == {130}
    assert [step.state for step in both.nodes[0].result.steps] == [FAILED]
