"""A DDTREE server of each setup, and everything that requests may want of it."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import chi_square
import pytest
from reference import (
    AT_THE_LIMIT,
    CONTEXT,
    DRAWS,
    KINDS,
    LAST_TOKEN,
    LENGTH,
    LONG_PROMPTS,
    LONG_TOKENS,
    SAMPLED_PROMPT,
    SOURCE,
    TOKENS,
    ask_at_the_limit,
    ask_stops,
)
from serving import PROMPTS, Server, running, token_ids
from setups import DISTRIBUTED, EVERY_COMMIT, SETUPS, params

from scripts.gpu.refusals import REQUESTS

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

END_OF_TEXT = 2
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
# So many tokens of KV that the long prompts cannot all be finished at once, and admission that thinks of prompts alone.
EXTRA = ("--max-running-requests", "16", "--max-total-tokens", "2560", "--schedule-conservativeness", "0")


@pytest.fixture(scope="module", params=params(SETUPS, EVERY_COMMIT))
def setup(request):
    return request.param


@pytest.fixture(scope="module")
def dflash(setup, stock):
    return stock(setup.release)


@pytest.fixture(scope="module")
def server(setup, reference, dflash, patched_venvs, pair, tmp_path_factory):
    log = tmp_path_factory.mktemp("serving") / "server.log"
    venv = patched_venvs(setup.release)
    started = Server(
        venv,
        log,
        algorithm="DDTREE",
        models=pair,
        extra=[*setup.tree, *EXTRA],
        environment=setup.environment,
        **setup.settings,
    )
    with running(started):
        yield started


def ids(answers):
    return [answer["output_ids"] for answer in answers]


# ---- greedy ------------------------------------------------------------------------------------------------


def test_greedy_texts_alone_are_plain_decodings_and_take_fewer_steps(server, reference, dflash):
    answers = [server.greedy(prompt, TOKENS) for prompt in PROMPTS]
    assert ids(answers) == ids(reference.plain) == ids(dflash.greedy)
    steps, dflash_steps = (
        sum(answer["meta_info"]["spec_verify_ct"] for answer in some) for some in (answers, dflash.greedy)
    )
    assert steps < 0.95 * dflash_steps


def test_greedy_texts_four_at_a_time(server, reference):
    assert ids(server.together(PROMPTS, [GREEDY] * len(PROMPTS), clients=4)) == ids(reference.plain)


def test_a_prompt_that_is_in_the_radix_cache(server, setup, reference):
    prompt = PROMPTS[10]
    server.flush()
    first, second = server.greedy(prompt, TOKENS), server.greedy(prompt, TOKENS)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] > len(prompt) // 2
    assert first["output_ids"] == second["output_ids"] == reference.plain[10]["output_ids"]
    # Its own output as prompt: KV that verify steps wrote, from slots all over the pool.
    longer = [*token_ids(prompt), *first["output_ids"][:40]]
    status, third = server.ask({"input_ids": longer, "sampling_params": GREEDY | {"max_new_tokens": 8}})
    assert status == 200 and third["meta_info"]["cached_tokens"] > len(prompt) + 31 - setup.page_size  # whole pages
    assert third["output_ids"] == first["output_ids"][40:48]


def test_a_second_turn_over_generated_text(server, setup, reference):
    """KV that verify steps wrote, and in family v2 moved, is read again."""
    for prompt, first in zip(PROMPTS, ids(reference.plain), strict=True):
        server.greedy(prompt, 40)
        body = {"input_ids": [*token_ids(prompt), *first[:40]], "sampling_params": GREEDY | {"max_new_tokens": 8}}
        status, answer = server.ask(body)
        assert status == 200 and answer["output_ids"] == first[40:48]
        assert answer["meta_info"]["cached_tokens"] >= len(token_ids(prompt)) + 40 - 2 * setup.page_size


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 13])
def test_max_new_tokens_is_exact(tokens, server, reference):
    for prompt, expected in zip(PROMPTS[:4], reference.plain, strict=False):
        assert server.greedy(prompt, tokens)["output_ids"] == expected["output_ids"][:tokens]


def test_stops_end_of_text_and_bias(server, reference):
    assert ask_stops(server) == reference.stopped
    reasons = [reason for _, reason in reference.stopped.values()]
    for matched in ("self", "\n    ", ord(" ") + 4, END_OF_TEXT):
        assert {"type": "stop", "matched": matched} in reasons, reasons


def test_more_than_fits_is_taken_back_and_finished_later(server, reference):
    sampling = {"temperature": 0, "max_new_tokens": LONG_TOKENS, "ignore_eos": True}
    answers = server.together(LONG_PROMPTS, [sampling] * len(LONG_PROMPTS), clients=16)
    assert ids(answers) == reference.long
    named = {"num_retractions", "total_retractions"} & answers[0]["meta_info"].keys()  # total_ until 0.5.12
    assert sum(answer["meta_info"][name] for answer in answers for name in named) > 0


# ---- sampled -----------------------------------------------------------------------------------------------


def test_samples_are_distributed_as_the_target_and_greedy_neighbours_stay_greedy(server, setup, reference):
    """DRAWS requests of each kind and greedy ones, all mixed, against the target's own log-probabilities."""
    kinds = KINDS if setup in DISTRIBUTED else {kind: KINDS[kind] for kind in ("T=1", "T=0.6")}
    settings = [{**one, "max_new_tokens": LENGTH, "ignore_eos": True} for one in kinds.values()]
    cycle = [*settings, {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}]
    outputs = server.many(SAMPLED_PROMPT, cycle * DRAWS)
    assert {tuple(output) for output in outputs[len(settings) :: len(cycle)]} == {
        tuple(reference.plain[PROMPTS.index(SAMPLED_PROMPT)]["output_ids"][:LENGTH])
    }
    for number, kind in enumerate(kinds):
        seen = outputs[number :: len(cycle)]
        assert len(seen) == DRAWS
        statistic, limit = against(seen, reference.sampled[kind])
        assert statistic < limit, (kind, statistic, limit)
        # The statistic can tell: what filters and temperatures gave is not what T=1 gives, nor the reverse.
        if kind != "T=1":
            statistic, limit = against(seen, reference.sampled["T=1"])
            assert statistic > limit, kind
            statistic, limit = against(outputs[:: len(cycle)], reference.sampled[kind])
            assert statistic > limit, kind


def against(outputs, exact):
    return chi_square.against(Counter(outcome(output, exact) for output in outputs), exact)


def outcome(output, exact):
    """The outcome that these tokens count for: themselves, or the prefix that stands for its continuations."""
    for length in range(LENGTH, 0, -1):
        if tuple(output[:length]) in exact:
            return tuple(output[:length])
    return tuple(output)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_texts_differ_at_a_temperature(temperature, server):
    sampling = {"temperature": temperature, "max_new_tokens": 32, "ignore_eos": True}
    outputs = server.many(PROMPTS[1], [sampling] * 16)
    assert len({tuple(output) for output in outputs}) > 8
    # Not the first token alone, which the prefill draws.
    assert len({tuple(output[1:]) for output in outputs}) > 8


def test_top_k_1_is_greedy_at_any_temperature(server, reference):
    for settings in ({"temperature": 1.0, "top_k": 1}, {"temperature": 5.0, "top_k": 1, "top_p": 0.9, "min_p": 0.1}):
        answers = server.together(PROMPTS[:6], [GREEDY | settings] * 6, clients=3)
        assert ids(answers) == ids(reference.plain[:6])


def test_greedy_requests_among_sampled_ones(server, reference):
    """Long enough that batches keep changing: requests come and go, greedy ones among them."""
    sampled = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 30, "min_p": 0.02},
    ]
    prompts, settings, expected = [], [], []
    for number, prompt in enumerate(PROMPTS):
        prompts += [prompt, prompt]
        settings += [GREEDY, GREEDY | sampled[number % 3] | {"max_new_tokens": 20 + 5 * number}]
        expected.append(reference.plain[number]["output_ids"])
    answers = server.together(prompts, settings, clients=8)
    assert ids(answers[::2]) == expected
    assert sum(a["output_ids"][:20] != e[:20] for a, e in zip(answers[1::2], expected, strict=True)) > 6


# ---- trouble -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", AT_THE_LIMIT, ids=str)
def test_up_to_the_end_of_the_context(case, server, reference):
    """The last steps have less room than a tree needs."""
    status, output = ask_at_the_limit(server, *case)
    assert (status, output) == reference.limit[AT_THE_LIMIT.index(case)]
    assert status == 200 and len(output) == LAST_TOKEN - case[0]


def test_several_at_the_end_of_the_context(server, reference):
    """What each of them reserves beyond it is nobody else's."""
    with ThreadPoolExecutor(len(AT_THE_LIMIT)) as pool:
        answers = list(pool.map(lambda case: ask_at_the_limit(server, *case), AT_THE_LIMIT * 2))
    assert answers == reference.limit * 2


def test_beyond_the_end_of_the_context(server):
    for prompt_tokens, new_tokens in ((CONTEXT - 10, 11), (CONTEXT, 1), (CONTEXT + 100, 1)):
        assert ask_at_the_limit(server, prompt_tokens, new_tokens)[0] == 400
    # Without a limit of its own a request goes on to the end.
    body = {
        "input_ids": token_ids(SOURCE[:1000]),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": None, "ignore_eos": True},
    }
    status, answer = server.ask(body)
    assert status == 200 and len(answer["output_ids"]) == LAST_TOKEN - 1001


@pytest.mark.parametrize("named", REQUESTS)
def test_what_a_tree_cannot_serve_exactly_is_a_400_that_names_it(named, server):
    body = {"input_ids": token_ids(b"import os\n"), **REQUESTS[named]}
    body["sampling_params"] = {"temperature": 1.0, "max_new_tokens": 4, **body.get("sampling_params", {})}
    status, answer = server.ask(body)
    assert status == 400 and named in json.dumps(answer), answer


def test_refusals_do_not_disturb_who_is_served(server, reference):
    def refused(number):
        body = {"input_ids": token_ids(b"x"), "sampling_params": {"max_new_tokens": 4, "presence_penalty": 1.0}}
        return server.ask(body)[0]

    with ThreadPoolExecutor(4) as pool:
        statuses = pool.map(refused, range(8))
        answers = server.together(PROMPTS[:4], [GREEDY] * 4, clients=4)
    assert ids(answers) == ids(reference.plain[:4]) and set(statuses) == {400}


def long_sampled(**more):
    sampling = {"temperature": 1.0, "max_new_tokens": 900, "ignore_eos": True}
    return {"input_ids": token_ids(PROMPTS[0]), "sampling_params": sampling, **more}


def test_logits_that_are_not_finite_end_their_request_alone(server, setup, reference):
    """A bias of infinity makes them. The request is ended for it, with nothing drawn from them; its neighbours go on.

    The prefill's sampler is SGLang's own and fails as a whole on such logits when anything is sampled in that batch, so
    the sampled neighbour is past it.
    """
    body = {"input_ids": token_ids(b"x = "), "sampling_params": {**GREEDY, "logit_bias": {"40": float("inf")}}}
    with server.under_way(long_sampled()) as neighbour, ThreadPoolExecutor(1) as pool:
        others = pool.submit(server.together, PROMPTS[:8], [GREEDY] * 8, 8)
        failed = [server.ask(body) for _ in range(3)]
        assert ids(others.result()) == ids(reference.plain[:8])
        assert neighbour.readline() == b"\n" and neighbour.readline().startswith(b"data:")  # goes on
    for status, answer in failed:
        if setup.release.family == "v1":
            assert status == 500 and "not finite" in json.dumps(answer), answer
        elif status == 400:  # later releases read no infinity in a request
            assert "JSON" in json.dumps(answer), answer
        else:  # what SGLang says of a token that is none
            reason = answer["meta_info"]["finish_reason"]
            assert status == 200 and reason == {"type": "stop", "matched": "NaN happened"}, answer
            assert len(answer["output_ids"]) <= 2
    assert server.healthy()


def test_a_request_that_is_aborted(server, reference):
    with server.under_way(long_sampled(rid="to be aborted")) as response:
        assert server.request("POST", "/abort_request", {"rid": "to be aborted"})[0] == 200
        last = [line for line in response.read().split(b"\n") if line.startswith(b"data: {")][-1]
    answer = json.loads(last.removeprefix(b"data: "))
    assert answer["meta_info"]["finish_reason"]["type"] == "abort" and answer["meta_info"]["completion_tokens"] < 900
    assert server.greedy(PROMPTS[1], TOKENS)["output_ids"] == reference.plain[1]["output_ids"]


def test_a_client_that_goes_away(server, reference):
    with server.under_way(long_sampled()):
        pass
    assert server.greedy(PROMPTS[3], TOKENS)["output_ids"] == reference.plain[3]["output_ids"]


def test_nothing_is_lost_afterwards(server, reference):
    """Last of this file. The pool is checked whenever the server is idle, and a leak would have ended it."""
    server.flush()
    assert server.healthy()
    # All of the pool is free: what fits when empty fits.
    assert server.greedy(SOURCE[:900], 100)["meta_info"]["cached_tokens"] == 0
    log = server.log.read_text()
    assert "leak" not in log and "falling back to greedy" not in log
    assert log.count("Verification at T > 0: sample-and-follow (exact).") == 1
    assert server.greedy(PROMPTS[0], TOKENS)["output_ids"] == reference.plain[0]["output_ids"]
