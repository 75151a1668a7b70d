"""The tree builder against the heap and against plain enumeration; arrays, mask and walk against loops."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from oracles import best_paths, best_paths_by_enumeration, line_of, links_of, simulate
from sglang.srt.speculative import ddtree_tree
from sglang.srt.speculative.ddtree_tree import build_tree, build_tree_mask, follow

CASES = 2500
ENUMERATED = 400
INF = float("inf")


def softmax_like(rng, shape):
    scores = rng.normal(0, 2, shape)
    return np.minimum(scores - np.log(np.exp(scores).sum(-1, keepdims=True)), 0.0)  # rounding must not pass 0


def many_ties(rng, shape):
    return -0.5 * rng.integers(0, 3, shape)


def ties_and_unusable(rng, shape):
    logps = -1.0 * rng.integers(0, 4, shape)
    logps[logps == -3] = -np.inf
    return logps


def zeros_of_both_signs(rng, shape):
    return np.where(rng.random(shape) < 0.5, -0.0, 0.0)


def sums_that_round(rng, shape):
    """Weights so unequal that a sum swallows the small ones: ties that are made by float32."""
    return -rng.choice([1e-9, 3e-8, 1.0, 1.0000001, 1e4], shape)


def sums_that_overflow(rng, shape):
    return -rng.choice([0.0, 1e38, 3e38], shape)


KINDS = (softmax_like, many_ties, ties_and_unusable, zeros_of_both_signs, sums_that_round, sums_that_overflow)


def random_case(rng, *, depths=15, ranks=(1, 1, 2, 3, 4, 8, 20, 32), budgets=40):
    """(logps float32 [bs, D, K] falling along K, distinct ids int64 [bs, D, K], root tokens, budget)."""
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, depths + 1)), int(rng.choice(ranks)))
    kind = KINDS[rng.integers(len(KINDS))]
    logps = -np.sort(-kind(rng, shape).astype(np.float32), axis=-1)
    if rng.random() < 0.2:  # NaN where falling order puts what cannot be used
        logps[np.isneginf(logps)] = np.nan
        logps[..., int(rng.integers(0, shape[2])) :] = np.nan
    ids = np.argsort(rng.random((*shape[:2], 1000)), axis=-1)[..., : shape[2]]
    roots = rng.integers(0, 1000, shape[0])
    return torch.from_numpy(logps), torch.from_numpy(ids), torch.from_numpy(roots), int(rng.integers(1, budgets + 1))


def check_request(tree, b, found, ids, root, budget):
    """One request's columns against the oracle's [(path, log-weight)]."""
    number = {(): 0, **{path: i for i, (path, _) in enumerate(found, 1)}}
    pads = budget - len(found)
    tokens = [root, *(ids[len(path) - 1][path[-1]] for path, _ in found), *[0] * pads]
    parents = [-1, *(number[path[:-1]] for path, _ in found), *[-1] * pads]
    depths = [0, *(len(path) for path, _ in found), *[0] * pads]
    logws = np.array([0, *(logw for _, logw in found), *[-INF] * pads], dtype=np.float32)
    assert tree.tokens[b].tolist() == tokens
    assert tree.parents[b].tolist() == parents
    assert tree.depths[b].tolist() == depths
    assert np.array_equal(tree.node_logws[b].numpy(), logws)  # bit for bit, but for the sign of zero
    first, following = links_of(parents)
    assert tree.retrieve_next_token[b].tolist() == first
    assert tree.retrieve_next_sibling[b].tolist() == following
    for node in range(budget + 1):
        assert set(tree.ancestors[b, node].nonzero().flatten().tolist()) == line_of(parents, node)
    return tokens, parents


def check_properties(tree, b, nodes):
    """What the kernel needs, said without the oracle: of the first `nodes` columns, and of the pads behind them."""
    tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
    logws = tree.node_logws[b].tolist()
    reached, todo = set(), [0]
    while todo:
        node = todo.pop()
        assert node not in reached
        reached.add(node)
        child, siblings = tree.retrieve_next_token[b, node].item(), []
        while child != -1:
            assert child > node == parents[child]
            siblings.append(child)
            child = tree.retrieve_next_sibling[b, child].item()
        assert len({tokens[child] for child in siblings}) == len(siblings)
        assert [logws[child] for child in siblings] == sorted((logws[child] for child in siblings), reverse=True)
        assert all(logws[child] <= logws[node] for child in siblings)
        todo += siblings
    assert reached == set(range(nodes)), "all nodes and no pad can be reached"


def test_best_first_set_order_weights_and_links_on_random_cases():
    rng = np.random.default_rng(1)
    padded = several_words = tied = with_nan = 0
    for _ in range(CASES):
        logps, ids, roots, budget = random_case(rng)
        tree = build_tree(roots, logps, ids, budget)
        bs = len(roots)
        assert tree.tokens.shape == (bs, budget + 1)
        assert tree.retrieve_index.tolist() == [
            list(range(b * (budget + 1), (b + 1) * (budget + 1))) for b in range(bs)
        ]
        for b in range(bs):
            found = best_paths(logps[b].numpy(), budget)
            check_request(tree, b, found, ids[b].tolist(), roots[b].item(), budget)
            check_properties(tree, b, len(found) + 1)
            padded += len(found) < budget
            tied += len({logw for _, logw in found}) < len(found)
        with_nan += bool(logps.isnan().any())
        several_words += logps.shape[1] > 62 // logps.shape[2].bit_length()
    # The generator must go on reaching the corners.
    assert min(padded, several_words, tied, with_nan) > 100


def test_the_heap_oracle_is_the_top_of_all_paths():
    rng = np.random.default_rng(2)
    for _ in range(ENUMERATED):
        logps, _, roots, budget = random_case(rng, depths=4, ranks=(1, 2, 3, 4), budgets=60)
        for b in range(len(roots)):
            assert best_paths(logps[b].numpy(), budget) == best_paths_by_enumeration(logps[b].numpy(), budget)


def test_large_budgets_and_the_widest_rank_paths():
    rng = np.random.default_rng(3)
    for depth, ranks, budget in ((15, 32, 256), (15, 31, 127), (15, 2, 256), (7, 8, 256), (15, 1, 64), (1, 32, 64)):
        for kind in (softmax_like, many_ties):
            logps = -np.sort(-kind(rng, (2, depth, ranks)).astype(np.float32), axis=-1)
            ids = torch.arange(ranks).expand(2, depth, ranks)
            tree = build_tree(torch.tensor([1, 2]), torch.from_numpy(logps), ids, budget)
            for b in range(2):
                found = best_paths(logps[b], budget)
                check_request(tree, b, found, ids[b].tolist(), b + 1, budget)


def test_one_candidate_per_depth_is_a_chain():
    ids = torch.tensor([[[5], [6], [7]]])
    tree = build_tree(torch.tensor([9]), torch.zeros(1, 3, 1), ids, 5)
    assert tree.tokens.tolist() == [[9, 5, 6, 7, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 0, 0]]


@pytest.mark.parametrize("value", [-INF, float("nan")])
def test_nothing_usable_leaves_the_root_alone(value):
    logps = torch.full((2, 3, 4), value)
    logps[1, 0, 0] = -1.0  # the other request is not touched by it
    tree = build_tree(torch.tensor([9, 8]), logps, torch.arange(4).expand(2, 3, 4), 3)
    assert tree.parents.tolist() == [[-1] * 4, [-1, 0, -1, -1]]
    assert tree.ancestors[0].tolist() == torch.eye(4, dtype=torch.bool).tolist()


def test_token_0_is_a_token_like_any_other():
    logps = torch.tensor([[[-0.1, -3.0]]])
    tree = build_tree(torch.tensor([0]), logps, torch.tensor([[[0, 1]]]), 3)
    assert tree.parents.tolist() == [[-1, 0, 0, -1]]
    path, accept_len, bonus = follow(tree, torch.tensor([[0, 4, 5, 6]]), 2)
    assert (path.tolist(), accept_len.tolist(), bonus.tolist()) == ([[0, 1]], [1], [4])


def test_a_request_does_not_depend_on_its_batch():
    rng = np.random.default_rng(4)
    logps = torch.from_numpy(-np.sort(-softmax_like(rng, (4, 7, 8)).astype(np.float32), axis=-1))
    ids = torch.arange(8).expand(4, 7, 8)
    together = build_tree(torch.arange(4), logps, ids, 16)
    for b in range(4):
        alone = build_tree(torch.arange(4)[b : b + 1], logps[b : b + 1], ids[b : b + 1], 16)
        for name, field in alone._asdict().items():
            if name != "retrieve_index":
                assert torch.equal(field[0], getattr(together, name)[b]), name


@pytest.mark.parametrize(
    ("roots", "logps", "ids", "budget"),
    [
        ((2,), (2, 3, 4), (2, 3, 5), 3),
        ((2,), (2, 3), (2, 3), 3),
        ((1,), (2, 3, 4), (2, 3, 4), 3),
        ((2,), (2, 3, 4), (2, 3, 4), 0),
        ((2,), (2, 0, 4), (2, 0, 4), 3),
        ((2,), (2, 3, 0), (2, 3, 0), 3),
    ],
)
def test_shapes_that_do_not_fit_are_refused(roots, logps, ids, budget):
    with pytest.raises(ValueError, match=r"must both be|a tree needs"):
        build_tree(torch.zeros(roots).long(), torch.zeros(logps), torch.zeros(ids).long(), budget)


def test_follow_is_direct_simulation():
    rng = np.random.default_rng(5)
    lengths = set()
    for _ in range(1000):
        logps, ids, roots, budget = random_case(rng, depths=7, ranks=(1, 2, 3, 8), budgets=24)
        ids = torch.arange(logps.shape[2]).expand_as(ids)  # few tokens, so that many nodes hold the same
        tree = build_tree(roots % 8, logps, ids, budget)
        bs, n = tree.tokens.shape
        # Mostly a token of the tree, so that paths get long.
        choice = torch.from_numpy(rng.integers(0, 8, (bs, n)))
        likely = tree.tokens.gather(1, tree.retrieve_next_token.clamp(min=0))
        choice = torch.where(torch.from_numpy(rng.random((bs, n)) < 0.6), likely, choice)
        width = logps.shape[1] + 1
        path, accept_len, bonus = follow(tree, choice, width)
        assert path.shape == (bs, width)
        for b in range(bs):
            nodes, last = simulate(tree.tokens[b].tolist(), tree.parents[b].tolist(), choice[b].tolist())
            assert path[b].tolist() == nodes + [-1] * (width - len(nodes))
            assert accept_len[b].item() == len(nodes) - 1
            assert bonus[b].item() == last
            lengths.add(len(nodes))
    assert lengths >= set(range(1, 8))


def test_mask_is_each_requests_rows_one_after_the_other():
    rng = np.random.default_rng(6)
    for _ in range(100):
        logps, ids, roots, budget = random_case(rng, depths=7, ranks=(1, 3, 8), budgets=20)
        tree = build_tree(roots, logps, ids, budget)
        prefixes = [int(p) for p in rng.integers(0, 30, len(roots))]
        expected = []
        for b, prefix in enumerate(prefixes):
            parents = tree.parents[b].tolist()
            for node in range(budget + 1):
                line = line_of(parents, node)
                expected += [True] * prefix + [column in line for column in range(budget + 1)]
        for dtype in (torch.int32, torch.int64):
            mask = build_tree_mask(tree.ancestors, torch.tensor(prefixes, dtype=dtype), sum(prefixes))
            assert mask.dtype == torch.bool
            assert mask.tolist() == expected


def test_module_needs_torch_only():
    program = (
        "import importlib.util, sys;"
        f"spec = importlib.util.spec_from_file_location('ddtree_tree', {ddtree_tree.__file__!r});"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module);"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'sglang']"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_value_is_read_back_to_the_host():
    """On the meta device there are no values: whatever reads one raises."""
    logps = torch.zeros(2, 7, 8, device="meta")
    ids = torch.zeros(2, 7, 8, dtype=torch.int64, device="meta")
    tree = build_tree(torch.zeros(2, dtype=torch.int64, device="meta"), logps, ids, 16)
    follow(tree, tree.tokens, 8)
