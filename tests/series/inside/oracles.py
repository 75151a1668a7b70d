"""What the patched code must compute, written again in the plainest way: loops, recursion, float64."""

import heapq
import itertools

import numpy as np

# ---- the tree ----------------------------------------------------------------------------------------------


def best_paths(logps, budget):
    """The tree as the best-first search defines it: [(rank path, float32 log-weight)] in order, without the root.

    logps: float32 array [D, K], falling along K; what is not above -inf is not used. Equal weights are ordered by rank
    path. Sums are float32, in the order of the path.
    """
    num_depths, num_ranks = logps.shape
    heap, found = [], []

    def push(path, parent_logw):
        logw = np.float32(parent_logw + logps[len(path) - 1, path[-1]])
        if logw > -np.inf:  # False for NaN too
            heapq.heappush(heap, (-logw, path, parent_logw))

    push((0,), np.float32(0))
    while heap and len(found) < budget:
        negative, path, parent_logw = heapq.heappop(heap)
        found.append((path, -negative))
        if path[-1] + 1 < num_ranks:
            push((*path[:-1], path[-1] + 1), parent_logw)
        if len(path) < num_depths:
            push((*path, 0), -negative)
    return found


def best_paths_by_enumeration(logps, budget):
    """The same set and order with no search at all: every path there is, sorted. For small D and K."""
    num_depths, num_ranks = logps.shape
    paths = []
    for depth in range(1, num_depths + 1):
        for path in itertools.product(range(num_ranks), repeat=depth):
            logw = np.float32(0)
            for position, rank in enumerate(path):
                logw = np.float32(logw + logps[position, rank])
            if logw > -np.inf:
                paths.append((-logw, path))
    return [(path, -negative) for negative, path in sorted(paths)[:budget]]


def children_of(parents):
    """[[children of node 0, in order], ..] from a list of parents."""
    return [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]


def links_of(parents):
    """(next_token, next_sibling) lists, by walking the tree from the root."""
    children = children_of(parents)
    first, following = [-1] * len(parents), [-1] * len(parents)

    def visit(node):
        if children[node]:
            first[node] = children[node][0]
        for elder, younger in itertools.pairwise(children[node]):
            following[elder] = younger
        for child in children[node]:
            visit(child)

    visit(0)
    return first, following


def line_of(parents, node):
    """The node and its ancestors, as a set."""
    line = {node}
    while parents[node] >= 0:
        node = parents[node]
        line.add(node)
    return line


def simulate(tokens, parents, choice):
    """Follow one request's tree while the token chosen at a node is one of its children: (path, last choice)."""
    children, path = children_of(parents), [0]
    while True:
        chosen = choice[path[-1]]
        following = [child for child in children[path[-1]] if tokens[child] == chosen]
        if not following:
            return path, chosen
        path.append(following[0])


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


# ---- the target distribution -------------------------------------------------------------------------------


def target_row(logits, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, sequential=False):
    """What a non-speculative sampler draws from, float64 [V], from a list or array of V logits.

    Jointly: a token stays when fewer than top_k tokens are better and these better ones hold no more than top_p of the
    full distribution. `sequential`: top-p looks at what top-k kept, renormalised. Then what has less than min_p times
    the best token's probability goes. Temperature 0 and top_k 1 are greedy.

    Also returns how far (in probability) the nearest decision about a token was from going the other way: rounding
    may decide those within it.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if temperature == 0 or top_k == 1:
        row = np.zeros_like(logits)
        row[int(logits.argmax())] = 1.0
        return row, 1.0
    scaled = logits / temperature
    full = np.exp(scaled - scaled.max())
    full /= full.sum()
    order = sorted(range(len(full)), key=lambda token: (-full[token], token))
    limit = len(order) if top_k == -1 else min(top_k, len(order))
    base = sum(full[token] for token in order[:limit]) if sequential else 1.0
    row, better, margin = np.zeros_like(full), 0.0, 1.0
    for rank, token in enumerate(order):
        if rank < limit:
            if top_p < 1:
                margin = min(margin, abs(better / base - top_p))
            if better / base <= top_p or top_p >= 1:
                row[token] = full[token]
        better += full[token]
    if min_p > 0:
        floor = row.max() * min_p
        margin = min([margin, *(abs(p - floor) for p in row if p > 0 and p != row.max())])
        row[row < floor] = 0.0
    return row / row.sum(), margin
