"""A target of the DeepSeek-V3 and Kimi K2 family: attention over a latent (MLA), experts (MoE), random weights."""

import subprocess
from pathlib import Path

import pytest
from serving import PROMPTS, Server, running, token_ids

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
TOKENS = 32
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
TREE = ["--speculative-ddtree-budget", "32", "--speculative-ddtree-topk", "8"]


@pytest.fixture(scope="module")
def servers(patched_venv, tmp_path_factory):
    """{"plain": without speculation, "tree": DDTREE}."""
    folder = tmp_path_factory.mktemp("mla")
    pair = folder / "pair"
    make = [patched_venv / "bin/python", "-m", "scripts.gpu.make_mla_pair", pair]
    subprocess.run(make, cwd=ROOT, check=True)
    plain = Server(
        patched_venv, folder / "plain.log", algorithm=None, models=pair, extra=["--attention-backend", "triton"]
    )
    tree = Server(patched_venv, folder / "tree.log", algorithm="DDTREE", models=pair, extra=TREE)
    with running(plain, tree):
        yield {"plain": plain, "tree": tree}


def ids(answers):
    return [answer["output_ids"] for answer in answers]


def test_greedy_texts_are_plain_decodings(servers):
    expected = ids(servers["plain"].greedy(prompt, TOKENS) for prompt in PROMPTS)
    assert len({tuple(text) for text in expected}) == len(PROMPTS)  # the target listens to its context
    alone = [servers["tree"].greedy(prompt, TOKENS) for prompt in PROMPTS]
    assert ids(alone) == expected
    assert ids(servers["tree"].together(PROMPTS, [GREEDY] * len(PROMPTS), clients=4)) == expected
    # Paths of more than the root were committed.
    assert sum(answer["meta_info"]["spec_accepted_drafts"] for answer in alone) > len(PROMPTS) * TOKENS // 8


def test_what_verify_steps_left_in_the_cache_serves_longer_prompts(servers):
    for prompt in PROMPTS[:4]:
        text = servers["tree"].greedy(prompt, TOKENS)["output_ids"]
        body = {"input_ids": [*token_ids(prompt), *text[:24]], "sampling_params": GREEDY | {"max_new_tokens": 8}}
        status, answer = servers["tree"].ask(body)
        assert status == 200 and answer["meta_info"]["cached_tokens"] > len(prompt) + 15
        assert answer["output_ids"] == text[24:]


def test_texts_differ_at_a_temperature(servers):
    sampling = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    outputs = servers["tree"].many(PROMPTS[1], [sampling] * 8)
    assert len({tuple(output[1:]) for output in outputs}) == 8
    assert servers["tree"].healthy()
