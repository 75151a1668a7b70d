"""Counts against a distribution."""

import math
from collections import Counter

from scipy import stats

# A seeded test fails when the code changed, not by bad luck: one in a million of unbiased runs is beyond the limit.
TAIL = 1e-6
SMALLEST_CELL = 5.0  # cells that expect fewer are counted together


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
    expected, seen = zip(*cells, strict=True)
    # Not the same sum: the last cell may expect more than the rest does.
    statistic = stats.chisquare(seen, expected, sum_check=False).statistic
    return float(statistic), float(stats.chi2.isf(TAIL, len(cells) - 1))


def fits(counts: Counter, distribution: dict) -> bool:
    statistic, bound = against(counts, distribution)
    return statistic < bound


def same(first: Counter, second: Counter) -> bool:
    """Whether two sets of counts can come from one distribution, by the same limit."""
    often = [outcome for outcome in first | second if first[outcome] + second[outcome] >= 2 * SMALLEST_CELL]
    table = [[side[outcome] for outcome in often] for side in (first, second)]
    rest = [side.total() - sum(row) for side, row in zip((first, second), table, strict=True)]
    if any(rest):
        table = [[*row, count] for row, count in zip(table, rest, strict=True)]
    return bool(stats.chi2_contingency(table, correction=False).pvalue > TAIL)
