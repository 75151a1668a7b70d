"""The GPU's target distribution, its program interpreted on the CPU, against the sampler's rules in float64."""

import numpy as np
import pytest
import torch
from exact import target_row
from fakes import make_batch
from sglang.srt.speculative.dflash_sampling_kernels import fused_target_probs
from sglang.srt.speculative.dflash_target_probs import SamplingPlan, _target_probs_by_torch

LANES = 16  # few, so that small vocabularies need everything that large ones need
ROUNDING = 2e-6  # a decision nearer than this may go either way in float32
SETTINGS = {
    "temperature": [0.0, 0.05, 0.3, 0.6, 1.0, 1.0, 2.5],
    "top_k": [-1, -1, 1, 2, 5, 20, 50, 150],
    "top_p": [1.0, 1.0, 0.999, 0.95, 0.9, 0.5, 0.01, 1e-5],
    "min_p": [0.0, 0.0, 0.0, 0.05, 0.3, 1.0],
}
LOGITS = {
    "as a model's": lambda shape: (torch.randn(shape) * 3).bfloat16().float(),
    "flat": lambda shape: torch.randn(shape) * 0.01,
    "peaked": lambda shape: torch.randn(shape) * 10,
    "many ties": lambda shape: torch.randn(shape).mul_(2).round_().div_(2),
    "all equal": lambda shape: torch.randn(shape[0], 1).expand(shape).contiguous(),
    "half of them -inf": lambda shape: torch.randn(shape).masked_fill_(torch.rand(shape) < 0.5, -float("inf")),
    "of all sizes": lambda shape: torch.randn(shape).mul_(12).exp_() * torch.randn(shape).sign(),
    "large in one lane": lambda shape: torch.randn(shape) + 20.0 * (torch.arange(shape[1]) % LANES == 3),
}


def random_settings(rng):
    return {name: values[rng.integers(len(values))] for name, values in SETTINGS.items()}


def interpreted(settings, logits, *, top_k_first=False, rows_per_request=1, first_request=0, by_rank=True):
    info = make_batch(settings, logits.shape[1]).sampling_info
    return fused_target_probs(
        logits,
        info.temperatures,
        info.top_ks,
        info.top_ps,
        info.min_ps,
        rows_per_request=rows_per_request,
        first_request=first_request,
        by_rank=by_rank,
        top_k_first=top_k_first,
        lanes=LANES,
    )


@pytest.mark.parametrize("kind", LOGITS)
def test_random_requests(kind):
    rng = np.random.default_rng(len(kind))
    decided = 0
    for vocab, sequential in ((1, False), (9, True), (33, False), (100, True)):
        settings = [random_settings(rng) for _ in range(3)]
        decided += check(settings, LOGITS[kind]((3, vocab)), sequential=sequential)
    assert decided > 6


@pytest.mark.parametrize("kind", ["flat", "as a model's"])
def test_vocabularies_that_are_large_for_the_lanes(kind):
    """Where the search starts from a sample of the row."""
    settings = [{"top_p": 0.95}, {"top_k": 150}, {"top_k": 200, "top_p": 0.5}]
    check(settings, LOGITS[kind]((3, 300)), sequential=True)


def check(settings, logits, *, sequential):
    """Every row that rounding cannot decide against the rules; how many these were."""
    logits[:, len(logits[0]) // 2] = 0.5  # one at least is finite
    before, decided = logits.clone(), 0
    probs, failed = interpreted(settings, logits, top_k_first=sequential)
    assert torch.equal(logits, before) and not failed.any() and probs.dtype == torch.float32
    torch.testing.assert_close(probs.double().sum(-1), torch.ones(len(probs)).double(), rtol=0, atol=1e-6)
    for row, one in enumerate(settings):
        expected, margin = target_row(logits[row].tolist(), **one, sequential=sequential)
        expected, got = np.array(expected), probs[row].double().numpy()
        if margin >= ROUNDING:
            decided += 1
            assert np.array_equal(got > 1e-30, expected > 1e-30), one  # the same tokens, of ties the first
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-30, err_msg=str(one))
    return decided


def test_the_torch_path_agrees():
    """The two ways through build_target_probs: as many tokens with the same probabilities."""
    rng = np.random.default_rng(1)
    for kind in LOGITS:
        settings = [random_settings(rng) for _ in range(2)]
        logits = LOGITS[kind]((2, 40))
        logits[:, 7] = 0.5
        batch = make_batch(settings, 60)
        plan = SamplingPlan.from_requests(batch.reqs, 40)
        by_torch, _ = _target_probs_by_torch(
            logits=logits, sampling_info=batch.sampling_info, plan=plan, rows_per_request=1
        )
        probs, _ = interpreted(settings, logits)
        for row, one in enumerate(settings):
            if target_row(logits[row].tolist(), **one)[1] > 1e-5:
                torch.testing.assert_close(probs[row].sort()[0], by_torch[row].sort()[0], rtol=1e-4, atol=1e-7)


def test_greedy_rows_are_exact_and_of_equal_best_the_first():
    logits = torch.randn(3, 100)
    logits[1, [20, 60, 99]] = 9.0
    one = {"temperature": 0.7, "top_k": 1, "top_p": 0.2, "min_p": 0.5}
    settings = [{"temperature": 0.0}, one, {"temperature": 1.0}]
    probs, _ = interpreted(settings, logits)
    assert torch.equal(probs[:2], torch.nn.functional.one_hot(logits[:2].argmax(-1), 100).float())
    assert probs[1, 20] == 1.0 and (probs[2] > 0).all()


def test_rows_belong_to_their_requests():
    settings = [{"temperature": 1.0, "top_k": k} for k in (2, 3, 4, 5)]
    probs, _ = interpreted(settings, torch.randn(4, 30), rows_per_request=2, first_request=1)
    assert (probs > 0).sum(-1).tolist() == [3, 3, 4, 4]


@pytest.mark.parametrize("by_rank", [False, True])
def test_rows_that_are_not_finite_are_marked_and_the_others_are_not_touched(by_rank):
    settings = [{"temperature": 1.0, "min_p": 0.01, **({"top_k": 7, "top_p": 0.9} if by_rank else {})}] * 7
    logits = torch.randn(7, 90)
    clean, _ = interpreted(settings, logits, by_rank=by_rank)
    bad = logits.clone()
    bad[0, 3] = float("nan")
    bad[1, 89] = float("inf")
    bad[2] = -float("inf")
    bad[3] = float("nan")
    bad[4, 0] = -float("inf")  # a forbidden token is no failure
    probs, failed = interpreted(settings, bad, by_rank=by_rank)
    assert failed.tolist() == [True] * 4 + [False] * 3
    assert not probs[:4].any() and torch.equal(probs[5:], clean[5:]) and probs[4, 0] == 0


def test_an_unaligned_or_strided_view_is_read_as_it_is():
    whole = torch.randn(3, 41)
    settings = [{"temperature": 1.0, "top_p": 0.7}] * 2
    for view in (whole[1:], whole[1:, :33]):
        probs, _ = interpreted(settings, view)
        assert torch.equal(probs, interpreted(settings, view.clone().contiguous())[0])
