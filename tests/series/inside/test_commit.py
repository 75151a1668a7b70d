"""What a step commits: tokens up to where a request stops, their KV slots and hidden states, and nothing else."""

from types import SimpleNamespace

import pytest
import torch
from fakes import make_batch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.ddtree_tree import build_tree

BLOCK, BUDGET, VOCAB, HIDDEN = 4, 6, 10, 5
N = BUDGET + 1
EOS = 9


class FakeAllocator:
    def __init__(self):
        self.freed = []

    def free(self, slots):
        self.freed += slots.tolist()


class Step:
    """A verify step of requests whose target agrees with the draft's best chain 1, 2, 3 and then says 4."""

    def __init__(self, params, prefix=(6, 3, 8)):
        count = len(params)
        self.prefix = list(prefix[:count])
        # The chain is not the first nodes of the tree: a sibling comes before its second.
        logps = torch.tensor([[-1.0, -1.1, -9.0], [-0.2, -2.0, -3.0], [-0.05, -2.0, -3.0]]).expand(count, -1, -1)
        ids = torch.tensor([[1, 5, 6], [2, 5, 6], [3, 5, 6]]).expand(count, -1, -1)
        self.tree = build_tree(torch.full((count,), 8), logps, ids, BUDGET)
        self.logits = torch.zeros(count, N, VOCAB)
        chain = [0]
        while (child := self.tree.retrieve_next_token[0, chain[-1]].item()) != -1:
            chain.append(child)
        assert chain == [0, 1, 3, 4]
        self.chain = chain  # the nodes of the root and of the tokens 1, 2, 3
        for node, token in zip(chain, (1, 2, 3, 4), strict=True):
            self.logits[:, node, token] = 50.0
        self.reqs = []
        for b, one in enumerate(params):
            settings = SamplingParams(temperature=0, **{"max_new_tokens": 100} | one)
            settings.normalize(None)
            req = Req(str(b), "", [8] * self.prefix[b], settings, eos_token_ids={EOS}, vocab_size=VOCAB)
            req.output_ids = [8]
            req.kv_committed_len = req.kv_allocated_len = self.prefix[b]
            self.reqs.append(req)
        self.slots = 100 + torch.randperm(count * N)
        self.allocator = FakeAllocator()
        self.sampling = make_batch([{"temperature": 0.0}] * count, VOCAB)
        self.batch = SimpleNamespace(
            reqs=self.reqs,
            device="cpu",
            sampling_info=self.sampling.sampling_info,
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            out_cache_loc=self.slots.clone(),
            token_to_kv_pool_allocator=self.allocator,
            req_pool_indices=torch.arange(count).flip(0),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(count, 32, dtype=torch.int32)),
            seq_lens=torch.tensor(self.prefix),
            seq_lens_cpu=torch.tensor(self.prefix),
            seq_lens_sum=sum(self.prefix),
        )

    def run(self):
        spec = DDTreeVerifyInput(
            draft_token=self.tree.tokens.flatten(),
            positions=self.tree.depths.flatten(),
            draft_token_num=N,
            tree=self.tree,
            path_width=BLOCK,
        )
        self.hidden = torch.randn(len(self.reqs) * N, HIDDEN)
        self.output = SimpleNamespace(next_token_logits=self.logits.flatten(0, 1), hidden_states=self.hidden)
        return spec.verify(batch=self.batch, logits_output=self.output, page_size=1)

    def check(self, result, counts):
        """Everything but the tokens follows from how many tokens each request committed."""
        current, commit_lens, hidden, accepted = result
        assert commit_lens.tolist() == counts and commit_lens.dtype == torch.int32
        assert accepted == [max(0, count - 1) for count in counts]
        assert current.tolist() == [req.output_ids[-1] for req in self.reqs]
        rows = [b * N + node for b, count in enumerate(counts) for node in self.chain[:count]]
        assert torch.equal(hidden, self.hidden[rows])
        assert self.output.hidden_states is None
        kept = self.slots[rows].tolist()
        assert self.batch.out_cache_loc.tolist() == kept
        assert sorted(self.allocator.freed + kept) == sorted(self.slots.tolist()), "every slot once"
        assert self.batch.seq_lens.tolist() == [p + c for p, c in zip(self.prefix, counts, strict=True)]
        assert self.batch.seq_lens_cpu.tolist() == self.batch.seq_lens.tolist()
        assert self.batch.seq_lens_sum == sum(self.prefix) + sum(counts)
        for b, (req, count) in enumerate(zip(self.reqs, counts, strict=True)):
            assert req.kv_committed_len == req.kv_allocated_len == self.prefix[b] + count
            assert req.spec_verify_ct == 1 and req.spec_accepted_drafts == max(0, count - 1)
            row = self.batch.req_to_token_pool.req_to_token[self.batch.req_pool_indices[b]].tolist()
            expected = [0] * 32
            begin = self.prefix[b]
            expected[begin : begin + count] = [self.slots[b * N + node].item() for node in self.chain[:count]]
            assert row == expected, "the slots stand in the order of the path, whatever their nodes' numbers"


def test_accepted_nodes_and_bonus_are_committed():
    step = Step([{}, {}, {}])
    step.logits[1, step.chain[1]] = 0.0
    step.logits[1, step.chain[1], 7] = 50.0  # after token 1 this one says 7, which is no node
    step.check(step.run(), [4, 2, 4])
    assert [list(req.output_ids) for req in step.reqs] == [[8, 1, 2, 3, 4], [8, 1, 7], [8, 1, 2, 3, 4]]
    assert not any(req.finished() for req in step.reqs)


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_max_new_tokens_stops_inside_a_path(room):
    step = Step([{"max_new_tokens": 1 + room}, {}])
    step.check(step.run(), [room, 4])
    assert list(step.reqs[0].output_ids) == [8, 1, 2, 3, 4][: 1 + room]
    assert isinstance(step.reqs[0].finished_reason, FINISH_LENGTH) and not step.reqs[1].finished()


@pytest.mark.parametrize(("token", "count"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_a_stop_token_inside_a_path_is_the_last(token, count):
    step = Step([{}, {"stop_token_ids": [token]}])
    step.check(step.run(), [4, count])
    assert step.reqs[1].output_ids[-1] == token
    assert isinstance(step.reqs[1].finished_reason, FINISH_MATCHED_TOKEN)


def test_end_of_sequence_as_bonus():
    step = Step([{}, {}])
    step.logits[0, step.chain[2]] = 0.0
    step.logits[0, step.chain[2], EOS] = 50.0
    step.check(step.run(), [3, 4])
    assert list(step.reqs[0].output_ids) == [8, 1, 2, EOS] and step.reqs[0].finished()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_request_with_bad_logits_is_aborted_alone_and_commits_nothing(bad):
    step = Step([{}, {}, {}])
    step.logits[1, step.chain[1], 0] = bad
    step.check(step.run(), [4, 0, 4])
    failed = step.reqs[1].finished_reason
    assert isinstance(failed, FINISH_ABORT) and "not finite" in failed.message and failed.status_code == 500
    assert list(step.reqs[1].output_ids) == [8]
    assert not step.reqs[0].finished() and not step.reqs[2].finished()


def test_an_idle_batch_commits_nothing():
    step = Step([{}])
    step.batch.forward_mode.is_idle = lambda: True
    current, commit_lens, hidden, accepted = step.run()
    assert (len(current), len(commit_lens), len(hidden), accepted) == (0, 0, 0, [])
