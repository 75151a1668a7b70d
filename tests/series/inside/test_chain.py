"""The DFLASH chain: a tree with one candidate per depth is that chain, and the chain samples too."""

from collections import Counter

import chi_square
import pytest
import torch
from exact import emitted_sequences, target_row
from fakes import FakeTreeSamplingOpByReferenceWalk, make_batch
from sglang.srt.speculative import ddtree_decide
from sglang.srt.speculative.ddtree_tree import build_tree
from sglang.srt.speculative.dflash_sampling import accept_chain
from sglang.srt.speculative.dflash_utils import compute_dflash_accept_len_and_bonus

DRAWS = 50_000
BLOCK, VOCAB = 4, 6


def as_tree(candidates, budget):
    """The tree that topk 1 builds over a drafted chain (int64 [bs, BLOCK], column 0 the root)."""
    drafted = candidates[:, 1:, None]
    return build_tree(candidates[:, 0], torch.zeros_like(drafted, dtype=torch.float32), drafted, budget)


def decide(tree, settings, logits, block):
    batch = make_batch(settings, logits.shape[-1])
    return ddtree_decide.decide(
        tree, logits.flatten(0, 1), sampling_info=batch.sampling_info, reqs=batch.reqs, width=block
    )


@pytest.mark.parametrize("budget", ["block - 1", "more", "fewer"])
def test_a_tree_of_one_candidate_accepts_what_dflash_accepts(budget):
    generator = torch.Generator().manual_seed(1)
    accepted = Counter()
    for _ in range(300):
        block = int(torch.randint(2, 9, (1,), generator=generator))
        vocab = 3  # so that chains are often right
        candidates = torch.randint(0, vocab, (5, block), generator=generator)
        columns = {"block - 1": block, "more": block + 3, "fewer": max(2, block - 2)}[budget]
        seen = min(columns, block)  # what a smaller budget leaves of the chain
        logits = torch.randn(5, columns, vocab, generator=generator)
        expected_len, expected_bonus = compute_dflash_accept_len_and_bonus(
            candidates=candidates[:, :seen], target_predict=logits[:, :seen].argmax(-1)
        )
        decision = decide(as_tree(candidates, columns - 1), [{"temperature": 0.0}] * 5, logits, block)
        assert decision.accept_len.tolist() == expected_len.tolist()
        assert decision.bonus.tolist() == expected_bonus.tolist()
        for b, length in enumerate(expected_len.tolist()):
            assert decision.path[b].tolist() == list(range(length + 1)) + [-1] * (block - length - 1)
            accepted[length] += 1
    assert len(accepted) > 4


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0},
]


@pytest.fixture(params=["sample-and-follow", "op by stand-in"])
def chain_path(request):
    if request.param == "sample-and-follow":
        request.getfixturevalue("no_op")
    else:
        request.getfixturevalue("install_op")(FakeTreeSamplingOpByReferenceWalk())


def chain_step(candidates, logits, batch):
    return accept_chain(candidates=candidates, logits=logits, sampling_info=batch.sampling_info, reqs=batch.reqs)


def test_the_chain_emits_the_targets_distribution(chain_path):
    """DRAWS steps of every kind, greedy included, in mixed batches, against the exact joint distribution."""
    candidates = torch.tensor([[4, 0, 1, 2]])
    logits = torch.randn(BLOCK, VOCAB)
    logits[torch.arange(3), candidates[0, 1:]] += 1.0
    copies = 200
    batch = make_batch(SETTINGS * copies, VOCAB)
    bs = len(SETTINGS) * copies
    counts = [Counter() for _ in SETTINGS]
    while sum(counts[0].values()) < DRAWS:
        accept_len, bonus = chain_step(candidates.repeat(bs, 1), logits.repeat(bs, 1), batch)
        for b, (length, last) in enumerate(zip(accept_len.tolist(), bonus.tolist(), strict=True)):
            counts[b % len(SETTINGS)][(*candidates[0, 1 : length + 1].tolist(), last)] += 1
    for one, seen in zip(SETTINGS, counts, strict=True):
        rows = [target_row(row.tolist(), **one) for row in logits]
        assert min(margin for _, margin in rows) > 1e-4
        exact = emitted_sequences(candidates[0].tolist(), [-1, 0, 1, 2], [row for row, _ in rows])
        statistic, limit = chi_square.against(seen, exact)
        assert statistic < limit, (one, statistic, limit)
        if one["temperature"]:
            assert len(seen) > 4 and len({len(sequence) for sequence in seen}) == BLOCK  # never the greedy text alone


@pytest.mark.parametrize("how", [float("nan"), float("inf")])
def test_a_chain_over_bad_logits_is_ended(chain_path, how):
    """Bonus -1 is what the scheduler ends a request on; rows beyond the walk do not matter."""
    candidates = torch.tensor([[4, 0, 1, 2]] * 3)
    logits = torch.full((3, BLOCK, VOCAB), -50.0)
    logits[:, 0, 0] = 50.0  # the first draft is right
    logits[:, 1, 3] = 50.0  # the second is not
    logits[:, 2:, 5] = 50.0
    logits[0, 0, 2] = how
    logits[1, 1, 2] = how
    logits[2, 2, 2] = how
    accept_len, bonus = chain_step(candidates, logits.flatten(0, 1), make_batch([{"temperature": 1.0}] * 3, VOCAB))
    assert bonus.tolist() == [-1, -1, 3]
    assert accept_len.tolist() == [0, 0, 1]


@pytest.mark.parametrize("value", [0.0, 1 - 2**-24])
def test_coins_of_the_chain_are_in_0_1(install_op, monkeypatch, value):
    op = install_op(FakeTreeSamplingOpByReferenceWalk())
    monkeypatch.setattr(torch, "rand", lambda shape, **how: torch.full(shape, value, **how))
    chain_step(torch.tensor([[4, 0, 1, 2]]), torch.randn(BLOCK, VOCAB), make_batch([{"temperature": 1.0}], VOCAB))
    assert bool((op.coins[0] == 1 - value).all()) and bool((op.final_coins[0] == value).all())


def test_what_is_kept_does_not_leak_from_batch_to_batch(install_op):
    """A large batch, then small ones: the op's scratch and the links of a chain are kept."""
    install_op(FakeTreeSamplingOpByReferenceWalk())
    for bs in (7, 2, 5, 1, 9):
        candidates = torch.randint(0, VOCAB, (bs, BLOCK))
        logits = torch.full((bs, BLOCK, VOCAB), -50.0)
        right = torch.randint(0, BLOCK, (bs,))  # how many drafts are right
        for b in range(bs):
            for row in range(BLOCK):
                follow = row < min(int(right[b]), BLOCK - 1)
                token = candidates[b, row + 1] if follow else (candidates[b, (row + 1) % BLOCK] + 1) % VOCAB
                logits[b, row, token] = 50.0
        accept_len, bonus = chain_step(candidates, logits.flatten(0, 1), make_batch([{"temperature": 1.0}] * bs, VOCAB))
        assert accept_len.tolist() == right.clamp(max=BLOCK - 1).tolist()
        assert bonus.tolist() == [int(logits[b, length].argmax()) for b, length in enumerate(accept_len.tolist())]
