"""How many nodes are verified, by the number of requests; and that the first nodes of a tree are the smaller tree."""

import numpy as np
import pytest
import torch
from sglang.srt.speculative.ddtree_tree import build_tree, cut_tree, root_alone
from sglang.srt.speculative.ddtree_widths import Widths, parse_widths
from test_tree import random_case

SIZES = [1, 2, 4, 8, 16, 32, 64]


def test_a_number_is_for_every_batch():
    assert parse_widths("16") == parse_widths(16) == Widths(((1, 16),))
    assert {parse_widths(16).at(requests) for requests in (1, 7, 1000)} == {17}


def test_a_table_names_where_a_budget_begins():
    widths = parse_widths("1:31, 9:7,65:0")
    assert [widths.at(requests) for requests in (1, 8, 9, 64, 65, 1000)] == [32, 32, 8, 8, 1, 1]
    assert (widths.budget, widths.all()) == (31, (32, 8, 1))


def test_the_default_is_a_table_that_falls():
    for text in (None, "auto"):
        budgets = [budget for _, budget in parse_widths(text).steps]
        assert len(budgets) > 2 and budgets == sorted(budgets, reverse=True)


@pytest.mark.parametrize("text", ["", "x", "1:", "1:x", "2:4", "1:4,1:3", "1:4,3:4", "1:4,3:5", "1:4,3:-1", "1:4,,"])
def test_no_table(text):
    with pytest.raises(ValueError, match=r"--speculative-ddtree-budget .*, got "):
        parse_widths(text)


@pytest.mark.parametrize("text", ["auto", "8", "1:31,3:7,6:3,100:0", "1:5,64:2", "1:5,65:2"])
def test_every_batch_finds_graphs_of_its_width(text):
    """SGLang pads a batch to the next captured size."""
    widths = parse_widths(text)
    captured = {width: widths.batches(width, SIZES) for width in widths.all()}
    for requests in range(1, SIZES[-1] + 1):
        padded = next(size for size in SIZES if size >= requests)
        assert padded in captured[widths.at(requests)]
    for width, sizes in captured.items():
        for size, below in zip(SIZES, [0, *SIZES], strict=False):
            needed = any(widths.at(requests) == width for requests in range(below + 1, size + 1))
            assert (size in sizes) == needed


def test_the_first_nodes_of_a_tree_are_the_tree_of_so_many():
    rng = np.random.default_rng(11)
    for _ in range(40):
        logps, ids, roots, budget = random_case(rng, depths=6, ranks=(1, 2, 4), budgets=14)
        tree = build_tree(roots, logps, ids, budget)
        for smaller in range(1, budget + 1):
            expected = build_tree(roots, logps, ids, smaller)
            for name, one, other in zip(tree._fields, cut_tree(tree, smaller + 1), expected, strict=True):
                assert torch.equal(one, other), (name, budget, smaller)


def test_a_root_alone():
    roots = torch.tensor([3, 9])
    tree = root_alone(torch.stack((roots, roots), 1)[:, 0])
    cut = cut_tree(build_tree(roots, torch.zeros(2, 1, 1), torch.ones(2, 1, 1, dtype=torch.int64), 1), 1)
    for name, one, other in zip(tree._fields, tree, cut, strict=True):
        assert one.is_contiguous() and torch.equal(one, other), name
