"""Random calls of the sampling op, as wide as it is ever called, and what the reference walk says to them.

The walk is the one that `verify` ships. As there, probabilities and coins are whole numbers over 2**12, so that sums
and products are exact in 32 bits. A row of 163,840 probabilities is kept by the few tokens that have mass.
"""

import itertools
import random
from dataclasses import dataclass

from patcher.agent.kernel_probe import DENOMINATOR, UNWRITTEN_INDEX, UNWRITTEN_TOKEN, reference_walk


class Row:
    """A sparse row of probabilities. `row[token]` is what is compared with a coin; going through it gives what the
    last token is drawn from: the probabilities less what the op's scratch holds (`scratch`, everywhere the same)."""

    def __init__(self, vocabulary: int, mass: dict[int, float], scratch: float = 0.0):
        self.vocabulary, self.mass, self.scratch = vocabulary, mass, scratch

    def clean(self) -> "Row":
        return Row(self.vocabulary, self.mass)

    def __getitem__(self, token):
        return self.mass.get(token, 0.0)

    def __iter__(self):
        row = [0.0] * self.vocabulary
        for token, probability in self.mass.items():
            row[token] = max(0.0, probability - self.scratch)
        return iter(row)


class NanRow(Row):
    """Nothing in it is a number."""

    def __init__(self, vocabulary: int):
        super().__init__(vocabulary, {})

    def clean(self) -> "NanRow":
        return self

    def __getitem__(self, token):
        return float("nan")

    def __iter__(self):
        return itertools.repeat(float("nan"), self.vocabulary)


@dataclass
class Call:
    """One call of the op. Lists over requests, then nodes; `limit` is S, `scratch` what draft_probs is filled with."""

    vocabulary: int
    limit: int
    scratch: float
    tokens: list[list[int]]
    next_token: list[list[int]]
    next_sibling: list[list[int]]
    rows: list[list[Row]]
    coins: list[list[float]]
    final_coins: list[float]
    depths: list[int]

    @property
    def nodes(self) -> int:
        return len(self.tokens[0])


def random_call(
    rng: random.Random, batch: int, nodes: int, vocabulary: int, *, scratch: float = 0.0, nan: float = 0.0
) -> Call:
    """nan: share of the rows that are NaN. Three calls in ten have a limit below the deepest tree's depth."""
    call = Call(vocabulary, 0, scratch, [], [], [], [], [], [], [])
    for _ in range(batch):
        tokens, next_token, next_sibling, depth = _tree(rng, nodes, vocabulary)
        call.tokens.append(tokens)
        call.next_token.append(next_token)
        call.next_sibling.append(next_sibling)
        call.depths.append(depth)
        call.rows.append(
            [
                NanRow(vocabulary)
                if rng.random() < nan
                else _row(rng, vocabulary, _children(tokens, next_token, next_sibling, node), scratch)
                for node in range(nodes)
            ]
        )
        # One coin in twenty is 0, which accepts also what has no mass, and one is 1.
        call.coins.append(
            [
                rng.choice([0, DENOMINATOR]) / DENOMINATOR
                if rng.random() < 0.1
                else rng.randint(1, DENOMINATOR) / DENOMINATOR
                for _ in range(nodes)
            ]
        )
        call.final_coins.append(rng.randrange(DENOMINATOR) / DENOMINATOR)
    deepest = max(call.depths)
    call.limit = rng.randint(1, deepest) if rng.random() < 0.3 else deepest
    return call


def _tree(rng, nodes, vocabulary):
    """(tokens, next_token, next_sibling, nodes on the longest path). Siblings have different tokens; one tree in four
    is full, the others end in pads, which no link leads to."""
    used = nodes if rng.random() < 0.25 else rng.randint(1, nodes)
    reach = rng.choice([1, 2, 4, 16, nodes])  # 1 makes a chain, `nodes` a bush
    tokens = [rng.randrange(vocabulary) for _ in range(nodes)]
    next_token, next_sibling = [-1] * nodes, [-1] * nodes
    depth, last_child, taken = [1] * nodes, {}, {}
    for node in range(1, used):
        parent = rng.randrange(max(0, node - reach), node)
        if len(taken.setdefault(parent, set())) == vocabulary:
            parent = node - 1  # has no child yet
        siblings = taken.setdefault(parent, set())
        while tokens[node] in siblings:
            tokens[node] = rng.randrange(vocabulary)
        siblings.add(tokens[node])
        if parent in last_child:
            next_sibling[last_child[parent]] = node
        else:
            next_token[parent] = node
        last_child[parent] = node
        depth[node] = depth[parent] + 1
    return tokens, next_token, next_sibling, max(depth[:used])


def _children(tokens, next_token, next_sibling, node):
    found, child = [], next_token[node]
    while child != -1:
        found.append(tokens[child])
        child = next_sibling[child]
    return found


def _row(rng, vocabulary, children, scratch):
    """Most of the mass on the children, some of which have none."""
    support = {rng.randrange(vocabulary) for _ in range(rng.randint(1, 6))}
    support |= {token for token in children if rng.random() < 0.8}
    cuts = sorted(rng.randint(0, DENOMINATOR) for _ in range(len(support) - 1))
    bounds = zip([0, *cuts], [*cuts, DENOMINATOR], strict=True)
    shares = [(high - low) / DENOMINATOR for low, high in bounds]
    return Row(vocabulary, dict(zip(sorted(support), shares, strict=True)), scratch)


def expected(call: Call) -> tuple[list[int], list[list[int]], list[int]]:
    """(predicts, accept_index, accept_token_num) as the op must leave them, by the reference walk."""
    predicts, index, counts = [UNWRITTEN_TOKEN] * (len(call.tokens) * call.nodes), [], []
    for b, rows in enumerate(call.rows):
        tree = {"tokens": call.tokens[b], "next_token": call.next_token[b], "next_sibling": call.next_sibling[b]}
        accepted, emitted = reference_walk(tree, rows, call.coins[b], call.final_coins[b], call.limit)
        if len(accepted) == call.limit:  # the op does not read its scratch there
            rows = [row.clean() for row in rows]
            accepted, emitted = reference_walk(tree, rows, call.coins[b], call.final_coins[b], call.limit)
        for node, token in zip(accepted, emitted, strict=True):
            predicts[b * call.nodes + node] = token
        written = [b * call.nodes + node for node in accepted]
        index.append(written + [UNWRITTEN_INDEX] * (call.limit - len(written)))
        counts.append(len(accepted) - 1)
    return predicts, index, counts


def found(op, call: Call, device: str) -> tuple[list[int], list[list[int]], list[int]]:
    """The same by the op."""
    import torch

    batch, nodes = len(call.tokens), call.nodes

    def tensor(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    where, what, missing = [], [], []
    for r, row in enumerate(itertools.chain.from_iterable(call.rows)):
        where += [r * call.vocabulary + token for token in row.mass]
        what += row.mass.values()
        if isinstance(row, NanRow):
            missing.append(r)
    target = torch.zeros(batch * nodes * call.vocabulary, dtype=torch.float32, device=device)
    target[tensor(where, torch.int64)] = tensor(what, torch.float32)
    target.view(-1, call.vocabulary)[tensor(missing, torch.int64)] = float("nan")
    target = target.view(batch, nodes, call.vocabulary)
    predicts = torch.full((batch * nodes,), UNWRITTEN_TOKEN, dtype=torch.int32, device=device)
    index = torch.full((batch, call.limit), UNWRITTEN_INDEX, dtype=torch.int32, device=device)
    counts = torch.zeros(batch, dtype=torch.int32, device=device)
    op(
        predicts=predicts,
        accept_index=index,
        accept_token_num=counts,
        candidates=tensor(call.tokens, torch.int64),
        retrive_index=torch.arange(batch * nodes, device=device).view(batch, nodes),
        retrive_next_token=tensor(call.next_token, torch.int64),
        retrive_next_sibling=tensor(call.next_sibling, torch.int64),
        uniform_samples=tensor(call.coins, torch.float32),
        uniform_samples_for_final_sampling=tensor(call.final_coins, torch.float32),
        target_probs=target,
        draft_probs=torch.full_like(target, call.scratch),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    return predicts.tolist(), index.tolist(), counts.tolist()
