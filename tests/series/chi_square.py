"""Counts against a distribution."""

import math
from collections import Counter

# A seeded test fails when the code changed, not by bad luck: one in a million of unbiased runs is above the limit.
NORMAL_QUANTILE = 4.7534  # of 1 - 1e-6
SMALLEST_CELL = 5.0  # cells that expect fewer are counted together


def limit(degrees: int) -> float:
    """The chi-square quantile of 1 - 1e-6 (Wilson and Hilferty's approximation, a percent off at worst)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + NORMAL_QUANTILE * math.sqrt(spread)) ** 3


def against(counts: Counter, distribution: dict) -> tuple[float, float]:
    """(statistic, limit) of `counts` against {outcome: probability}. Infinite when the impossible was counted."""
    total = sum(counts.values())
    if any(outcome not in distribution for outcome in counts):
        return math.inf, 1.0
    cells, rest_expected, rest_seen = [], 0.0, 0
    for outcome, probability in distribution.items():
        expected = probability * total
        if expected < SMALLEST_CELL:
            rest_expected += expected
            rest_seen += counts[outcome]
        else:
            cells.append((expected, counts[outcome]))
    if rest_expected > 0:
        cells.append((max(rest_expected, SMALLEST_CELL), rest_seen))
    if len(cells) == 1:  # everything is in one cell: nothing can be off
        return 0.0, 1.0
    return sum((seen - expected) ** 2 / expected for expected, seen in cells), limit(len(cells) - 1)


def fits(counts: Counter, distribution: dict) -> bool:
    statistic, bound = against(counts, distribution)
    return statistic < bound


def same(first: Counter, second: Counter) -> bool:
    """Whether two sets of counts can come from one distribution (two-sample chi-square, same limit)."""
    n, m = sum(first.values()), sum(second.values())
    outcomes = [o for o in {*first, *second} if first[o] + second[o] >= 2 * SMALLEST_CELL]
    statistic = sum(
        (math.sqrt(m / n) * first[o] - math.sqrt(n / m) * second[o]) ** 2 / (first[o] + second[o]) for o in outcomes
    )
    return statistic < limit(max(1, len(outcomes) - 1))
