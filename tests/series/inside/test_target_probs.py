"""build_target_probs against the sampler's rules, written again in float64."""

import itertools

import numpy as np
import pytest
import torch
from exact import target_row
from fakes import make_batch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.speculative.dflash_target_probs import SamplingPlan, build_target_probs

ROWS = 3  # rows of a request
BATCHES = 400
ROUNDING = 1e-5  # a decision nearer than this may go either way in float32
SETTINGS = {
    "temperature": [0.0, 0.05, 0.3, 0.6, 1.0, 1.0, 2.5],
    "top_k": [-1, -1, 1, 2, 5, 20, 1000],
    "top_p": [1.0, 1.0, 0.999, 0.9, 0.5, 0.01],
    "min_p": [0.0, 0.0, 0.05, 0.3, 1.0],
}


def random_settings(rng, names=tuple(SETTINGS)):
    return {name: SETTINGS[name][rng.integers(len(SETTINGS[name]))] for name in names}


def probs_of(batch, logits, requests=slice(None)):
    plan = SamplingPlan.from_requests(batch.reqs, logits.shape[1])
    rows = logits.view(len(batch.reqs), ROWS, -1)[requests].flatten(0, 1)
    return build_target_probs(
        logits=rows, sampling_info=batch.sampling_info, plan=plan, rows_per_request=ROWS, requests=requests
    )


def check_batch(settings, logits, *, sequential=False):
    """Every row that rounding cannot decide against the oracle; returns how many were left out."""
    batch = make_batch(settings, logits.shape[1])
    before = logits.clone()
    probs, failed = probs_of(batch, logits)
    assert torch.equal(logits, before), "the logits are the caller's"
    assert probs.dtype == torch.float32 and probs.shape == logits.shape and not failed.any()
    left_out = 0
    for row in range(len(logits)):
        expected, margin = target_row(logits[row].tolist(), **settings[row // ROWS], sequential=sequential)
        expected = np.array(expected)
        if margin < ROUNDING:
            left_out += 1
            continue
        got = probs[row].double().numpy()
        np.testing.assert_allclose(got, expected, rtol=3e-5, atol=1e-7, err_msg=str(settings[row // ROWS]))
        assert np.array_equal(got > 0, expected > 1e-38) or settings[row // ROWS]["temperature"] < 0.1
    return left_out


def test_random_mixtures_of_requests():
    rng = np.random.default_rng(1)
    rows = left_out = 0
    for _ in range(BATCHES):
        settings = [random_settings(rng) for _ in range(rng.integers(1, 6))]
        logits = torch.randn(len(settings) * ROWS, int(rng.choice([2, 7, 33, 300]))) * 3
        rows += len(logits)
        left_out += check_batch(settings, logits)
    assert left_out < rows / 50


@pytest.mark.parametrize("names", [c for n in (1, 2, 3) for c in itertools.combinations(SETTINGS, n)], ids="+".join)
def test_batches_that_use_only_some_of_the_filters(names):
    """Each combination takes its own way through the helper."""
    rng = np.random.default_rng(2)
    rows = left_out = 0
    for _ in range(25):
        settings = [{"temperature": 1.0, **random_settings(rng, names)} for _ in range(3)]
        logits = torch.randn(3 * ROWS, 40) * 3
        rows += len(logits)
        left_out += check_batch(settings, logits)
    assert left_out < rows / 20


def test_flashinfer_filters_in_sequence_once_a_request_sets_min_p(settings):
    settings.sampling_backend = "flashinfer"
    rng = np.random.default_rng(3)
    differs = 0
    for _ in range(100):
        requests = [{"temperature": 1.0, "top_k": 4, "top_p": 0.8, "min_p": m} for m in rng.choice([0.0, 0.1], 3)]
        logits = torch.randn(3 * ROWS, 40)
        with_min_p = any(one["min_p"] > 0 for one in requests)
        check_batch(requests, logits, sequential=with_min_p)
        joint, _ = target_row(logits[0].tolist(), **requests[0])
        sequential, _ = target_row(logits[0].tolist(), **requests[0], sequential=True)
        differs += [p > 0 for p in joint] != [p > 0 for p in sequential]
    assert differs > 20  # the two orders are different rules


def test_a_greedy_request_that_sets_min_p_makes_flashinfer_sequential_too(settings):
    """As in the sampler, where any request of the batch counts."""
    settings.sampling_backend = "flashinfer"
    requests = [{"temperature": 0.0, "min_p": 0.1}, {"temperature": 1.0, "top_k": 4, "top_p": 0.8, "min_p": 0.0}]
    for _ in range(20):
        check_batch(requests, torch.randn(2 * ROWS, 40), sequential=True)


def test_top_k_1_is_exactly_greedy_at_any_temperature():
    logits = torch.randn(4 * ROWS, 50).mul_(1e-3)
    requests = [{"temperature": t, "top_k": 1, "top_p": 0.3, "min_p": 0.2} for t in (0.0, 0.5, 1.0, 50.0)]
    for extra in ([], [{"temperature": 1.0}], [{"temperature": 1.0, "top_k": 7, "min_p": 0.1}]):
        rows = torch.cat((logits, torch.randn(ROWS * len(extra), 50)))
        probs, _ = probs_of(make_batch(requests + extra, 50), rows)
        exact = torch.nn.functional.one_hot(logits.argmax(-1), 50).float()
        assert torch.equal(probs[: len(logits)], exact)


def test_ties_at_the_cut_keep_as_many_as_asked():
    """Which of the equal tokens stay is the sort's business; how many, and with what mass, is not."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 0.0, -1.0]] * ROWS)
    for top_k, kept in ((2, 2), (3, 3), (5, 5), (7, 7), (100, 7)):
        probs, _ = probs_of(make_batch([{"temperature": 1.0, "top_k": top_k}], 7), logits)
        expected, _ = target_row(logits[0].tolist(), top_k=top_k)
        assert (probs > 0).sum(-1).tolist() == [kept] * ROWS
        np.testing.assert_allclose(np.sort(probs[0].numpy()), np.sort(expected), rtol=1e-6)
    everywhere = torch.zeros(ROWS, 8)
    # A token stays while the better ones hold at most top_p.
    for top_p, kept in ((0.25, 3), (0.3, 3), (0.49, 4), (0.5, 5), (0.9, 8)):
        probs, _ = probs_of(make_batch([{"temperature": 1.0, "top_p": top_p}], 8), everywhere)
        assert (probs > 0).sum(-1).tolist() == [kept] * ROWS
    three_best = torch.tensor([[1.0, 1, 0, 0, 1, 0, 0]] * ROWS)
    probs, _ = probs_of(make_batch([{"temperature": 1.0, "min_p": 1.0}], 7), three_best)
    torch.testing.assert_close(probs, three_best / 3)


def test_top_p_1_keeps_even_what_rounding_puts_beyond_1():
    logits = torch.cat((torch.full((ROWS, 1), 20.0), torch.zeros(ROWS, 4999)), 1)
    for one in ({"top_p": 1.0}, {"top_p": 1.0, "top_k": 4999}, {"top_p": 1.0, "top_k": 5000}):
        probs, _ = probs_of(
            make_batch([{"temperature": 1.0, **one}, {"temperature": 1.0, "top_p": 0.5}], 5000), logits.repeat(2, 1)
        )
        assert (probs[:ROWS] > 0).sum(-1).tolist() == [min(one.get("top_k", 5000), 5000)] * ROWS


def test_a_request_sees_the_same_alone_in_a_batch_and_in_a_chunk():
    rng = np.random.default_rng(5)
    for _ in range(50):
        settings = [random_settings(rng) for _ in range(5)]
        logits = torch.randn(5 * ROWS, 60) * 3
        batch = make_batch(settings, 60)
        whole, _ = probs_of(batch, logits)
        for begin, end in ((0, 2), (2, 4), (4, 9)):
            part, failed = probs_of(batch, logits, slice(begin, end))
            assert torch.equal(part, whole[begin * ROWS : end * ROWS])
            assert failed.shape == (len(part),)
        for b in range(5):
            alone, _ = probs_of(make_batch(settings[b : b + 1], 60), logits[b * ROWS : (b + 1) * ROWS])
            if target_margin(logits, settings, b) > ROUNDING:
                torch.testing.assert_close(alone, whole[b * ROWS : (b + 1) * ROWS], rtol=1e-5, atol=1e-7)


def target_margin(logits, settings, b):
    return min(target_row(row.tolist(), **settings[b])[1] for row in logits[b * ROWS : (b + 1) * ROWS])


def test_sglangs_own_sampler_draws_from_it():
    """The rules above are not ours: what SGLang's torch sampler draws in 50,000 draws a row is inside the support."""
    rng = np.random.default_rng(6)
    for _ in range(12):
        one = random_settings(rng) | {"temperature": 1.0}
        logits = torch.randn(ROWS, 12)
        probs, _ = probs_of(make_batch([one], 12), logits)
        info = make_batch([one], 12).sampling_info
        draws = 50_000
        tokens = top_k_top_p_min_p_sampling_from_probs_torch(
            torch.softmax(logits[0], -1).repeat(draws, 1),
            info.top_ks.repeat(draws),
            info.top_ps.repeat(draws),
            info.min_ps.repeat(draws),
            info.need_min_p_sampling,
            None,
            None,
        )
        counts = torch.bincount(tokens.long(), minlength=12).double() / draws
        assert torch.equal(counts > 0, probs[0] > 0) or probs[0][probs[0] > 0].min() < 1e-3
        assert (counts - probs[0]).abs().max() < 0.012  # 5.4 standard deviations at worst


BAD = {
    "NaN": lambda row: row.index_fill_(0, torch.tensor([3]), float("nan")),
    "+inf": lambda row: row.index_fill_(0, torch.tensor([3]), float("inf")),
    "all -inf": lambda row: row.fill_(float("-inf")),
    "all NaN": lambda row: row.fill_(float("nan")),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    "one",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_a_bad_row_is_marked_and_the_others_are_not_touched(name, one):
    settings = [one, {"temperature": 1.0, "top_k": 5, "min_p": 0.01}]
    logits = torch.randn(2 * ROWS, 9)
    clean, _ = probs_of(make_batch(settings, 9), logits)
    logits = logits.clone()
    BAD[name](logits[1])
    probs, failed = probs_of(make_batch(settings, 9), logits)
    assert failed.tolist() == [False, True, False, False, False, False]
    assert torch.equal(probs[failed.logical_not()], clean[failed.logical_not()])


def test_masked_tokens_are_not_bad():
    logits = torch.randn(ROWS, 9)
    logits[:, 2:] = -float("inf")  # a bias or a mask may forbid most of the vocabulary
    probs, failed = probs_of(make_batch([{"temperature": 1.0, "top_k": 5, "top_p": 0.9}], 9), logits)
    assert not failed.any() and not probs[:, 2:].any()
