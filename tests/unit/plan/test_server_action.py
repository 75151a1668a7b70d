"""What happens to a server: to that of all nodes, or of none; shown without secrets."""

import json

import pytest

from patcher.plan.server_action import NO_SERVER, RESTART, SMOKE, LeftOut, ServerAction, ServerFound, decide

RUNS = ServerFound((7, 70), ("python3", "--api-key", "s3cret"))
STALE = ServerFound((8, 80), ("python3",), need="its files change")
ABSENT = ServerFound(why_not=NO_SERVER)
DOWN = ServerFound(line=("python3",), need="an earlier command had stopped it")
FORBIDDEN = ServerFound(why_not="--no-restart was given")


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        ([RUNS], ["none"]),
        ([STALE], ["restart"]),
        ([DOWN], ["start"]),
        ([ABSENT], ["none"]),
        ([RUNS, STALE], ["restart", "restart"]),
        ([STALE, DOWN], ["restart", "start"]),
        ([STALE, ABSENT], ["none", "none"]),
        ([STALE, FORBIDDEN], ["none", "none"]),
        ([RUNS, RUNS], ["none", "none"]),
    ],
)
def test_all_nodes_of_a_server_are_restarted_or_none(found, kinds):
    actions = decide(found, [[]] * len(found), "it runs the patched files")
    assert [action.kind for action in actions] == kinds
    blocked = any(one.why_not for one in found)
    assert {action.is_blocked for action in actions} == {blocked}
    assert all(action.why for action in actions), "there is a reason for whatever is done, and for what is not"


def test_what_is_left_out_is_told_once_with_its_reason():
    (action,) = decide([FORBIDDEN], [[]])
    assert action.followed_by((), [LeftOut(SMOKE, action.why)]).left_out == (
        LeftOut(RESTART, "--no-restart was given"),
        LeftOut(SMOKE, "--no-restart was given"),
    )


def test_a_plan_shows_the_process_and_no_command_line():
    (action,) = decide([RUNS], [[]])
    shown = json.dumps(action.as_dict())
    assert "s3cret" not in shown and "s3cret" not in repr(action)
    assert json.loads(shown)["before"] == {"pid": 7, "ticks": 70}


def test_in_words():
    restart = ServerAction("restart", "its files change", (7, 70), ("--flag", "a b"))
    assert str(restart) == "process 7 would be restarted with --flag 'a b', because its files change"
    assert str(ServerAction("none", NO_SERVER)) == NO_SERVER
