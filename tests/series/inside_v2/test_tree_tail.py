"""The end of the draft's CUDA graph leaves the trees that a step without graphs would build."""

import pytest
import torch
from sglang.srt.speculative.ddtree_tree import build_tree
from sglang.srt.speculative.ddtree_worker_v2 import TreeTail

BLOCK, BUDGET, TOPK, HIDDEN, VOCABULARY, MAX_BS = 6, 9, 3, 16, 50, 8


@pytest.fixture
def build():
    head = torch.randn(VOCABULARY, HIDDEN)

    def build(hidden, roots):
        logps, ids = (hidden[:, 1:] @ head.T).log_softmax(-1).topk(TOPK)
        return build_tree(roots, logps, ids, BUDGET)

    return build


@pytest.fixture
def tail(build):
    any_tree = build(torch.zeros(1, BLOCK, HIDDEN), torch.zeros(1, dtype=torch.int64))
    return TreeTail(build, BLOCK, any_tree, MAX_BS)


@pytest.mark.parametrize("bs", [1, 3, MAX_BS])
def test_the_tail_keeps_the_tree(bs, tail, build):
    hidden, ids = torch.randn(bs, BLOCK, HIDDEN), torch.randint(VOCABULARY, (bs, BLOCK))
    tail(hidden.flatten(0, 1), ids.flatten())
    for kept, expected in zip(tail.first(bs), build(hidden, ids[:, 0]), strict=True):
        assert kept.is_contiguous() and torch.equal(kept, expected)


def test_a_padded_batch_keeps_the_trees_of_its_own_requests(tail, build):
    """A graph runs at the captured size; the requests come first, what is padded after them is not looked at."""
    hidden, ids = torch.randn(4, BLOCK, HIDDEN), torch.randint(VOCABULARY, (4, BLOCK))
    tail(hidden.flatten(0, 1), ids.flatten())
    alone = build(hidden[:3], ids[:3, 0])
    for kept, expected in zip(tail.first(3), alone, strict=True):
        assert torch.equal(kept, expected)


def test_the_buffers_stay_where_they_are(tail, build):
    """A graph writes to addresses."""
    before = [field.data_ptr() for field in tail.tree]
    for bs in (MAX_BS, 1, 5):
        tail(torch.randn(bs * BLOCK, HIDDEN), torch.randint(VOCABULARY, (bs * BLOCK,)))
    assert [field.data_ptr() for field in tail.tree] == before
