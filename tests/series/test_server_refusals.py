"""A DDTREE server that must not start: one sentence says why, and nothing of it stays behind."""

import pytest
from serving import Server
from setups import RELEASES

from scripts.rig.problem import RigProblem
from scripts.rig.releases import DEFAULT

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

# The second is found out by the scheduler, in a process of its own; what is found out like the first, before there is
# one, is in test_start_up.py.
REFUSED = {
    "backend": (("--attention-backend", "torch_native"), "--attention-backend triton"),
    "threshold": (("--speculative-accept-threshold-acc", "0.5"), "need tree_speculative_sampling_target_only"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, id=one.version, marks=[] if one is DEFAULT else pytest.mark.long) for one in RELEASES],
)
def ended(request, patched_venvs, pair, tmp_path_factory):
    """{name: (what wait_ready raised, the log)} of servers that were started together."""
    folder, release = tmp_path_factory.mktemp("refused"), request.param
    venv = patched_venvs(release)
    servers = {}
    for name, (extra, _) in REFUSED.items():
        log = folder / f"{name}.log"
        servers[name] = Server(venv, log, algorithm="DDTREE", models=pair, extra=extra, release=release)
    found = {}
    try:
        for name, server in servers.items():
            with pytest.raises(RigProblem) as raised:
                server.wait_ready()
            found[name] = (str(raised.value), server.log.read_text())
    finally:
        for server in servers.values():
            server.stop()
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_a_server_that_must_not_start_says_why_and_ends(name, ended):
    problem, log = ended[name]
    assert "the server died" in problem
    sentences = {line.split("ValueError: ", 1)[1] for line in log.split("\n") if "ValueError: " in line}
    assert len(sentences) == 1, sentences
    (sentence,) = sentences
    assert REFUSED[name][1] in sentence and sentence.endswith(".")
