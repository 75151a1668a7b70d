"""What a verify step of DDTREE decides: paths, coins, bad logits."""

import itertools
import random

import numpy as np
import pytest
import torch
from fakes import FakeTreeSamplingOpByReferenceWalk, make_batch
from oracles import simulate
from sglang.srt.speculative import ddtree_decide, ddtree_sampling
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.ddtree_tree import build_tree
from sglang.srt.speculative.dflash_verify_op import walk_by_op

from patcher.agent.kernel_probe import reference_walk

DEPTH, RANKS, VOCAB = 5, 3, 8


def make_tree(bs, budget=9, *, seed=0):
    """Trees with siblings on several levels, over token ids below VOCAB."""
    generator = torch.Generator().manual_seed(seed)
    logps = torch.log_softmax(torch.randn(bs, DEPTH, VOCAB, generator=generator) * 2, -1)
    values, ids = logps.topk(RANKS)
    return build_tree(torch.randint(0, VOCAB, (bs,), generator=generator), values, ids, budget)


def verify_input(tree):
    n = tree.tokens.shape[1]
    return DDTreeVerifyInput(
        draft_token=tree.tokens.flatten(),
        positions=tree.depths.flatten(),
        draft_token_num=n,
        tree=tree,
        path_width=DEPTH + 1,
    )


def decide(tree, settings, logits):
    batch = make_batch(settings, logits.shape[-1])
    rows = logits.reshape(-1, logits.shape[-1]).clone()
    return ddtree_decide.decide(tree, rows, sampling_info=batch.sampling_info, reqs=batch.reqs, width=DEPTH + 1)


def walk(tree, probs):
    return walk_by_op(
        tokens=tree.tokens,
        retrieve_index=tree.retrieve_index,
        retrieve_next_token=tree.retrieve_next_token,
        retrieve_next_sibling=tree.retrieve_next_sibling,
        target_probs=probs,
        width=DEPTH + 1,
    )


# ---- paths -------------------------------------------------------------------------------------------------


def test_greedy_decision_is_direct_simulation_of_the_argmax():
    tree = make_tree(64)
    logits = torch.randn(64, 10, VOCAB)
    decision = decide(tree, [{"temperature": 0.0}] * 64, logits)
    lengths = set()
    for b in range(64):
        nodes, bonus = simulate(tree.tokens[b].tolist(), tree.parents[b].tolist(), logits[b].argmax(-1).tolist())
        assert decision.path[b].tolist() == nodes + [-1] * (DEPTH + 1 - len(nodes))
        assert decision.accept_len[b] == len(nodes) - 1 and decision.bonus[b] == bonus
        lengths.add(len(nodes))
    assert not decision.failed.any() and len(lengths) > 2


def test_path_of_the_ops_arrays_is_direct_simulation_with_the_same_coins(install_op):
    """accept_index holds rows of the whole batch; the path holds nodes, -1 beyond, and the bonus of the last one."""
    op = install_op(FakeTreeSamplingOpByReferenceWalk())
    lengths = set()
    for seed in range(60):
        tree = make_tree(5, budget=1 + seed % 24, seed=seed)
        n = tree.tokens.shape[1]
        likely = tree.tokens.gather(1, tree.retrieve_next_token.clamp(min=0))  # so that some paths get long
        probs = torch.softmax(torch.randn(5, n, VOCAB).scatter_(2, likely[:, :, None], 3.0), -1)
        path, accept_len, bonus = walk(tree, probs)
        assert path.shape == (5, DEPTH + 1)
        for b in range(5):
            links = {
                "tokens": tree.tokens[b].tolist(),
                "next_token": tree.retrieve_next_token[b].tolist(),
                "next_sibling": tree.retrieve_next_sibling[b].tolist(),
            }
            nodes, emitted = reference_walk(
                links, probs[b].tolist(), op.coins[-1][b].tolist(), op.final_coins[-1][b].item(), DEPTH + 1
            )
            assert path[b].tolist() == nodes + [-1] * (DEPTH + 1 - len(nodes))
            assert accept_len[b] == len(nodes) - 1
            assert bonus[b] == emitted[-1]
            parents = tree.parents[b].tolist()
            assert all(parents[child] == parent for parent, child in itertools.pairwise(nodes))
            assert [tree.tokens[b, node].item() for node in nodes[1:]] == emitted[:-1]
            lengths.add(len(nodes))
    assert len(lengths) >= 4


def test_a_batch_in_chunks_is_the_same_decision(decide_path, monkeypatch):
    """Large batches are decided some requests at a time; with one token possible per row nothing is left to chance."""
    tree = make_tree(7, seed=3)
    logits = torch.randn(7, 10, VOCAB)
    settings = [{"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}] * 3 + [{"temperature": 0.01}]
    logits[6] *= 1000
    whole = decide(tree, settings, logits)
    for requests_a_time in (1, 2, 3):
        monkeypatch.setattr(ddtree_sampling, "MAX_PROBS", requests_a_time * 10 * VOCAB)
        for one, other in zip(whole, decide(tree, settings, logits), strict=True):
            assert torch.equal(one, other)
    greedy = decide(tree, [{"temperature": 0.0}] * 7, logits)
    for one, other in zip(whole, greedy, strict=True):
        assert torch.equal(one, other)


def test_greedy_requests_stay_exactly_greedy_in_a_mixed_batch(decide_path):
    rng = random.Random(1)
    for seed in range(30):
        tree = make_tree(8, seed=seed)
        logits = torch.randn(8, 10, VOCAB) * 0.01  # nearly flat: sampling would hardly ever take the argmax
        greedy_ones = [rng.random() < 0.5 for _ in range(8)]
        sampled = [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 2.0, "min_p": 0.01}]
        settings = [{"temperature": 0.0} if greedy else rng.choice(sampled) for greedy in greedy_ones]
        mixed = decide(tree, settings, logits)
        greedy = decide(tree, [{"temperature": 0.0}] * 8, logits)
        for b in range(8):
            if greedy_ones[b]:
                assert torch.equal(mixed.path[b], greedy.path[b]) and mixed.bonus[b] == greedy.bonus[b]


def test_logit_bias_is_applied_to_every_node_of_its_request(decide_path):
    """Through verify(), which adds it; the commit is cut off."""
    tree = make_tree(2)
    batch = make_batch([{"temperature": 1.0, "logit_bias": {"6": 100.0}}, {"temperature": 0.0}], VOCAB)
    logits = torch.randn(20, VOCAB)
    seen = []
    spec = verify_input(tree)
    spec._commit = lambda batch, output, decision: seen.append(decision)
    batch.forward_mode = type("FakeMode", (), {"is_idle": staticmethod(lambda: False)})
    output = type("FakeOutput", (), {"next_token_logits": logits.clone()})
    spec.verify(batch=batch, logits_output=output, page_size=1)
    nodes, bonus = simulate(tree.tokens[0].tolist(), tree.parents[0].tolist(), [6] * 10)
    assert seen[0].path[0].tolist()[: len(nodes)] == nodes and seen[0].bonus[0] == bonus == 6
    nodes, bonus = simulate(tree.tokens[1].tolist(), tree.parents[1].tolist(), logits[10:].argmax(-1).tolist())
    assert seen[0].path[1].tolist()[: len(nodes)] == nodes and seen[0].bonus[1] == bonus


# ---- coins and scratch -------------------------------------------------------------------------------------

LARGEST = 1 - 2**-24  # torch.rand's, float32


@pytest.mark.parametrize("value", [0.0, 2**-24, 0.5, LARGEST])
def test_coins_are_in_0_1_whatever_rand_gives(install_op, monkeypatch, value):
    # The stand-in refuses coins outside (0, 1] and final coins outside [0, 1).
    op = install_op(FakeTreeSamplingOpByReferenceWalk())
    monkeypatch.setattr(torch, "rand", lambda shape, **how: torch.full(shape, value, **how))
    tree = make_tree(2)
    walk(tree, torch.softmax(torch.randn(2, 10, VOCAB), -1))
    assert bool((op.coins[0] == 1 - value).all())
    assert bool((op.final_coins[0] == value).all())


def test_a_child_that_the_target_forbids_is_never_accepted(install_op, monkeypatch):
    """The op accepts a child of probability 0 on a coin of 0, which rand can give and 1 - rand cannot."""
    install_op(FakeTreeSamplingOpByReferenceWalk())
    tree = make_tree(1)
    first = tree.tokens[0, 1]
    probs = torch.full((1, 10, VOCAB), 1 / (VOCAB - 1))
    probs[:, :, first] = 0.0
    for value in (0.0, LARGEST):
        monkeypatch.setattr(torch, "rand", lambda shape, value=value, **how: torch.full(shape, value, **how))
        path, _, bonus = walk(tree, probs)
        assert 1 not in path[0].tolist() and bonus != first


def test_uninitialised_memory_shows_nowhere(install_op, monkeypatch):
    """What torch.empty gives is poisoned: outputs must be prefilled, scratch zeroed, at every call."""
    # The stand-in dirties its scratch, and refuses scratch and outputs that are not filled as they must be.
    install_op(FakeTreeSamplingOpByReferenceWalk())
    real = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def poisoned(name):
        def allocate(*args, **how):
            return real[name](*args, **how).fill_(77)

        return allocate

    for name in real:
        monkeypatch.setattr(torch, name, poisoned(name))
    tree = make_tree(3)
    for _ in range(4):
        path, accept_len, _ = walk(tree, torch.softmax(torch.randn(3, 10, VOCAB), -1))
        for b in range(3):
            assert (path[b] >= 0).sum() == accept_len[b] + 1


def test_a_bonus_that_the_op_drew_beyond_the_row_is_replaced(install_op):
    """Rounding can leave the op's total unreached; it answers the last id, here of probability 0."""

    class FakeOpWhoseBonusIsTheLastId(FakeTreeSamplingOpByReferenceWalk):
        def __call__(self, *, predicts, **rest):
            super().__call__(predicts=predicts, **rest)
            predicts.fill_(VOCAB - 1)

    install_op(FakeOpWhoseBonusIsTheLastId())
    probs = torch.softmax(torch.randn(4, 10, VOCAB), -1)
    probs[:2, :, -1] = 0.0
    tree = make_tree(4)
    path, accept_len, bonus = walk(tree, probs)
    for b in range(4):
        row = probs[b, path[b, accept_len[b]]]
        assert bonus[b] == (row.argmax() if b < 2 else VOCAB - 1)


def test_what_was_drawn_comes_from_the_first_rank(decide_path, tp_group, monkeypatch):
    """Every draw goes through the group's broadcast, and what comes back is what counts."""
    tree = make_tree(2)
    logits = torch.randn(2, 10, VOCAB)
    settings = [{"temperature": 1.0}] * 2
    kept = []
    monkeypatch.setattr(tp_group, "broadcast", lambda tensor: kept.append(tensor.clone()) or tensor)
    here = decide(tree, settings, logits)
    assert len(kept) == 1
    replay = iter(kept)
    monkeypatch.setattr(tp_group, "broadcast", lambda tensor: next(replay))
    torch.manual_seed(99)  # another rank draws otherwise, and must not use it
    there = decide(tree, settings, logits)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one, other)


# ---- logits that are not finite ----------------------------------------------------------------------------


def spoil(row, how):
    if how == "all -inf":
        row.fill_(-float("inf"))
    else:
        row[2] = float(how)


@pytest.mark.parametrize("how", ["nan", "inf", "all -inf"])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_only_the_request_whose_path_meets_bad_logits_fails(how, greedy, request):
    """Sampled: on both decide paths. Tokens are near certain, so that the path is known."""
    paths = [None] if greedy else ["no_op", "op"]
    for which in paths:
        if which == "no_op":
            request.getfixturevalue("no_op")
        elif which == "op":
            request.getfixturevalue("install_op")(FakeTreeSamplingOpByReferenceWalk())
        tree = make_tree(4, seed=5)
        # All requests: the first child of each node, as deep as it goes.
        logits = torch.zeros(4, 10, VOCAB)
        wanted = tree.tokens.gather(1, tree.retrieve_next_token.clamp(min=0))
        logits.scatter_(2, wanted[:, :, None], 1000.0)
        settings = [{"temperature": 0.0 if greedy else 1.0}] * 4
        clean = decide(tree, settings, logits)
        assert not clean.failed.any() and int(clean.accept_len.min()) >= 2
        off_path = next(n for n in range(10) if n not in clean.path[1].tolist())
        spoil(logits[0, 0], how)  # the root's row
        spoil(logits[1, off_path], how)  # never looked at
        spoil(logits[2, clean.path[2, clean.accept_len[2]]], how)  # the row that the bonus is drawn from
        found = decide(tree, settings, logits)
        assert found.failed.tolist() == [True, False, True, False]
        for b in (1, 3):
            assert torch.equal(found.path[b], clean.path[b]) and found.bonus[b] == clean.bonus[b]
        assert torch.equal(found.path[2], clean.path[2])


def test_a_bad_greedy_request_in_a_sampled_batch_fails_alone(decide_path):
    tree = make_tree(3)
    logits = torch.randn(3, 10, VOCAB)
    logits[1, 0, 4] = float("nan")
    settings = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 1.0, "top_k": 3}]
    for _ in range(20):
        assert decide(tree, settings, logits).failed.tolist() == [False, True, False]


def test_bad_logits_do_not_disturb_the_draws_of_the_others(decide_path):
    """A row of NaN must not make an index out of range, nor a token of another request."""
    rng = np.random.default_rng(3)
    for seed in range(30):
        tree = make_tree(6, seed=seed)
        logits = torch.randn(6, 10, VOCAB)
        bad = torch.from_numpy(rng.random((6, 10)) < 0.3)
        logits[bad] = float("nan")
        settings = [{"temperature": 1.0, **one} for one in ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {}, {})]
        decision = decide(tree, settings, logits)
        for b in range(6):
            nodes = [node for node in decision.path[b].tolist() if node >= 0]
            assert len(nodes) == decision.accept_len[b] + 1
            assert bool(decision.failed[b]) == bool(bad[b, nodes].any())
            if not decision.failed[b]:
                assert 0 <= decision.bonus[b] < VOCAB
