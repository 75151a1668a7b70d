"""What must be emitted: the sampler's rules and what follows from them, in float64 and nothing but Python."""

import math


def target_row(logits, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, sequential=False):
    """What a non-speculative sampler draws from: (probabilities, margin), from V logits.

    Jointly: a token stays when fewer than top_k tokens are better and these better ones hold no more than top_p of the
    full distribution. `sequential`: top-p looks at what top-k kept, renormalised. Then what has less than min_p times
    the best token's probability goes. Temperature 0 and top_k 1 are greedy.

    The margin says how far (in probability) the nearest decision about a token was from going the other way: rounding
    may decide those within it.
    """
    best = max(logits)
    if temperature == 0 or top_k == 1:
        first = list(logits).index(best)
        return [float(token == first) for token in range(len(logits))], 1.0
    full = [math.exp((logit - best) / temperature) for logit in logits]
    total = sum(full)
    full = [p / total for p in full]
    order = sorted(range(len(full)), key=lambda token: (-full[token], token))
    limit = len(order) if top_k == -1 else min(top_k, len(order))
    base = sum(full[token] for token in order[:limit]) if sequential else 1.0
    row, better, margin = [0.0] * len(full), 0.0, 1.0
    for token in order[:limit]:
        if top_p < 1:
            margin = min(margin, abs(better / base - top_p))
        if better / base <= top_p or top_p >= 1:
            row[token] = full[token]
        better += full[token]
    if min_p > 0:
        floor = max(row) * min_p
        margin = min([margin, *(abs(p - floor) for p in row if 0 < p < max(row))])
        row = [p if p >= floor else 0.0 for p in row]
    total = sum(row)
    return [p / total for p in row], margin


def children_of(parents):
    """[[children of node 0, in order], ..] from a list of parents."""
    return [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]


def emitted_sequences(tokens, parents, rows):
    """{sequence: probability} of one verify step: token by token from `rows` (by node) while the tree goes on."""
    children, found = children_of(parents), {}

    def visit(node, emitted, probability):
        inside = {tokens[child]: child for child in children[node]}
        for token, p in enumerate(rows[node]):
            if p == 0:
                continue
            sequence = (*emitted, token)
            if token in inside:
                visit(inside[token], sequence, probability * p)
            else:
                found[sequence] = found.get(sequence, 0.0) + probability * p

    visit(0, (), 1.0)
    return found
