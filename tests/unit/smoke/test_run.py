"""The smoke suite against stub servers: one that samples passes, every way of not sampling fails by its own check."""

import pytest
from msgspec.structs import replace

from patcher.errors import SmokeFailed, UsageProblem
from patcher.server.client import SglangClient
from patcher.smoke.baseline import record_baseline
from patcher.smoke.checks import distinct_after_equal_first
from patcher.smoke.divergence import examine, first_difference
from patcher.smoke.run import CHECKS, run_suite
from patcher.smoke.suite import Prompt, load_suite
from patcher.ssh.connection import LocalConnection
from tests.support.fake_service import FakeService, process
from tests.support.stub_sglang import GREEDY_FALLBACK, StubServer

SUITE = replace(load_suite("tiny"), max_new_tokens=24, timeout=10.0)


def run(stub, **options):
    client = SglangClient(LocalConnection(), "127.0.0.1", stub.port)
    return run_suite(client, options.pop("suite", SUITE), **options)


def failed(result):
    return {check.name for check in result.failed}


def check(result, name):
    return next(check for check in result.checks if check.name == name)


def test_a_server_that_samples_passes():
    with StubServer(identity="abc") as stub:
        result = run(stub, service=FakeService(process()), started_after=400.0, identity="abc")
    assert result.passed, failed(result)
    assert [c.name for c in result.checks] == list(CHECKS)
    assert [c.name for c in result.checks if c.skipped] == ["greedy_as_before"]
    assert [row.temperature for row in result.rows] == [0.0, 0.6, 1.0]
    assert result.rows[2].acceptance == pytest.approx(3.0) and result.rows[2].ratio == pytest.approx(1.0)
    assert result.rows[2].batch_ratio == pytest.approx(1.0)
    result.raise_if_failed()
    assert result.as_dict()["passed"] is True
    asked = {frozenset(request["sampling_params"]) for _, request, _ in stub.requests}
    for path in ({"top_k"}, {"top_p"}, {"top_k", "top_p"}, {"min_p"}):
        assert path | {"temperature", "max_new_tokens"} in asked


def test_text_prompts():
    with StubServer() as stub:
        assert run(stub, suite=replace(load_suite("default"), max_new_tokens=24)).passed


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("greedy", {"diverse"}),
        ("greedy-after-first", {"diverse"}),
        ("fixed", {"diverse", "prompts_differ"}),
        ("unstable", {"greedy_repeatable", "top_k_1_is_greedy", "top_p_0_is_greedy", "min_p_1_is_greedy"}),
        ("accepts-nothing", {"acceptance"}),
        ("collapses", {"acceptance"}),
        ("dies", {"answers"}),
        ("refuses", {"answers"}),
    ],
)
def test_every_way_of_being_wrong_has_its_check(mode, expected):
    with StubServer(mode) as stub:
        result = run(stub)
    assert failed(result) == expected, [c.as_dict() for c in result.failed]
    with pytest.raises(SmokeFailed) as caught:
        result.raise_if_failed("host")
    assert caught.value.exit_code == 7 and all(name in caught.value.what for name in expected)


def test_greedy_after_the_first_token_looks_diverse_at_a_glance():
    with StubServer("greedy-after-first") as stub:
        found = check(run(stub), "diverse")
    assert found.figures["T=1"]["distinct"] > 1
    assert "only that first token is sampled" in found.detail


def test_the_fallback_line_in_the_log_is_named():
    with StubServer() as stub:
        result = run(stub, service=FakeService(process(), log=f"started\n{GREEDY_FALLBACK}\nmore"))
    assert failed(result) == {"no_greedy_fallback_logged"}
    assert "falling back to greedy argmax" in check(result, "no_greedy_fallback_logged").detail


@pytest.mark.parametrize(
    ("states", "detail"),
    [
        ([process(), None], "is gone"),
        ([process(pid=10), process(pid=11)], "restarted meanwhile"),
        ([process(owner="other")], "not held by"),
        ([process(start_time=399.0)], "older than"),
    ],
)
def test_the_answer_must_come_from_the_new_process(states, detail):
    with StubServer() as stub:
        result = run(stub, service=FakeService(*states), started_after=400.0)
    assert failed(result) == {"new_process"}
    assert detail in check(result, "new_process").detail


def test_another_patch_identity():
    with StubServer(identity="old") as stub:
        result = run(stub, identity="new")
    assert failed(result) == {"patch_identity"}
    with StubServer() as stub:
        assert "no patch" in check(run(stub, identity="new"), "patch_identity").detail


def test_a_server_that_ends_at_the_first_sampled_request_is_named_and_the_rest_is_skipped():
    with StubServer("dies") as stub:
        result = run(stub)
    assert "trying each sampling path" in check(result, "answers").detail
    assert check(result, "diverse").skipped and check(result, "greedy_repeatable").passed


def test_baseline_equal_and_of_another_suite():
    with StubServer() as stub:
        client = SglangClient(LocalConnection(), "127.0.0.1", stub.port)
        baseline = record_baseline(client, SUITE)
        assert not check(run(stub, baseline=baseline), "greedy_as_before").skipped
        other = replace(SUITE, max_new_tokens=16)
        assert check(run(stub, suite=other, baseline=baseline), "greedy_as_before").skipped


def test_baseline_that_differs_says_where_and_how_clearly():
    with StubServer() as stub:
        client = SglangClient(LocalConnection(), "127.0.0.1", stub.port)
        baseline = record_baseline(client, SUITE)
        first = SUITE.prompts[0].name
        ids = baseline.outputs[first].ids
        ids = (*ids[:7], 250, *ids[8:])  # a token that this server never draws
        outputs = {**baseline.outputs, first: replace(baseline.outputs[first], ids=ids)}
        result = run(stub, baseline=replace(baseline, outputs=outputs))
    assert failed(result) == {"greedy_as_before"}
    assert "first difference at 7, not a near-tie" in check(result, "greedy_as_before").detail


def test_near_tie_by_drawing_the_token():
    prompt = Prompt("p", input_ids=(1, 2))
    with StubServer() as stub:
        client = SglangClient(LocalConnection(), "127.0.0.1", stub.port)
        drawn = iter([[7] * 40 + [9] * 24])
        stub.generate = lambda *_: {"output_ids": [tokens.pop()], "meta_info": {}}
        tokens = next(drawn)
        parted = examine(client, prompt, (5, 7, 1), (5, 9, 2), 10)
        assert parted.index == 1 and parted.near_tie is True
        tokens = [7] * 64
        assert examine(client, prompt, (5, 7, 1), (5, 9, 2), 10).near_tie is False
        tokens = [7] * 64
        assert stub.requests[-1][1]["input_ids"][0] == [1, 2, 5]


def test_near_tie_by_logprobs_where_the_server_gives_them():
    prompt = Prompt("p", input_ids=(1, 2))
    with StubServer() as stub:
        client = SglangClient(LocalConnection(), "127.0.0.1", stub.port)

        def post(handler, body):
            assert body["return_logprob"]
            stub.answer(
                handler,
                200,
                {
                    "output_ids": [7],
                    "meta_info": {"output_top_logprobs": [[[-0.5, 7, None], [-0.6, 9, None], [-3.0, 8, None]]]},
                },
            )

        stub.post = post
        assert examine(client, prompt, (5, 7), (5, 9), 10).near_tie is True
        assert examine(client, prompt, (5, 7), (5, 8), 10).near_tie is False


def test_near_tie_is_unknown_when_one_output_ends():
    with StubServer() as stub:
        client = SglangClient(LocalConnection(), "127.0.0.1", stub.port)
        parted = examine(client, Prompt("p", input_ids=(1,)), (5, 7), (5,), 10)
        assert parted.near_tie is None and "unknown" in str(parted)


def test_first_difference():
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1,), (1, 3)) == 1
    assert first_difference("abc", "abd") == 2


def test_distinct_after_equal_first():
    assert distinct_after_equal_first([(1, 2), (1, 3), (2, 2)]) == 2
    assert distinct_after_equal_first([(1, 2), (1, 2), (2, 3)]) == 1
    assert distinct_after_equal_first([(1, 2), (2, 2)]) == 0


def test_shipped_suites_load():
    assert load_suite().temperatures == (0.0, 0.6, 1.0)
    tiny = load_suite("tiny")
    assert bytes(token - 4 for token in tiny.prompts[0].input_ids[1:]) == b"def parse_args(self, args=None):"
    assert tiny.prompts[0].input_ids[0] == 1


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "temperature = [0.0]",
        "prompts = []",
        "temperatures = [0.6, 1.0]",
        "temperatures = [0.0]",
        'paths = ["beam"]',
        "samples = 1",
        "samples = true",
        "min_acceptance_ratio = 2.0",
        'concurrency = "4"',
        '[[prompts]]\nname = "a"\ntext = "x"',
        '[[prompts]]\nname = "a"\ntext = "x"\ninput_ids = [1]',
        '[[prompts]]\nname = "a"\ninput_ids = ["1"]',
        '[[prompts]]\ntext = "x"',
    ],
)
def test_a_bad_suite_is_refused(tmp_path, text):
    path = tmp_path / "suite.toml"
    good = '\n[[prompts]]\nname = "q"\ntext = "x"\n[[prompts]]\nname = "r"\ntext = "y"\n'
    path.write_text(text + ("" if "prompts" in text else good))
    with pytest.raises(UsageProblem) as caught:
        load_suite(str(path))
    assert str(path) in caught.value.where


def test_an_unknown_suite_names_the_known_ones():
    with pytest.raises(UsageProblem) as caught:
        load_suite("nope")
    assert "default" in caught.value.next_step and "tiny" in caught.value.next_step
