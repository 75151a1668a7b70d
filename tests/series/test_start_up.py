"""The arguments of a tree in every release: what they become, or one sentence, before any process is started."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.rig import target
from scripts.rig.releases import DEFAULT
from scripts.rig.server import ENVIRONMENT, command_line
from tests.support import releases

pytestmark = pytest.mark.timeout(600)

TREE = ("--speculative-ddtree-budget", "12", "--speculative-ddtree-topk", "4")
BLOCK = 8  # of the draft model
# Arguments of a tree that cannot be, and what is said.
REFUSED = {
    "budget": (["--speculative-ddtree-budget", "0"], "--speculative-ddtree-budget must be at least 1, got 0"),
    "topk": (["--speculative-ddtree-topk", "0"], "--speculative-ddtree-topk must be at least 1, got 0"),
    "width": (["--speculative-num-draft-tokens", "9"], "derives --speculative-num-draft-tokens"),
    "block": (["--speculative-dflash-block-size", "1"], "at least 2 tokens, got 1"),
    "backend": (["--attention-backend", "torch_native"], "--attention-backend triton"),
    "pipeline": (["--pp-size", "2"], "pipeline"),
    "DP attention": (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], "DP attention"),
    "prefill": (["--disaggregation-mode", "prefill"], "disaggregation"),
    "decode": (["--disaggregation-mode", "decode"], "disaggregation"),
    "deterministic": (["--enable-deterministic-inference"], "deterministic"),
}
OF_V1 = {"page size": (["--page-size", "16"], "--page-size 1")}
FROM_0_5_18 = {
    "DCP": (["--tp-size", "2", "--dcp-size", "2"], "decode context parallelism"),
    "unified memory": (["--enable-unified-memory"], "unified memory"),
    "routed experts": (["--enable-return-routed-experts"], "routed experts"),
}
MISSING = "missing in plugins"


@pytest.fixture(scope="module", params=releases.ONE_A_SERIES)
def start_up(request, patched_venvs):
    """({name: what the release's Python says of the arguments}, {name: what is to be found in its refusal})."""
    release = request.param
    refused = dict(REFUSED)
    if release.family == "v1":
        refused |= OF_V1
    if tuple(map(int, release.version.split(".")[:3])) >= (0, 5, 18):
        refused |= FROM_0_5_18
    venv = patched_venvs(release)
    argv = command_line(venv, 30000, "DDTREE", release=release)[3:]
    cases = {
        "default": argv,
        # 0.5.11 lists the names that it takes
        "small letters": argv if release is DEFAULT else [*argv, "--speculative-algorithm", "ddtree"],
        "given": [*argv, *TREE, "--speculative-num-draft-tokens", "13", "--speculative-dflash-block-size", "5"],
    } | {name: [*argv, *extra] for name, (extra, _) in refused.items()}
    answers = ask(venv, cases) | {"missing in stock's plugins": ask(target.target_venv(release), {})[MISSING]}
    return answers, {name: sentence for name, (_, sentence) in refused.items()}


def ask(venv: Path, cases: dict[str, list[str]]) -> dict:
    done = subprocess.run(
        [venv / "bin/python", Path(__file__).with_name("start_up.py"), json.dumps(cases)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_width_block_and_candidates(start_up, request):
    answers, _ = start_up
    width = 33 if request.node.callspec.params["start_up"].family == "v1" else 32
    assert list(answers["default"].values()) == list(answers["small letters"].values()) == [width, BLOCK, 8]
    assert list(answers["given"].values()) == [13, 5, 4]


def test_what_cannot_be_is_refused_in_one_sentence(start_up):
    answers, refused = start_up
    for name, sentence in refused.items():
        text = answers[name].get("refused", "")
        assert re.search(sentence, text), f"{name}: {text!r}"
        assert "\n" not in text and ("DDTREE" in text or "--speculative-ddtree" in text)


def test_an_algorithm_of_a_plugin_answers_all_that_is_asked(start_up):
    answers, _ = start_up
    assert answers[MISSING] == answers["missing in stock's plugins"]  # 0.5.12 forgets one
