"""Failures are not changed once they were raised: what follows from one is another, which has it as its cause."""

import pytest

from patcher.errors import Locked, RollbackFailed, RolledBack, SmokeFailed


def test_a_rollback_is_told_with_its_cause():
    cause = SmokeFailed("the suite failed", where="gpu1", next_step="see the log", detail="diverse: equal")
    told = RolledBack(cause, "everything was rolled back").as_dict()
    assert told == cause.as_dict() | {"next": "everything was rolled back; see the log"}
    assert RolledBack(SmokeFailed("x"), "everything was rolled back").next_step == "everything was rolled back"
    assert cause.next_step == "see the log"


@pytest.mark.parametrize("error", [Locked("held", where="h"), RollbackFailed("down", commands=["restart"])])
def test_the_same_failure_with_other_texts_leaves_the_first_as_it_was(error):
    before = error.as_dict()
    other = error.but(next_step="wait")
    assert error.as_dict() == before and type(other) is type(error)
    assert other.as_dict() == before | {"next": "wait"}
