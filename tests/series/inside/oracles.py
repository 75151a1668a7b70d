"""Trees, written again in the plainest way: a heap, enumeration, recursion."""

import heapq
import itertools

import numpy as np
from exact import children_of


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
