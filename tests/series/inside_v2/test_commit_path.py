"""What a decided step emits and keeps: by torch, by the kernel, and what either must mean."""

import pytest
import torch
from sglang.srt.speculative.ddtree_commit import commit_path, launch_commit, launch_follow, write_tree_mask
from sglang.srt.speculative.ddtree_decide import Decision, decide_greedy
from sglang.srt.speculative.ddtree_tree import build_tree, build_tree_mask

VOCABULARY = 30


def make_step(bs, block, budget, topk=3, spoil=()):
    """Random trees, walked greedily over random logits. Logits of the root are NaN for the requests in `spoil`."""
    tree, logits = make_logits(bs, block, budget, topk, spoil)
    decision = decide_greedy(tree, logits, block)
    table = torch.randperm(10_000)[: bs * (budget + block + 1)].view(bs, -1)
    return tree, decision, table[:, : budget + 1].contiguous(), table[:, :block].contiguous()


def make_logits(bs, block, budget, topk=3, spoil=(), value=float("nan"), spoiled_node=0):
    logps = torch.randn(bs, block - 1, topk).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.stack([torch.randperm(VOCABULARY)[:topk] for _ in range(bs * (block - 1))]).view(bs, block - 1, topk)
    tree = build_tree(torch.randint(VOCABULARY, (bs,)), logps, ids, budget)
    logits = torch.zeros(bs, budget + 1, VOCABULARY)
    # Mostly some child of the node, so that paths are long.
    for b in range(bs):
        for node, child in enumerate(tree.retrieve_next_token[b].tolist()):
            wanted = tree.tokens[b, child] if child >= 0 and torch.rand(1) < 0.9 else torch.randint(VOCABULARY, (1,))
            logits[b, node, wanted] = 5.0
        if b in spoil:
            logits[b, spoiled_node, 0] = value
    return tree, logits.view(-1, VOCABULARY)


@pytest.mark.parametrize("commit", [commit_path, launch_commit], ids=["torch", "kernel"])
@pytest.mark.parametrize(("bs", "block", "budget"), [(1, 8, 12), (5, 8, 3), (3, 5, 32), (2, 2, 1), (7, 16, 40)])
def test_a_path_is_emitted_and_kept(commit, bs, block, budget):
    tree, decision, node_slots, slots = make_step(bs, block, budget)
    seq_lens = torch.randint(1, 1000, (bs,))
    done = commit(decision, tree.tokens, node_slots, slots, seq_lens)
    assert done.lens.dtype == torch.int32
    for b in range(bs):
        path = [node for node in decision.path[b].tolist() if node >= 0]
        accepted = len(path) - 1
        assert done.lens[b] == accepted + 1 and done.seq_lens[b] == seq_lens[b] + accepted + 1
        emitted = [*tree.tokens[b, path[1:]].tolist(), int(decision.bonus[b])]
        assert done.tokens[b, : accepted + 1].tolist() == emitted
        assert done.roots[b] == emitted[-1]
        assert done.sources[b].tolist() == [*node_slots[b, path].tolist(), *slots[b, accepted + 1 :].tolist()]
        assert done.rows[b, : accepted + 1].tolist() == [b * (budget + 1) + node for node in path]
        assert all(0 <= row < bs * (budget + 1) for row in done.rows[b].tolist())


@pytest.mark.parametrize("commit", [commit_path, launch_commit], ids=["torch", "kernel"])
def test_a_request_whose_logits_failed_ends_alone(commit):
    """-1 ends it where tokens are read; until then the next step needs a token that can be embedded."""
    tree, decision, node_slots, slots = make_step(3, 8, 12, spoil=(1,))
    assert decision.failed.tolist() == [False, True, False]
    done = commit(decision, tree.tokens, node_slots, slots, torch.tensor([7, 8, 9]))
    assert done.tokens[1, 0] == -1 and done.lens[1] == 1 and done.seq_lens[1] == 9 and done.roots[1] == 0
    for b in (0, 2):
        assert done.lens[b] == decision.accept_len[b] + 1 and done.roots[b] == decision.bonus[b] >= 0


def test_kernel_and_torch_agree_on_every_element():
    for bs, block, budget in [(1, 8, 12), (6, 7, 20), (4, 16, 5)]:
        tree, decision, node_slots, slots = make_step(bs, block, budget, spoil=(0,))
        arguments = (decision, tree.tokens, node_slots, slots, torch.arange(bs) + 5)
        for name, by_torch in commit_path(*arguments)._asdict().items():
            by_kernel = getattr(launch_commit(*arguments), name)
            assert by_kernel.dtype == by_torch.dtype and torch.equal(by_kernel, by_torch), name


def test_no_target_of_a_move_is_the_source_of_an_earlier_one():
    """Sources lie at or behind their targets: a copy from front to back never reads what it wrote."""
    for _ in range(20):
        tree, decision, node_slots, slots = make_step(4, 8, 20)
        slots = node_slots[:, :8].contiguous()
        done = commit_path(decision, tree.tokens, node_slots, slots, torch.zeros(4, dtype=torch.int64))
        for b in range(4):
            where = {slot: place for place, slot in enumerate(node_slots[b].tolist())}
            places = [where[slot] for slot in done.sources[b].tolist()]
            moved = [(target, source) for target, source in enumerate(places) if target != source]
            written = set()
            for target, source in moved:
                assert source > target and source not in written
                written.add(target)


def test_decision_fields_that_are_views_are_read_rightly():
    """`decide` may hand over expanded or sliced tensors."""
    tree, decision, node_slots, slots = make_step(3, 8, 12)
    wide = torch.full((3, 20), -1)
    wide[:, :8] = decision.path
    sliced = Decision(wide[:, :8], decision.accept_len, decision.bonus, decision.failed)
    arguments = (tree.tokens, node_slots, slots, torch.arange(3))
    for a, b in zip(launch_commit(decision, *arguments), launch_commit(sliced, *arguments), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("bs", "block", "budget"), [(1, 8, 12), (5, 8, 3), (3, 5, 32), (2, 2, 1), (4, 16, 40)])
@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("node", [0, 1])
def test_the_kernel_follows_as_torch_does(bs, block, budget, value, node):
    spoil = () if value is None else range(0, bs, 2)
    tree, logits = make_logits(bs, block, budget, spoil=spoil, value=value, spoiled_node=node)
    if value == float("-inf"):
        logits.view(bs, -1, VOCABULARY)[::2, node] = value
    expected = decide_greedy(tree, logits, block)
    found = launch_follow(tree, *logits.max(-1), block)
    for name, by_torch in expected._asdict().items():
        by_kernel = getattr(found, name)
        assert by_kernel.dtype == by_torch.dtype and torch.equal(by_kernel, by_torch), name


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_that_is_written_in_place_is_the_one_that_is_built(dtype):
    """But for the prefixes' columns, which no one reads there."""
    bs, budget = 3, 20
    tree, _ = make_logits(bs, 8, budget)
    seq_lens = torch.tensor([5, 0, 17])
    built = build_tree_mask(tree.ancestors, seq_lens, int(seq_lens.sum()))
    given = torch.zeros(len(built) + 40, dtype=dtype)
    write_tree_mask(tree.ancestors, seq_lens, given)
    assert not given[len(built) :].any()
    begin = 0
    for length in seq_lens.tolist():
        rows = slice(begin, begin + (budget + 1) * (length + budget + 1))
        assert torch.equal(
            given[rows].view(budget + 1, -1)[:, length:].bool(), built[rows].view(budget + 1, -1)[:, length:]
        )
        assert not given[rows].view(budget + 1, -1)[:, :length].any()
        begin = rows.stop
