"""The reference walk of the kernel probe: against another formulation of it, and against the target distribution."""

import bisect
import random
from collections import Counter
from fractions import Fraction
from itertools import accumulate

import pytest
from scipy import stats

from patcher.agent.kernel_probe import (
    DENOMINATOR,
    UNWRITTEN_INDEX,
    draw,
    expected_arrays,
    random_call,
    random_request,
    reference_walk,
)

CASES = 3000
DRAWS = 60_000
# Chi-square, 7 degrees of freedom, p = 1e-5. The seed is fixed, so a failure is a change, not bad luck.
CHI_SQUARE_LIMIT = 35.0
TREE = {  # root -> 1, 2, 3 ; 1 -> 4, 5
    "tokens": [0, 3, 1, 6, 2, 3],
    "next_token": [1, 4, -1, -1, -1, -1],
    "next_sibling": [-1, 2, 3, -1, 5, -1],
}
ROOT_ROW = [0.0625, 0.25, 0.125, 0.1875, 0.03125, 0.09375, 0.125, 0.125]
CHILD_ROW = [0.25, 0.0625, 0.3125, 0.125, 0.0625, 0.0625, 0.0625, 0.0625]
TARGET = [ROOT_ROW, CHILD_ROW, *[ROOT_ROW] * 4]


def children_of(tree, node):
    child, found = tree["next_token"][node], []
    while child != -1:
        found.append(child)
        child = tree["next_sibling"][child]
    return found


def by_intervals(tree, target, coins, final_coin, depth_limit):
    """The same decision, written another way: exact fractions, recursion, and one bisection over cumulated masses."""

    def descend(node, room):
        row = [Fraction(p) for p in target[node]]
        children = children_of(tree, node) if room else []
        bounds = list(accumulate(row[tree["tokens"][child]] for child in children))
        place = bisect.bisect_left(bounds, Fraction(coins[node]))
        if place < len(children):
            nodes, tokens = descend(children[place], room - 1)
            return [node, *nodes], [tree["tokens"][children[place]], *tokens]
        masses = [Fraction(0) if any(tree["tokens"][c] == t for c in children) else p for t, p in enumerate(row)]
        cumulated = list(accumulate(masses))
        return [node], [bisect.bisect_right(cumulated, Fraction(final_coin) * cumulated[-1])]

    return descend(0, depth_limit - 1)


def test_walk_equals_interval_formulation_on_random_trees():
    rng = random.Random(1)
    depths = Counter()
    for case in range(CASES):
        request = random_request(rng, rng.choice([1, 2, 4, 9, 17]), rng.choice([2, 5, 16]))
        limit = rng.randint(1, request["depth"])
        arguments = (request["tree"], request["target"], request["coins"], request["final_coin"], limit)
        found = reference_walk(*arguments)
        assert found == by_intervals(*arguments), case
        depths[len(found[0])] += 1
    assert len(depths) > 4  # deep paths were among them


def test_random_trees_are_what_the_op_is_given_by_a_builder():
    rng = random.Random(2)
    for _ in range(300):
        requests, _ = random_call(rng)
        for request in requests:
            tree, reached, todo = request["tree"], set(), [0]
            while todo:
                node = todo.pop()
                assert node not in reached
                reached.add(node)
                children = children_of(tree, node)
                tokens = [tree["tokens"][child] for child in children]
                assert len(set(tokens)) == len(tokens), "duplicate siblings would be counted twice"
                assert all(child > node for child in children)
                todo += children
            assert all(0 < coin <= 1 for coin in request["coins"])
            assert all(sum(row) == 1.0 for row in request["target"])
            assert all((p * DENOMINATOR).is_integer() for row in request["target"] for p in row)


def test_expected_arrays_hold_global_rows_and_leave_the_rest_unwritten():
    one = {"tree": TREE, "target": TARGET, "coins": [0.1875, 0.3125, 1, 1, 1, 1], "final_coin": 0.0}
    none = {"tree": TREE, "target": TARGET, "coins": [1.0] * 6, "final_coin": 0.0}
    predicts, index, counts = expected_arrays([one, none], 3)
    assert counts == [2, 0]
    assert index == [[0, 1, 4], [6, UNWRITTEN_INDEX, UNWRITTEN_INDEX]]
    assert predicts == [3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]  # node 4's bonus is token 0, and so is the other root's
    assert expected_arrays([one, none], 1)[1:] == ([[0], [6]], [0, 0])


def test_a_coin_of_zero_accepts_an_impossible_child():
    tree = {"tokens": [0, 1], "next_token": [1, -1], "next_sibling": [-1, -1]}
    row = [1.0, 0.0]
    assert reference_walk(tree, [row, row], [0.0, 1.0], 0.5, 2)[0] == [0, 1]
    assert reference_walk(tree, [row, row], [1 / DENOMINATOR, 1.0], 0.5, 2)[0] == [0]


def test_draw_takes_only_tokens_with_mass():
    assert draw([0.0, 0.5, 0.0, 0.5], 0.0) == 1
    assert draw([0.0, 0.5, 0.0, 0.5], 0.5) == 3
    assert draw([0.0, 0.5, 0.5, 0.0], 1.0) == 2
    assert draw([0.0, 0.0], 0.5) == 1  # nothing has mass: the op answers the last id of the vocabulary


def chi_square(counts, row):
    expected = [counts.total() * p for p in row]
    return stats.chisquare([counts[token] for token in range(len(row))], expected).statistic


def emitted(walk, seed):
    rng = random.Random(seed)
    first, second = Counter(), Counter()
    for _ in range(DRAWS):
        coins = [1.0 - rng.random() for _ in TREE["tokens"]]
        accepted, tokens = walk(TREE, TARGET, coins, rng.random(), 3)
        first[tokens[0]] += 1
        if accepted[1:2] == [1]:
            second[tokens[1]] += 1
    return first, second


def test_emitted_tokens_are_distributed_as_the_target():
    first, second = emitted(reference_walk, 3)
    assert chi_square(first, ROOT_ROW) < CHI_SQUARE_LIMIT
    assert sum(second.values()) > 10_000
    assert chi_square(second, CHILD_ROW) < CHI_SQUARE_LIMIT


def rejected_stay_in_the_row(tree, target, coins, final_coin, depth_limit):
    """A wrong rule: the last token is drawn from the whole row, rejected siblings included."""
    accepted, tokens = reference_walk(tree, target, coins, final_coin, depth_limit)
    return accepted, [*tokens[:-1], draw(target[accepted[-1]], final_coin)]


def ratio_to_a_draft(tree, target, coins, final_coin, depth_limit):
    """A wrong rule: each child accepted with min(1, p/q), as if it had been sampled from a draft with q = 1/2."""
    children = children_of(tree, 0)
    for child in children:
        token = tree["tokens"][child]
        if coins[child] <= min(1.0, target[0][token] / 0.5):
            return [0, child], [token, draw(target[child], final_coin)]
    left = [0.0 if t in {tree["tokens"][c] for c in children} else p for t, p in enumerate(target[0])]
    return [0], [draw(left, final_coin)]


@pytest.mark.parametrize("rule", [rejected_stay_in_the_row, ratio_to_a_draft])
def test_the_statistics_reject_a_biased_rule(rule):
    first, _ = emitted(rule, 3)
    assert chi_square(first, ROOT_ROW) > 10 * CHI_SQUARE_LIMIT
