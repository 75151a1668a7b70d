"""The agent's replies as types: what old hosts keep is read, and what contradicts itself is refused."""

from __future__ import annotations

import pytest

from patcher.errors import BadAnswer
from patcher.wire.replies import reply_as
from patcher.wire.types import Inspection, State
from tests.support.installations import Installation

ARGS = "sglang/srt/args.py"


@pytest.fixture
def asked(tmp_path):
    """A request and the true reply of a patched tree, whose receipt has what an apply writes into it."""
    tree = Installation.tree(tmp_path)
    request = tree.request("temperature")
    told = {"series": "s", "package": "sglang", "version": "0.5.11", "by": "me", "identity": "0" * 64}
    tree.ask("commit", **{**request, "receipt": {**request["receipt"], **told, "stage": "temperature"}})
    asked = {"op": "inspect", "site_packages": str(tree.site), "paths": [ARGS]}
    return asked, tree.ask(**asked)


def test_a_receipt_is_kept_whole(asked):
    request, reply = asked
    receipt = reply_as(Inspection, request, reply, "gpu1").receipt
    assert receipt.stage == "temperature" and receipt.host.id == reply["receipt"]["host"]["id"]
    assert receipt.whole == reply["receipt"] and receipt.whole["host"]["installation"]
    renamed = receipt.at_stage("sampling")
    assert renamed.stage == renamed.whole["stage"] == "sampling" and receipt.whole["stage"] == "temperature"


def test_what_a_host_calls_whole_is_not_taken_for_the_receipt(asked):
    request, reply = asked
    reply["receipt"]["whole"] = {"files": {}}
    receipt = reply_as(Inspection, request, reply, "gpu1").receipt
    assert receipt.whole == reply["receipt"]


def test_a_receipt_of_a_version_that_wrote_less_is_read(asked):
    request, reply = asked
    for name in ("tool", "when"):
        reply["receipt"].pop(name, None)
    reply["receipt"]["host"] = {"commit_time": 1}
    receipt = reply_as(Inspection, request, reply, "gpu1").receipt
    assert receipt.host.commit_time == 1 and receipt.host.id is None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda r: r["files"].pop(ARGS), ARGS),
        (lambda r: r["files"][ARGS].update(sha256="0" * 64), f"{ARGS}: data and sha256"),
        (lambda r: r["files"][ARGS].update(data=None), f"{ARGS}: data and sha256"),
        (lambda r: r["files"][ARGS].update(data="%"), f"{ARGS}: data"),
        (lambda r: r.update(receipt=None), "receipt"),
        (lambda r: r.update(receipt_state="none"), "receipt"),
        (lambda r: r.update(receipt_state="odd"), "receipt_state"),
        (lambda r: r["receipt"]["files"].update({"sglang/x.py": {"before": None, "after": None}}), "sglang/x.py"),
        (lambda r: r["receipt"]["files"].update({"sglang/x.py": {"before": None}}), "sglang/x.py"),
        (lambda r: r.pop("root"), "root"),
        (lambda r: r.update(free_bytes=float("nan")), "free_bytes"),
    ],
)
def test_an_inspection_that_makes_no_sense_is_refused(asked, damage, said):
    request, reply = asked
    damage(reply)
    with pytest.raises(BadAnswer, match=said):
        reply_as(Inspection, request, reply, "gpu1")


def test_an_environment_has_an_interpreter(asked):
    request, reply = asked
    with pytest.raises(BadAnswer, match="interpreter"):
        reply_as(Inspection, {**request, "site_packages": None}, reply, "gpu1")


def test_every_name_that_was_asked_for_is_answered():
    with pytest.raises(BadAnswer, match="service"):
        reply_as(State, {"op": "state", "get": ["baseline", "service"]}, {"values": {"baseline": None}}, "gpu1")
