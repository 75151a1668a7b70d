"""The target distribution's kernel on the device against the sampler's rules in float64 (sort, then filter).

SPECULATIVE_DIR names a directory with dflash_sampling_kernels.py and dflash_sampling_search.py of a patched SGLang;
without it the patched sglang that is installed is used.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from scripts.speculative import load, patched_directory  # noqa: E402 - it needs torch

pytestmark = pytest.mark.gpu

ROUNDING = 3e-6  # a decision nearer than this may go either way in float32
# The mass that a row is divided by is a sum in float32, of up to 163,840 terms in 2,048 lanes of 80: some units of
# 2**-23 = 1.2e-7 a lane and as many where lanes are added. 1.2e-6 was seen.
SUM_ROUNDING = 3e-6
TOP_K_ALL = 1 << 30
ROWS = 48
LOGITS = {
    "flat": lambda x: x * 0.01,
    "as a model's": lambda x: (x * 3).bfloat16().float(),
    "flat, as a model's": lambda x: (x * 0.3).bfloat16().float(),
    "peaked": lambda x: x * 10,
    "many ties": lambda x: (x * 2).round() / 2,
    "all equal": lambda x: x[:, :1].expand_as(x).contiguous(),
    "half of them -inf": lambda x: x.masked_fill(torch.rand_like(x) < 0.5, -float("inf")),
    "of all sizes": lambda x: x.sign() * (x * 12).exp(),
    "large in one lane": lambda x: x + 20.0 * (torch.arange(x.shape[1], device=x.device) % 2048 == 5),
}


@pytest.fixture(scope="module")
def kernels():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    directory = patched_directory()
    if directory is None:
        pytest.skip("neither SPECULATIVE_DIR is set nor sglang installed")
    return load("dflash_sampling_kernels", directory)


def choose(values, dtype=torch.float32):
    return torch.tensor(values, dtype=torch.float64, device="cuda")[torch.randint(len(values), (ROWS,))].to(dtype)


def rules(logits, temperatures, top_ks, top_ps, min_ps, sequential):
    """(probabilities, margin) in float64; the margin says how near a decision was, of ties the first ids stay."""
    full = torch.softmax(logits.double() / temperatures[:, None].double(), -1)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    values = full.gather(1, order)
    before = values.cumsum(-1) - values
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = rank < top_ks[:, None].clamp(min=1)
    budget = top_ps[:, None].double()
    if sequential:
        budget = budget * (values * keep).sum(-1, keepdim=True)
    greedy, whole = top_ks[:, None] <= 1, top_ps[:, None] >= 1
    margin = ((before - budget).abs() + (greedy | whole)).amin(-1)
    keep &= (before <= budget) | whole | (greedy & (rank < 1))
    kept = torch.zeros_like(full).scatter_(1, order, values * keep)
    best = kept.amax(-1, keepdim=True)
    floor = best * min_ps[:, None].double()
    decided_anyway = (kept == 0) | (kept == best) | (min_ps[:, None] == 0)
    margin = torch.minimum(margin, ((kept - floor).abs() / best + decided_anyway.double()).amin(-1))
    kept = kept.masked_fill(kept < floor, 0.0)
    return kept / kept.sum(-1, keepdim=True), margin


@pytest.mark.parametrize("vocab", [8, 1000, 50_257, 128_256, 151_936, 163_840])
def test_equals_the_rules(kernels, vocab):
    torch.manual_seed(vocab)
    decided = rows = 0
    for name, kind in LOGITS.items():
        for sequential in (False, True):
            logits = kind(torch.randn((ROWS, vocab), device="cuda"))
            logits[:, vocab // 2] = 0.5  # one at least is finite
            temperatures, min_ps = choose([0.05, 0.3, 0.6, 1.0, 2.5]), choose([0.0, 0.0, 0.05, 0.3, 1.0])
            top_ks = choose([1, TOP_K_ALL, TOP_K_ALL, 2, 20, 1000, vocab // 2, vocab - 1], torch.int32)
            top_ps = choose([1.0, 1.0, 0.999, 0.95, 0.5, 0.01])
            for by_rank in (True, False):
                if not by_rank:
                    top_ks, top_ps = torch.full_like(top_ks, TOP_K_ALL), torch.ones_like(top_ps)
                probs, failed = kernels.fused_target_probs(
                    logits,
                    temperatures,
                    top_ks,
                    top_ps,
                    min_ps,
                    rows_per_request=1,
                    first_request=0,
                    by_rank=by_rank,
                    top_k_first=sequential,
                )
                expected, margin = rules(logits, temperatures, top_ks, top_ps, min_ps, sequential)
                assert not failed.any()
                torch.testing.assert_close(
                    probs.sum(-1, dtype=torch.float64), torch.ones_like(margin), rtol=0, atol=SUM_ROUNDING
                )
                clear = margin >= ROUNDING
                assert torch.equal((probs > 1e-30)[clear], (expected > 1e-30)[clear]), name
                torch.testing.assert_close(probs[clear].double(), expected[clear], rtol=1e-5, atol=1e-30)
                decided, rows = decided + int(clear.sum()), rows + ROWS
    assert decided > rows / 2


@pytest.mark.parametrize("by_rank", [False, True])
def test_bad_rows_are_marked(kernels, by_rank):
    logits = torch.randn((6, 1000), device="cuda")
    logits[0, 3], logits[1, 999], logits[2], logits[3, 0] = float("nan"), float("inf"), -float("inf"), float("nan")
    ones = torch.ones(6, device="cuda")
    probs, failed = kernels.fused_target_probs(
        logits,
        ones,
        ones.int() * 9,
        ones * 0.9,
        ones * 0.01,
        rows_per_request=1,
        first_request=0,
        by_rank=by_rank,
        top_k_first=False,
    )
    assert failed.tolist() == [True] * 4 + [False] * 2
    assert not probs[:4].any() and (probs[4:].sum(-1) > 0.99).all()


def test_the_same_row_gives_the_same_bits(kernels):
    """Tensor-parallel ranks compute it each for itself."""
    logits = (torch.randn((8, 151_936), device="cuda") * 0.3).repeat(40, 1)
    ones = torch.ones(320, device="cuda")
    probs, _ = kernels.fused_target_probs(
        logits,
        ones,
        ones.int() * 5000,
        ones * 0.9,
        ones * 0.0,
        rows_per_request=1,
        first_request=0,
        by_rank=True,
        top_k_first=False,
    )
    assert all(torch.equal(probs[:8], part) for part in probs.view(40, 8, -1))
