"""The candidates that the draft's hidden states give, and the verify batch that is made of them."""

import threading
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.speculative import ddtree_candidates
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.ddtree_tree import build_tree_mask
from sglang.srt.speculative.ddtree_worker import DDTreeWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

HIDDEN, VOCAB = 12, 50


def make_worker(topk=4, budget=6, block=4):
    """A worker without models: only what drafting a tree reads."""
    worker = object.__new__(DDTreeWorker)
    worker.topk, worker.budget, worker.block_size, worker.page_size = topk, budget, block, 1
    return worker


def make_head(weight, begin=0, padding=0):
    rows = torch.nn.functional.pad(weight, (0, 0, 0, padding), value=100.0)  # padded rows must not be candidates
    return SimpleNamespace(
        weight=rows, shard_indices=SimpleNamespace(num_org_elements=len(weight), org_vocab_start_index=begin)
    )


@pytest.fixture(autouse=True)
def one_rank(monkeypatch, tp_group):
    monkeypatch.setattr(ddtree_candidates, "get_tp_group", lambda: tp_group)


def expected_candidates(hidden, weight, topk):
    logps = torch.log_softmax(hidden @ weight.T, -1)
    return logps.topk(min(topk, len(weight)), -1)


@pytest.mark.parametrize("topk", [2, 4, 50, 64])
def test_candidates_are_the_best_of_the_whole_vocabulary(topk):
    hidden, weight = torch.randn(3, 5, HIDDEN), torch.randn(VOCAB, HIDDEN)
    logps, ids = make_worker(topk)._draft_candidates(hidden, make_head(weight, padding=14))
    values, best = expected_candidates(hidden, weight, topk)
    assert torch.equal(ids, best)
    torch.testing.assert_close(logps, values)
    assert logps.dtype == torch.float32 and bool((logps <= 0).all()), "the tree's order needs log-probabilities"
    assert bool((logps[..., :-1] >= logps[..., 1:]).all())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e6])
def test_no_candidate_is_more_than_certain(scale):
    """A child that outweighed its parent would come before it."""
    hidden, weight = torch.randn(64, 5, HIDDEN) * scale, torch.randn(VOCAB, HIDDEN)
    logps, _ = make_worker(3)._draft_candidates(hidden, make_head(weight))
    assert bool((logps <= 0).all())


def test_candidates_in_chunks(monkeypatch):
    hidden, weight = torch.randn(3, 5, HIDDEN), torch.randn(VOCAB, HIDDEN)
    whole = make_worker()._draft_candidates(hidden, make_head(weight))
    monkeypatch.setattr(ddtree_candidates, "_ROWS_PER_CHUNK", 4)
    for one, other in zip(whole, make_worker()._draft_candidates(hidden, make_head(weight)), strict=True):
        torch.testing.assert_close(one, other)


class FakeRanks:
    """Tensor-parallel ranks in threads of one process, in step by a barrier."""

    def __init__(self, count):
        self.world_size = count
        self._barrier = threading.Barrier(count, timeout=60)
        self._sent = [None] * count
        self._here = threading.local()

    def run(self, function):
        """[function(rank) for every rank], all at once."""
        results = [None] * self.world_size

        def rank(number):
            self._here.rank = number
            results[number] = function(number)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def all_gather(self, tensor, dim):
        self._sent[self._here.rank] = tensor
        self._barrier.wait()
        assert len({tuple(sent.shape) for sent in self._sent}) == 1, "all ranks must send one shape"
        gathered = torch.cat(self._sent, dim)
        self._barrier.wait()
        return gathered


@pytest.mark.parametrize("shards", [[25, 25], [40, 10], [48, 2], [20, 20, 10]], ids=str)
@pytest.mark.parametrize("topk", [2, 4, 20])
def test_ranks_of_a_sharded_head_find_the_same_candidates_as_one(shards, topk, monkeypatch):
    hidden, weight = torch.randn(2, 3, HIDDEN), torch.randn(VOCAB, HIDDEN)
    ranks = FakeRanks(len(shards))
    monkeypatch.setattr(ddtree_candidates, "get_tp_group", lambda: ranks)

    def draft(number):
        begin = sum(shards[:number])
        head = make_head(weight[begin : begin + shards[number]], begin, padding=50 - shards[number])
        return make_worker(topk)._draft_candidates(hidden, head)

    values, best = expected_candidates(hidden, weight, topk)
    for logps, ids in ranks.run(draft):
        assert torch.equal(ids, best)
        torch.testing.assert_close(logps, values)


def test_one_candidate_is_dflashs_own_choice(monkeypatch):
    chosen = torch.tensor([7, 8, 9, 10, 11, 12])
    worker = make_worker(topk=1)
    monkeypatch.setattr(worker, "_greedy_sample_from_vocab_parallel_head", lambda **_: chosen)
    logps, ids = worker._draft_candidates(torch.randn(2, 3, HIDDEN), None)
    assert ids.tolist() == [[[7], [8], [9]], [[10], [11], [12]]]
    assert not logps.any()


def make_batch():
    return SimpleNamespace(
        seq_lens=torch.tensor([11, 30], dtype=torch.int32),
        seq_lens_cpu=torch.tensor([11, 30]),
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        return_hidden_states=True,
    )


def test_the_batch_becomes_a_verify_batch_over_the_trees(monkeypatch):
    prepared = []
    monkeypatch.setattr(DDTreeVerifyInput, "prepare_for_verify", lambda self, batch, page: prepared.append(page))
    weight, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(2, 4, HIDDEN)
    batch = make_batch()
    make_worker(topk=3)._prepare_tree_verify(batch, torch.tensor([5, 6]), hidden, make_head(weight))
    spec = batch.spec_info
    assert prepared == [1] and batch.forward_mode.is_target_verify() and not batch.return_hidden_states
    assert spec.draft_token_num == 7 and spec.path_width == 4
    assert spec.draft_token.tolist() == spec.tree.tokens.flatten().tolist()
    assert spec.tree.tokens[:, 0].tolist() == [5, 6]
    # Position 0 of the block is the root's own: the tree's first level comes from position 1.
    _, ids = expected_candidates(hidden[:, 1], weight, 1)
    assert spec.tree.tokens[:, 1].tolist() == ids.flatten().tolist()
    assert spec.positions.dtype == torch.int64
    assert spec.positions.view(2, 7).tolist() == [
        [prefix + depth for depth in spec.tree.depths[b].tolist()] for b, prefix in enumerate((11, 30))
    ]
    assert max(spec.tree.depths.flatten().tolist()) <= 3


def test_the_mask_is_the_trees_and_not_the_chains(monkeypatch):
    asked = []

    def prepare(self, batch, page_size, build_custom_mask):
        asked.append(build_custom_mask)

    monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", prepare)
    batch = make_batch()
    head = make_head(torch.randn(VOCAB, HIDDEN))
    make_worker(topk=3)._prepare_tree_verify(batch, torch.tensor([5, 6]), torch.randn(2, 4, HIDDEN), head)
    assert asked == [False]
    expected = build_tree_mask(batch.spec_info.tree.ancestors, batch.seq_lens, 41)
    assert torch.equal(batch.spec_info.custom_mask, expected)
