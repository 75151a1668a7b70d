"""Run by the target venv's Python (see ../test_inside_target.py): the patched SGLang is imported here, no server."""

from types import SimpleNamespace

import fakes
import pytest
import torch
from sglang.srt import server_args
from sglang.srt.speculative import dflash_release, dflash_verify_op


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261129)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """The server's arguments, as far as the code under test reads them; tests may change them."""
    values = SimpleNamespace(
        sampling_backend="pytorch",
        enable_deterministic_inference=False,
        enable_custom_logit_processor=False,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
    )
    monkeypatch.setattr(server_args, "_global_server_args", values)
    return values


@pytest.fixture(autouse=True)
def tp_group(monkeypatch):
    group = fakes.FakeTpGroup()
    monkeypatch.setattr(dflash_release, "get_tp_group", lambda: group)
    return group


@pytest.fixture
def no_op(monkeypatch):
    """As on hardware without the op: sample-and-follow."""
    monkeypatch.setattr(dflash_verify_op, "VERIFY_OP", None)


@pytest.fixture
def install_op(monkeypatch):
    """install_op(op): as on hardware with the op, which is `op`."""

    def install(op):
        monkeypatch.setattr(dflash_verify_op, "VERIFY_OP", op)
        monkeypatch.setattr(dflash_verify_op, "_SCRATCH", {})
        return op

    return install


@pytest.fixture(params=["sample-and-follow", "op by stand-in"])
def decide_path(request):
    """Both ways of deciding at T > 0."""
    if request.param == "sample-and-follow":
        request.getfixturevalue("no_op")
    else:
        request.getfixturevalue("install_op")(fakes.FakeTreeSamplingOpByReferenceWalk())
    return request.param
