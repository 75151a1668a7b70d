"""Samples compared where rounding does not decide: it must pass over a moved cut and find a bias."""

import random

from scipy import stats

from scripts.gpu import decided

N = 20_000
# Next tokens by beginning: two tokens a text.
RULE = {(): {1: 0.5, 2: 0.3, 3: 0.2}, (1,): {4: 0.6, 5: 0.35, 6: 0.05}, (2,): {4: 0.5, 5: 0.5}, (3,): {6: 1.0}}
CUT = ((1,), 6)  # kept here, dropped there


def samples(rule: dict, seed: int) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    texts = []
    for _ in range(N):
        text: tuple[int, ...] = ()
        while text in rule:
            text += tuple(draw.choices(list(rule[text]), list(rule[text].values())))
        texts.append(text)
    return texts


def excess(one: list, other: list, doubtful: set) -> float:
    """By how many standard deviations the sum of chi-squares passes its expectation."""
    tables = decided.tables(one, other, doubtful)
    found = [stats.chi2_contingency(table, correction=False) for table in tables]
    chi2, freedom = sum(one.statistic for one in found), sum(one.dof for one in found)
    return (chi2 - freedom) / (2 * freedom) ** 0.5


def dropped(rule: dict, before: tuple, token: int) -> dict:
    kept = {t: p for t, p in rule[before].items() if t != token}
    return rule | {before: {t: p / sum(kept.values()) for t, p in kept.items()}}


def test_a_cut_that_moved_is_seen_without_and_not_seen_with_its_token_named():
    # n = 20,000 a side, fixed seeds; threshold 5 standard deviations (3 to 5 degrees of freedom).
    kept, moved = samples(RULE, 1), samples(dropped(RULE, *CUT), 2)
    assert excess(kept, moved, set()) > 100
    assert excess(kept, moved, {CUT}) < 5
    assert excess(moved, kept, {CUT}) < 5


def test_a_bias_beside_a_moved_cut_is_found():
    biased = dropped(RULE, *CUT) | {(2,): {4: 0.56, 5: 0.44}}
    assert excess(samples(RULE, 1), samples(biased, 2), {CUT}) > 5


def test_a_bias_in_the_first_token_is_found():
    biased = RULE | {(): {1: 0.52, 2: 0.29, 3: 0.19}}
    assert excess(samples(RULE, 1), samples(biased, 2), {CUT}) > 5


def test_rare_tokens_share_a_column_and_what_follows_a_doubtful_token_is_left_out():
    one = [(1, 4)] * 50 + [(1, 5)] * 40 + [(2, 4)] * 10 + [(7, 4), (8, 4), (9, 4)] * 2
    other = [(1, 4)] * 45 + [(1, 5)] * 45 + [(2, 4)] * 12 + [(7, 4), (8, 4), (9, 4)] * 3
    assert decided.tables(one, other, {((), 2)}) == [[[90, 6], [90, 9]], [[50, 40], [45, 45]]]
