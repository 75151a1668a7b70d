"""Run by test_cpu_shims.py with the target venv's Python: random trees, each node against its own path."""

import random

import torch
from ddtree_cpu_shims.attention import verify_attention

HEADS, KV_HEADS, SIZE, SCALE = 4, 2, 16, 0.25


def along_path(query, keys, values, slots):
    """One token's attention over the tokens at `slots`. query [HEADS, SIZE] -> [HEADS, SIZE]."""
    k = keys[slots].repeat_interleave(HEADS // KV_HEADS, 1)
    v = values[slots].repeat_interleave(HEADS // KV_HEADS, 1)
    weights = (torch.einsum("hd,khd->hk", query, k) * SCALE).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v)


def check(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width = rng.randint(1, 9)
    prefixes = [rng.randint(0, 12) for _ in range(rng.randint(1, 3))]
    keys, values = torch.randn(80, KV_HEADS, SIZE), torch.randn(80, KV_HEADS, SIZE)
    slots = torch.randperm(80)[: 24 * len(prefixes)].view(len(prefixes), 24)
    query = torch.randn(width * len(prefixes), HEADS, SIZE)
    paths, chunks = [], []
    for prefix in prefixes:
        own = [[0]]
        for node in range(1, width):
            own.append([*own[rng.randrange(node)], node])
        paths.append(own)
        mask = torch.zeros(width, prefix + width, dtype=torch.bool)
        for node, path in enumerate(own):
            mask[node, :prefix] = True
            mask[node, [prefix + step for step in path]] = True
        chunks.append(mask.flatten())

    def run(**how):
        return verify_attention(
            query, keys, values, slots=slots, prefix_lens=prefixes, width=width, scale=SCALE, **how
        ).view(len(prefixes), width, HEADS, SIZE)

    tree = run(allow=torch.cat(chunks), causal=True)
    chain = run(allow=None, causal=True)
    block = run(allow=None, causal=False)
    for request, prefix in enumerate(prefixes):
        own = slots[request]
        for node in range(width):
            q = query[request * width + node]
            wanted = {
                "tree": (tree, [*range(prefix), *(prefix + step for step in paths[request][node])]),
                "chain": (chain, list(range(prefix + node + 1))),
                "block": (block, list(range(prefix + width))),
            }
            for name, (got, attended) in wanted.items():
                expected = along_path(q, keys, values, own[attended])
                assert torch.allclose(got[request, node], expected, atol=1e-5), (seed, name, request, node)


def check_refusals():
    tensors = (torch.randn(2, HEADS, SIZE), torch.randn(8, KV_HEADS, SIZE), torch.randn(8, KV_HEADS, SIZE))
    rest = {"slots": torch.arange(8)[None], "prefix_lens": [3], "width": 2, "causal": True, "scale": SCALE}
    for wrong in (torch.ones(9, dtype=torch.bool), torch.ones(10), torch.zeros(10, dtype=torch.bool)):
        try:
            verify_attention(*tensors, allow=wrong, **rest)
        except ValueError:
            continue
        raise AssertionError(f"accepted a wrong mask: {wrong}")


for number in range(100):
    check(number)
check_refusals()
print("checked")
