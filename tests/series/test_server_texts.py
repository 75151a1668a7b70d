"""Greedy texts of DDTREE servers are those of DFLASH and of decoding without speculation."""

import pytest
from reference import TOKENS, ask_long, ask_stops
from serving import PROMPTS, Server, running, token_ids
from setups import DEFAULTS, EVERY_COMMIT, params

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

SHAPES = {
    "dflash": ("DFLASH", ()),  # the release's own chain, which the series makes exact
    "chain": ("DDTREE", ("--speculative-ddtree-budget", "7", "--speculative-ddtree-topk", "1")),  # the same as a tree
    "small": ("DDTREE", ("--speculative-ddtree-budget", "3", "--speculative-ddtree-topk", "4")),  # less than a block
}
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module", params=params(DEFAULTS, EVERY_COMMIT))
def setup(request):
    """Overlap wherever the release has it, since that is what it does unless told otherwise."""
    return request.param


@pytest.fixture(scope="module")
def dflash(setup, stock):
    return stock(setup.release)


@pytest.fixture(scope="module")
def servers(setup, reference, dflash, patched_venvs, pair, tmp_path_factory):
    """All shapes, at the same time."""
    logs, venv = tmp_path_factory.mktemp("texts"), patched_venvs(setup.release)
    started = {
        name: Server(venv, logs / f"{name}.log", algorithm=algorithm, models=pair, extra=extra, **setup.settings)
        for name, (algorithm, extra) in SHAPES.items()
    }
    with running(*started.values()):
        yield started


def ids(answers):
    return [answer["output_ids"] for answer in answers]


def test_dflash_and_plain_decoding_agree(reference, dflash):
    """Or nothing below would mean anything."""
    assert len(PROMPTS) >= 10 and all(len(output) == TOKENS for output in ids(reference.plain))
    assert ids(dflash.greedy) == ids(reference.plain)


def test_stock_dflash_is_greedy_at_temperature_1(dflash):
    """The failure that this project is for: 200, and the same text every time.

    The prefill samples the first token; from there on nothing is random any more.
    """
    assert len({tuple(output) for output in dflash.sampled}) == len({output[0] for output in dflash.sampled})


@pytest.mark.parametrize("shape", SHAPES)
def test_alone(shape, servers, reference):
    assert ids(servers[shape].greedy(prompt, TOKENS) for prompt in PROMPTS) == ids(reference.plain)


@pytest.mark.parametrize("shape", SHAPES)
def test_four_at_a_time(shape, servers, reference):
    answers = servers[shape].together(PROMPTS, [GREEDY] * len(PROMPTS), clients=4)
    assert ids(answers) == ids(reference.plain)


@pytest.mark.parametrize("shape", ["dflash", "chain"])
def test_a_chain_accepts_what_stock_dflash_accepts(shape, servers, dflash):
    """Step by step: the same number of verify steps for every prompt."""
    for prompt, expected in zip(PROMPTS, dflash.greedy, strict=True):
        answer = servers[shape].greedy(prompt, TOKENS)
        for figure in ("spec_verify_ct", "spec_accept_length"):
            assert answer["meta_info"][figure] == expected["meta_info"][figure], (prompt, figure)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_texts_differ_at_a_temperature(shape, temperature, servers):
    sampling = {"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
    outputs = servers[shape].many(PROMPTS[1], [sampling] * 16)
    # The prefill draws the first token: a server that is greedy after it has one text for each of these.
    assert len({tuple(output) for output in outputs}) > len({output[0] for output in outputs})


def test_stops(servers, reference):
    assert ask_stops(servers["small"]) == reference.stopped


def test_more_requests_than_run_at_a_time(servers, reference):
    assert ask_long(servers["small"], clients=16) == reference.long


@pytest.mark.parametrize("refused", [{"min_new_tokens": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_a_refusal_harms_no_server_without_a_tokenizer(refused, servers):
    server = servers["small"]
    body = {"input_ids": token_ids(b"import os\n"), "sampling_params": {"max_new_tokens": 8, **refused}}
    status, answer = server.ask(body)
    assert status == 400 and next(iter(refused)) in str(answer)
    assert server.healthy()


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_lost_afterwards(shape, servers):
    """Last of this file. The pool is checked whenever the server is idle, and a leak would have ended it."""
    assert servers[shape].healthy()
    servers[shape].flush()
    assert servers[shape].healthy() and "leak" not in servers[shape].log.read_text()
