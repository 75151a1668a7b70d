"""The draft side's kernels under Triton's interpreter: trees against torch's operations, best tokens against a sort.

Bit for bit, of many ties, of what cannot be used, of sums that round or overflow. tests/gpu runs them compiled.
"""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from oracles import best_paths
from sglang.srt.speculative import ddtree_candidates, ddtree_kernels, ddtree_top_kernels, ddtree_tree, ddtree_worker
from sglang.srt.speculative.ddtree_kernels import launch_mask, launch_tree
from sglang.srt.speculative.ddtree_top_kernels import launch_top
from test_draft import HIDDEN, VOCAB, make_head, make_worker
from test_tree import KINDS, check_request, random_case

TREES = 24
ROWS = 30


def bits(tensor):
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def check_same(roots, logps, ids, budget):
    expected = ddtree_tree.build_tree(roots, logps, ids, budget)
    tree = launch_tree(roots, logps, ids, budget)
    for name, one, other in zip(tree._fields, tree, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(bits(one), bits(other)), (name, logps, budget)
    return tree


def test_the_interpreter_runs_them():
    assert "Interpreted" in type(ddtree_kernels._select_kernel).__name__, "TRITON_INTERPRET=1 must be set"


def test_trees_and_masks_of_random_cases():
    rng = np.random.default_rng(7)
    padded = tied = 0
    for _ in range(TREES):
        logps, ids, roots, budget = random_case(rng, depths=7, ranks=(1, 2, 3, 8), budgets=14)
        table = torch.stack((roots, roots), 1)  # the worker's roots are a column of a table
        tree = check_same(table[:, 0], logps, ids, budget)
        padded += bool((tree.parents[:, 1:] < 0).any())
        tied += bool((tree.node_logws[:, 1:-1] == tree.node_logws[:, 2:]).any())
        prefixes = torch.from_numpy(rng.integers(0, 30, len(roots)))
        for lengths in (prefixes, prefixes.int()):
            mask = launch_mask(tree.ancestors, lengths, int(prefixes.sum()))
            assert torch.equal(mask, ddtree_tree.build_tree_mask(tree.ancestors, lengths, int(prefixes.sum())))
    assert min(padded, tied) > 3


@pytest.mark.parametrize(("depths", "ranks", "budget"), [(31, 64, 40), (15, 1, 20), (1, 3, 4), (2, 2, 255)])
def test_trees_at_the_ends_of_the_sizes(depths, ranks, budget):
    """Against the heap too, which knows nothing of either builder."""
    rng = np.random.default_rng(8)
    kind = KINDS[int(rng.integers(2))]
    logps = torch.from_numpy(-np.sort(-kind(rng, (1, depths, ranks)).astype(np.float32), axis=-1))
    ids = torch.arange(ranks).expand(1, depths, ranks)
    tree = check_same(torch.tensor([5]), logps, ids, min(budget, 40))
    check_request(tree, 0, best_paths(logps[0].numpy(), min(budget, 40)), ids[0].tolist(), 5, min(budget, 40))


def test_weights_above_certainty_are_certain():
    logps = torch.tensor([[[float("inf"), 0.5, -1.0], [1e-7, -0.0, -2.0]]])
    check_same(torch.tensor([5]), logps, torch.arange(3).expand(1, 2, 3), 10)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="a tree needs"):
        launch_tree(torch.zeros(2).long(), torch.zeros(1, 2, 3), torch.zeros(1, 2, 3).long(), 3)


def random_logits(rng, dtype):
    rows, vocabulary = int(rng.integers(1, 4)), int(rng.integers(1, 300))
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocabulary)))
    if rng.random() < 0.5:  # ties
        logits = logits.round()
    if rng.random() < 0.3:  # what logits masks leave
        logits[torch.from_numpy(rng.random((rows, vocabulary)) < 0.8)] = float("-inf")
    negative = torch.from_numpy(rng.random((rows, vocabulary)) < 0.5)
    return torch.where((logits == 0) & negative, -0.0, logits).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_best_tokens_smaller_id_first_and_norm(dtype, monkeypatch):
    monkeypatch.setattr(ddtree_top_kernels, "_GROUP", 4)
    monkeypatch.setattr(ddtree_top_kernels, "_CHUNK_GROUPS", 16)
    rng = np.random.default_rng(9)
    for _ in range(ROWS // 3):
        logits = random_logits(rng, dtype)
        count = int(rng.integers(1, min(logits.shape[1], 12) + 1))
        values, ids, norm = launch_top(logits, count)
        best, order = logits.float().sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values, best[:, :count])
        assert torch.equal(ids, order[:, :count])
        torch.testing.assert_close(norm, logits.float().logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-6)
        assert bool((values <= norm).all()), "a candidate is at most certain"


def test_best_tokens_at_the_sizes_that_are_compiled():
    logits = torch.randn(1, 20_000, dtype=torch.bfloat16)
    values, ids, norm = launch_top(logits, 8)
    best, order = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, best[:, :8]) and torch.equal(ids, order[:, :8])
    torch.testing.assert_close(norm, logits.float().logsumexp(-1, keepdim=True))


@pytest.mark.parametrize("poison", ["nan", "inf", "all -inf"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_that_is_no_distribution_leaves_the_root_alone(poison, dtype):
    logits = torch.zeros(2, 70, dtype=dtype)
    if poison == "all -inf":
        logits[1] = float("-inf")
    else:
        logits[1, 60] = float(poison)
    values, ids, norm = launch_top(logits, 3)
    assert bool(((ids >= 0) & (ids < 70)).all())
    tree = launch_tree(torch.arange(2), (values - norm)[:, None], ids[:, None], 3)
    assert tree.parents.tolist() == [[-1, 0, 0, 0], [-1] * 4]
    assert tree.tokens[0].tolist() == [0, 0, 1, 2]


def test_tensors_on_the_cpu_go_to_torch(monkeypatch):
    for module in (ddtree_kernels, ddtree_top_kernels):
        for name, value in vars(module).items():
            if name.startswith("launch_") and inspect.isfunction(value):
                monkeypatch.setattr(module, name, None)
    logits = torch.randn(3, 40)
    values, ids, norm = ddtree_top_kernels.top_candidates(logits, 4)
    tree = ddtree_kernels.build_tree(torch.arange(1), (values - norm)[None], ids[None], 5)
    expected = ddtree_tree.build_tree(torch.arange(1), (values - norm)[None], ids[None], 5)
    assert all(torch.equal(one, other) for one, other in zip(tree, expected, strict=True))
    ddtree_kernels.build_tree_mask(tree.ancestors, torch.tensor([3]), 3)


def test_nothing_that_varies_between_steps_is_specialised_on():
    """A launch that differs from the warm-up's only in batch, lengths or addresses must find it compiled."""
    sizes = {"vocab_size"}  # one for a server's life
    fresh = {"logits_ptr", "maxima_ptr", "totals_ptr", "values_ptr", "norm_ptr"}  # whole allocations, always aligned
    fresh |= {"ids_ptr", "ancestors_ptr"}
    for module in (ddtree_kernels, ddtree_top_kernels):
        for name, kernel in vars(module).items():
            if not name.endswith("_kernel"):
                continue
            for argument in inspect.signature(kernel.fn).parameters.values():
                if "constexpr" in str(argument.annotation) or argument.name in sizes | fresh:
                    continue
                kinds = kernel.kwargs["do_not_specialize"] or [], kernel.kwargs["do_not_specialize_on_alignment"] or []
                assert any(argument.name in names for names in kinds), (name, argument.name, triton.__version__)


def test_the_worker_warms_what_a_step_uses(monkeypatch, tp_group):
    monkeypatch.setattr(ddtree_candidates, "get_tp_group", lambda: tp_group)
    asked = []
    used = (ddtree_candidates, "top_candidates"), (ddtree_worker, "build_tree"), (ddtree_worker, "build_tree_mask")
    for module, name in used:
        real = getattr(module, name)

        def record(*arguments, name=name, real=real):
            shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in arguments]
            asked.append((name, *shapes))
            return real(*arguments)

        monkeypatch.setattr(module, name, record)
    worker = make_worker(topk=4, budget=6, block=5)
    worker.device = "cpu"
    head = make_head(torch.randn(VOCAB, HIDDEN), padding=14)
    worker.model_runner = SimpleNamespace(model=SimpleNamespace(lm_head=head))
    worker._warm_up()
    assert asked == [
        ("top_candidates", (4, VOCAB), 4),
        ("build_tree", (1,), (1, 4, 4), (1, 4, 4), 6),
        ("build_tree_mask", (1, 7, 7), (1,), 0),
    ]
