"""Two servers' samples compared only where rounding does not decide: token by token, given those before it.

A token within a step of bfloat16 of a cut is kept at one shape of the batch and dropped at another, by plain decoding
too, and then all texts after the same beginning change their shares. Given a beginning, and given that the next token
is none of the doubtful ones, the shares of the others do not depend on what became of them. So the counts of next
tokens are compared beginning by beginning, doubtful tokens and everything after them left out; the sum of chi-squares
of independent tables is chi-square with the sum of their degrees of freedom.
"""

import collections
from collections.abc import Iterable

LEAST_EXPECTED = 5
Text = tuple[int, ...]


def contingency(one: collections.Counter, other: collections.Counter) -> tuple[list, list[list[int]]]:
    """(categories, columns [count in one, count in other]). Categories expected fewer than LEAST_EXPECTED times on a
    side share a last column, which has no category of its own and is left out while it is as rare itself."""
    share = min(one.total(), other.total()) / (one.total() + other.total())
    kept = [key for key in one | other if (one[key] + other[key]) * share >= LEAST_EXPECTED]
    columns = [[one[key], other[key]] for key in kept]
    rest = [side.total() - sum(side[key] for key in kept) for side in (one, other)]
    if sum(rest) * share >= LEAST_EXPECTED:
        columns.append(rest)
    return kept, columns


def tables(one: Iterable[Text], other: Iterable[Text], doubtful: set[tuple[Text, int]]) -> list[list[list[int]]]:
    """Contingency tables of next tokens, one a beginning that both have.

    one, other: texts. doubtful: (beginning, token) whose cut rounding decides. Each table is [[counts in one], [counts
    in other]] with the columns of `contingency`. Beginnings with less than two columns say nothing and are left out.
    """
    counts = [collections.defaultdict(collections.Counter) for _ in range(2)]
    for side, texts in zip(counts, (one, other), strict=True):
        for text in texts:
            for place, token in enumerate(text):
                before = tuple(text[:place])
                if (before, token) in doubtful:
                    break
                side[before][token] += 1
    found = []
    for before in sorted(counts[0].keys() & counts[1].keys()):
        _, columns = contingency(counts[0][before], counts[1][before])
        if len(columns) > 1:
            found.append([list(row) for row in zip(*columns, strict=True)])
    return found
