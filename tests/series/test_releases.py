"""Every release that has a series: its wheel patched and given back, and its servers beside what they replace.

What is tested of DDTREE besides is tested with 0.5.11.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from reference import TOKENS
from serving import PROMPTS, Server, make_pair_with_tokenizer, running

from patcher import cli
from scripts.rig import server as rig_server
from scripts.rig import target
from scripts.rig.problem import RigProblem
from scripts.rig.releases import DEFAULT, Release
from tests.support import releases
from tests.support.installations import hashes

GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
TREE = ("--speculative-ddtree-budget", "12", "--speculative-ddtree-topk", "4")


@pytest.mark.parametrize("release", releases.ALL)
def test_wheel_apply_again_revert(release: Release, tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = target.unpack_wheel(tmp_path / "site-packages", release)
    start = hashes(tree)
    for stage in ("greedy", "sampling"):
        assert tool("apply", "--site-packages", tree, "--up-to", stage).code == 0
    assert hashes(tree) != start
    assert tool("verify", "--site-packages", tree).code == 0
    assert tool("apply", "--site-packages", tree, "--json").host["plan"]["noop"]
    assert tool("revert", "--site-packages", tree).code == 0
    assert hashes(tree) == start


@dataclass(frozen=True)
class Served:
    """Servers of one patched release."""

    release: Release
    venv: Path
    plain: Server
    chain: Server
    tree: Server
    refused: str  # the log of one that must not start


@pytest.fixture(scope="module", params=[one for one in releases.ONE_A_SERIES if one.id != DEFAULT.version])
def served(request, tmp_path_factory) -> Iterator[Served]:
    release = request.param
    folder = tmp_path_factory.mktemp(f"sglang-{release.version}")
    venv = target.copy_target(folder / "venv", release)
    # Patched with an interpreter at hand: the import check runs.
    assert cli.main(["apply", "--local", "--venv", str(venv), "--no-restart"]) == 0
    pair = make_pair_with_tokenizer(folder / "pair")

    def server(name: str, algorithm: str | None, extra=()) -> Server:
        return Server(venv, folder / f"{name}.log", algorithm=algorithm, models=pair, release=release, extra=extra)

    refused = server("refused", "DDTREE", (*TREE, "--speculative-accept-threshold-acc", "0.5"))
    with pytest.raises(RigProblem, match="the server died"):
        refused.wait_ready()
    servers = server("plain", None), server("chain", "DFLASH"), server("tree", "DDTREE", TREE)
    with running(*servers):
        yield Served(release, venv, *servers, refused.log.read_text())
    shutil.rmtree(venv)


def ids(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.server
@pytest.mark.timeout(1800)
def test_a_tree_is_greedy_as_the_chain_and_plain_decoding(served: Served):
    plain = [served.plain.greedy(prompt, TOKENS) for prompt in PROMPTS]
    chain = [served.chain.greedy(prompt, TOKENS) for prompt in PROMPTS]
    tree = [served.tree.greedy(prompt, TOKENS) for prompt in PROMPTS]
    assert ids(chain) == ids(plain)
    assert ids(tree) == ids(plain)
    assert ids(served.tree.together(PROMPTS, [GREEDY] * len(PROMPTS), clients=4)) == ids(plain)
    steps = {name: sum(one["meta_info"]["spec_verify_ct"] for one in got) for name, got in (("c", chain), ("t", tree))}
    assert steps["t"] < steps["c"], "a tree needs fewer steps than its own best chain"


@pytest.mark.server
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_temperature_samples(served: Served, algorithm: str, temperature: float):
    server = getattr(served, algorithm)
    sampling = {"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
    texts = {tuple(one) for one in server.many(PROMPTS[3], [sampling] * 12)}
    assert len(texts) > 6


@pytest.mark.server
@pytest.mark.timeout(1800)
def test_a_server_that_must_not_start_says_why(served: Served):
    assert "need tree_speculative_sampling_target_only" in served.refused


@pytest.mark.server
@pytest.mark.timeout(1800)
def test_refused_requests_and_nothing_lost(served: Served):
    body = {"text": "import os", "sampling_params": {"max_new_tokens": 8, "repetition_penalty": 1.3}}
    status, answer = served.tree.ask(body)
    assert status == 400 and "repetition_penalty" in str(answer)
    for server in (served.chain, served.tree):
        server.flush()
        assert server.healthy() and "leak" not in server.log.read_text()


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
LATE_REFUSED = {  # from 0.5.18 on
    "DCP": (["--tp-size", "2", "--dcp-size", "2"], "decode context parallelism"),
    "unified memory": (["--enable-unified-memory"], "unified memory"),
    "routed experts": (["--enable-return-routed-experts"], "routed experts"),
}
BLOCK = 8  # of the draft model


@pytest.mark.server
@pytest.mark.timeout(1800)
def test_arguments_give_two_numbers_or_one_sentence(served: Served):
    late = tuple(map(int, served.release.version.split(".")[:3])) >= (0, 5, 18)
    refused = REFUSED | (LATE_REFUSED if late else {})
    argv = rig_server.command_line(served.venv, 30000, "DDTREE", release=served.release)[3:]
    cases = {
        "default": argv,
        "small letters": [*argv, "--speculative-algorithm", "ddtree"],
        "given": [*argv, *TREE, "--speculative-num-draft-tokens", "13", "--speculative-dflash-block-size", "5"],
    } | {name: [*argv, *extra] for name, (extra, _) in refused.items()}
    done = subprocess.run(
        [served.venv / "bin/python", Path(__file__).with_name("start_up.py"), json.dumps(cases)],
        env={**os.environ, **rig_server.ENVIRONMENT},
        stdout=subprocess.PIPE,
        check=True,
    )
    answers = json.loads(done.stdout.splitlines()[-1])
    assert list(answers["default"].values()) == list(answers["small letters"].values()) == [33, BLOCK, 8]
    assert list(answers["given"].values()) == [13, 5, 4]
    for name, (_, sentence) in refused.items():
        text = answers[name].get("refused", "")
        assert re.search(sentence, text), f"{name}: {text!r}"
        assert "\n" not in text and ("DDTREE" in text or "--speculative-ddtree" in text)
