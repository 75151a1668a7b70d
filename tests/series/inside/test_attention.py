"""Attention of the nodes of a tree, by kernels and by torch, against the softmax written out."""

import pytest
import torch
from sglang.srt.speculative import ddtree_attention_kernels as kernels


class FewMultiprocessors:
    """What a launch asks of a GPU; `many` decides into how many parts a prefix is split."""

    shared_memory_per_block_optin = 232448

    def __init__(self, many):
        self.multi_processor_count = many


def a_tree(n, generator):
    """uint8 [n, n]: ancestors of random parents."""
    ancestors = torch.eye(n, dtype=torch.uint8)
    for node in range(1, n):
        ancestors[node] |= ancestors[int(torch.randint(node, (), generator=generator))]
    return ancestors


def a_batch(lens, n, heads, kv_heads, channels, seed):
    """Arguments of `attend` by name: more requests, positions and slots than are used, of which none is 0."""
    generator = torch.Generator().manual_seed(seed)
    bs, slots, positions = len(lens), 900, 400

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    rows = torch.randperm(bs + 2, generator=generator)[:bs]
    table = torch.stack([torch.randperm(slots, generator=generator)[:positions] for _ in range(bs + 2)])
    return {
        "q": normal(bs * n, heads, channels),
        "k": normal(bs * n, kv_heads, channels),
        "v": normal(bs * n, kv_heads, channels),
        "keys": normal(slots, kv_heads, channels),
        "values": normal(slots, kv_heads, channels),
        "table": table.int(),
        "rows": rows,
        "lens": torch.tensor(lens),
        "ancestors": torch.stack([a_tree(n, generator) for _ in range(bs + 1)]),
        "scale": channels**-0.5,
    }


def written_out(q, k, v, keys, values, *, table, rows, lens, ancestors, scale):
    """Node by node and head by head."""
    n, group = len(q) // len(lens), q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for b, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        for node in range(n):
            seen = [b * n + other for other in range(n) if ancestors[b, node, other]]
            for head in range(q.shape[1]):
                of_key = head // group
                prefix = table[row, :length].long()
                look = torch.cat((keys[prefix, of_key], k[seen, of_key]))
                take = torch.cat((values[prefix, of_key], v[seen, of_key]))
                out[b * n + node, head] = torch.softmax(look @ q[b * n + node, head] * scale, 0) @ take
    return out


SHAPES = [  # lengths, nodes, query heads, key heads, channels
    ([130], 8, 4, 2, 64),
    ([1, 77], 9, 4, 4, 16),
    ([5, 300, 64], 33, 8, 2, 32),
    ([129], 70, 2, 1, 24),
    ([200, 64], 1, 4, 1, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("multiprocessors", [1, 12, 132])
def test_kernels_attend_to_prefix_and_ancestors(shape, multiprocessors, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: FewMultiprocessors(multiprocessors))
    batch = a_batch(*shape, seed=3)
    expected = written_out(**batch)
    arguments = list(batch.values())
    torch.testing.assert_close(kernels.launch(*arguments), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_attends_to_prefix_and_ancestors(shape):
    batch = a_batch(*shape, seed=4)
    torch.testing.assert_close(kernels.attend(**batch), written_out(**batch), atol=1e-5, rtol=1e-4)


def test_a_wrong_ancestor_is_seen():
    batch = a_batch([130], 8, 4, 2, 64, seed=5)
    expected = written_out(**batch)
    batch["ancestors"][0, 3, 5] ^= 1
    assert not torch.allclose(kernels.attend(**batch), expected, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 4, 16, 33, 64, 132, 1024])
@pytest.mark.parametrize("channels", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("shared_memory", [101376, 166912, 232448])
def test_a_tile_fits_into_shared_memory(rows, channels, shared_memory):
    """sm_86, sm_89 and sm_120 have 99 KiB, sm_80 has 163, sm_90 has 227. What Triton takes is less: see `tile_of`."""
    tile = kernels.tile_of(rows, channels, 2, shared_memory)
    width = 1 << (channels - 1).bit_length()
    assert 2 * width * (tile.rows + 2 * tile.keys * tile.stages) <= shared_memory
    assert tile.rows >= 16 and tile.keys >= 16 and tile.stages >= 1
