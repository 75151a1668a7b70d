"""DDTREE where the scheduler overlaps with the forward (family v2): one release, every setting that changes a step."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import chi_square
import pytest
from conftest import run_inside
from reference import (
    AT_THE_LIMIT,
    DRAWS,
    KINDS,
    LAST_TOKEN,
    LENGTH,
    LONG_PROMPTS,
    LONG_TOKENS,
    SAMPLED_PROMPT,
    TOKENS,
    Reference,
    ask_at_the_limit,
    ask_stops,
    collect,
)
from serving import PROMPTS, REFERENCE_EXTRA, Server, running, token_ids
from test_server_serving import against

from patcher import cli
from patcher.series.catalogue import catalogue, choose
from scripts.rig import target
from scripts.rig.releases import named

RELEASE = named("0.5.17")
INSIDE = Path(__file__).parent / "inside_v2"
FILES = sorted(path.name for path in INSIDE.glob("test_*.py"))
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def venv(tmp_path_factory) -> Path:
    """A copy of the release's venv after `ddtree-patch apply`."""
    made = target.copy_target(tmp_path_factory.mktemp("patched") / "venv", RELEASE)
    target.add_pytest(made)
    assert cli.main(["apply", "--local", "--venv", str(made), "--no-restart"]) == 0
    return made


# ---- inside the target's Python ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inside(venv, tmp_path_factory):
    identity = choose(catalogue(), "sglang", RELEASE.version).identity("sampling")
    return run_inside(venv, INSIDE, FILES, identity, tmp_path_factory.mktemp("inside") / "report.xml")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES)
def test_inside(file, inside):
    result = inside[file]
    assert not result.failures, "\n\n".join(f"==== {name}\n{text}" for name, text in result.failures.items())
    assert result.passed > 0


# ---- servers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How a tree is served. `retracts`: the pool does not hold the long prompts."""

    budget: int
    topk: int
    overlap: bool
    page_size: int
    retracts: bool = False

    def server(self, venv: Path, log: Path, models: Path) -> Server:
        pool = ("--max-total-tokens", "2560", "--max-running-requests", "16", "--schedule-conservativeness", "0")
        shape = ("--speculative-ddtree-budget", str(self.budget), "--speculative-ddtree-topk", str(self.topk))
        return Server(
            venv,
            log,
            algorithm="DDTREE",
            models=models,
            release=RELEASE,
            overlap=self.overlap,
            page_size=self.page_size,
            extra=(*shape, *(pool if self.retracts else ("--max-total-tokens", "16384"))),
        )


SETTINGS = {
    "overlap": Setting(16, 4, overlap=True, page_size=1, retracts=True),
    "overlap, pages, a wide tree": Setting(32, 8, overlap=True, page_size=16),
    "no overlap, pages": Setting(12, 4, overlap=False, page_size=16),
    "a tree smaller than the block": Setting(3, 4, overlap=True, page_size=4),
    "a chain": Setting(7, 1, overlap=True, page_size=1),
}


@pytest.fixture(scope="module")
def pair_with_tokenizer(pair) -> Path:
    return pair


@pytest.fixture(scope="module")
def stock(venv, pair, tmp_path_factory) -> Reference:
    """What this release answers without a tree."""
    logs = tmp_path_factory.mktemp("stock")
    plain, dflash = (
        Server(venv, logs / f"{name}.log", algorithm=name, models=pair, release=RELEASE, extra=REFERENCE_EXTRA)
        for name in (None, "DFLASH")
    )
    with running(plain, dflash):
        return collect(plain, dflash)


@dataclass(frozen=True)
class Served:
    name: str
    setting: Setting
    server: Server


@pytest.fixture(scope="module", params=SETTINGS)
def served(request, venv, stock, pair, tmp_path_factory) -> Iterator[Served]:
    setting = SETTINGS[request.param]
    server = setting.server(venv, tmp_path_factory.mktemp("served") / "server.log", pair)
    with running(server):
        yield Served(request.param, setting, server)


def ids(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


pytest_servers = [pytest.mark.server, pytest.mark.timeout(1800)]


def server_test(function):
    for mark in pytest_servers:
        function = mark(function)
    return function


@server_test
def test_greedy_texts_are_plain_decodings(served, stock):
    assert ids(stock.dflash) == ids(stock.plain)
    alone = [served.server.greedy(prompt, TOKENS) for prompt in PROMPTS]
    assert ids(alone) == ids(stock.plain)
    assert ids(served.server.together(PROMPTS, [GREEDY] * len(PROMPTS), clients=4)) == ids(stock.plain)
    steps, stock_steps = (
        [(one["meta_info"]["spec_verify_ct"], one["meta_info"]["spec_num_correct_drafts"]) for one in some]
        for some in (alone, stock.dflash)
    )
    if served.setting.topk == 1:
        assert steps == stock_steps, "a chain accepts exactly what DFLASH accepts"
    elif served.setting.budget >= 12:
        assert sum(count for count, _ in steps) < 0.95 * sum(count for count, _ in stock_steps)


@server_test
def test_a_second_turn_over_generated_text(served, stock):
    """KV that verify steps wrote and moved is read again from the cache."""
    for prompt, first in zip(PROMPTS, ids(stock.plain), strict=True):
        body = {"input_ids": [*token_ids(prompt), *first[:40]], "sampling_params": GREEDY | {"max_new_tokens": 8}}
        status, answer = served.server.ask(body)
        assert status == 200 and answer["output_ids"] == first[40:48]
        assert answer["meta_info"]["cached_tokens"] >= len(token_ids(prompt)) + 40 - 2 * served.setting.page_size


@server_test
def test_stops_and_biases(served, stock):
    assert ask_stops(served.server) == stock.stopped


@server_test
def test_up_to_the_end_of_the_context(served, stock):
    """The last steps reserve more than the context has room for, several requests at a time."""
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda case: ask_at_the_limit(served.server, *case), AT_THE_LIMIT * 3))
    assert answers == stock.limit * 3
    assert all(len(output) == LAST_TOKEN - case[0] for case, (_, output) in zip(AT_THE_LIMIT, answers, strict=False))


@server_test
def test_more_than_run_at_a_time(served, stock):
    sampling = {"temperature": 0, "max_new_tokens": LONG_TOKENS, "ignore_eos": True}
    answers = served.server.together(LONG_PROMPTS, [sampling] * len(LONG_PROMPTS), clients=16)
    assert ids(answers) == stock.long
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert (retractions > 0) == served.setting.retracts


@server_test
def test_samples_are_distributed_as_the_target_and_greedy_neighbours_stay_greedy(served, stock):
    if served.name not in ("overlap", "no overlap, pages"):
        pytest.skip("the distribution does not depend on it")
    settings = [{**one, "max_new_tokens": LENGTH, "ignore_eos": True} for one in KINDS.values()]
    cycle = [*settings, {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}]
    outputs = served.server.many(SAMPLED_PROMPT, cycle * DRAWS)
    greedy = stock.plain[PROMPTS.index(SAMPLED_PROMPT)]["output_ids"][:LENGTH]
    assert {tuple(output) for output in outputs[len(settings) :: len(cycle)]} == {tuple(greedy)}
    for number, kind in enumerate(KINDS):
        statistic, limit = against(outputs[number :: len(cycle)], stock.sampled[kind])
        assert statistic < limit, (kind, statistic, limit)
        if kind != "T=1":  # the statistic can tell: a biased rule fails
            statistic, limit = against(outputs[number :: len(cycle)], stock.sampled["T=1"])
            assert statistic > limit, kind


@server_test
def test_a_long_text_is_sampled_and_its_greedy_neighbours_stay_greedy(served, stock):
    sampled = GREEDY | {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02}
    settings = [GREEDY if number % 2 else sampled for number in range(24)]
    prompts = [PROMPTS[number % 12] for number in range(24)]
    outputs = ids(served.server.together(prompts, settings, clients=8))
    assert outputs[1::2] == [stock.plain[number % 12]["output_ids"] for number in range(1, 24, 2)]
    assert len(Counter(map(tuple, outputs[0:12:2]) | Counter(map(tuple, outputs[12::2])))) > 6


@server_test
def test_logits_that_are_not_finite_end_their_request_alone(served, stock):
    """A bias of infinity makes them. The step after is already under way when the scheduler learns of it."""
    body = {"input_ids": token_ids(b"x = "), "sampling_params": {**GREEDY, "logit_bias": {"40": float("inf")}}}
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(served.server.together, PROMPTS[:8], [GREEDY] * 8, 8)
        failed = [served.server.ask(body) for _ in range(3)]
        assert ids(others.result()) == ids(stock.plain[:8])
    for status, answer in failed:
        assert status == 200, answer
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "NaN happened"}
        assert len(answer["output_ids"]) <= 2
    assert served.server.healthy()


@server_test
@pytest.mark.parametrize(
    "refused",
    [{"sampling_params": {"repetition_penalty": 1.3}}, {"sampling_params": {"regex": "a+"}}, {"return_logprob": True}],
    ids=str,
)
def test_what_a_tree_cannot_serve_exactly_is_a_400(refused, served):
    body = {"input_ids": token_ids(b"x"), **refused}
    status, answer = served.server.ask(
        body | {"sampling_params": {"max_new_tokens": 4, **body.get("sampling_params", {})}}
    )
    assert status == 400 and "does not support" in json.dumps(answer)


@server_test
def test_a_client_that_goes_away(served, stock):
    long = {"temperature": 1.0, "max_new_tokens": 900, "ignore_eos": True}
    for _ in range(2):
        with served.server.under_way({"input_ids": token_ids(PROMPTS[0]), "sampling_params": long}):
            pass
    assert served.server.greedy(PROMPTS[3], TOKENS)["output_ids"] == stock.plain[3]["output_ids"]


@server_test
def test_nothing_is_lost_afterwards(served):
    """Last of this file. The pool is checked whenever the server is idle, and a leak would have ended it."""
    served.server.flush()
    assert served.server.healthy() and "leak" not in served.server.log.read_text()
