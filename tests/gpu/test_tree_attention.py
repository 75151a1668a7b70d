"""The kernels of a tree's attention on a GPU against dense attention in float64, and in a CUDA graph.

Of the installed SGLang, or of the directory $SPECULATIVE_DIR on a host that has torch and triton only.
"""

import pytest

from scripts.speculative import load, patched_directory

pytestmark = pytest.mark.gpu
SHAPES = (  # query heads, key heads, channels
    (32, 8, 128),
    (64, 16, 64),
    (28, 4, 128),
    (16, 16, 80),
    (8, 1, 256),
    (16, 2, 192),
)
NODES = (1, 8, 16, 32, 33, 64)
LENGTHS = ((1,), (130,), (4096,), (3, 700, 64, 65), (1000,) * 20)


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    torch.manual_seed(20261201)
    return torch


@pytest.fixture(scope="module")
def kernels(torch):
    directory = patched_directory()
    if directory is None:
        pytest.skip("neither SPECULATIVE_DIR is set nor sglang installed")
    return load("ddtree_attention_kernels", directory)


def a_batch(torch, lens, n, heads, kv_heads, channels, dtype):
    """Arguments of `attend`; what no request may read is NaN."""
    bs, positions = len(lens), max(lens)
    slots = sum(lens) + 1
    ancestors = torch.eye(n, dtype=torch.uint8).repeat(bs + 1, 1, 1)
    for b in range(bs):
        for node in range(1, n):
            ancestors[b, node] |= ancestors[b, int(torch.randint(node, ()))]
    table = torch.zeros(bs + 2, positions, dtype=torch.int32)
    rows, free = torch.randperm(bs + 2)[:bs], torch.randperm(slots - 1) + 1
    for b, length in enumerate(lens):
        table[rows[b], :length], free = free[:length].int(), free[length:]

    def normal(*shape):
        return torch.randn(shape, device="cuda").to(dtype)

    keys, values = normal(slots, kv_heads, channels), normal(slots, kv_heads, channels)
    keys[0] = values[0] = torch.nan
    nodes = [normal(bs * n, count, channels) for count in (heads, kv_heads, kv_heads)]
    seen = {"table": table.cuda(), "rows": rows.cuda(), "lens": torch.tensor(lens).cuda()}
    return (*nodes, keys, values), seen | {"ancestors": ancestors.cuda(), "scale": channels**-0.5}


def dense(torch, q, k, v, keys, values, *, table, rows, lens, ancestors, scale):
    n, group, out = len(q) // len(lens), q.shape[1] // k.shape[1], []
    for b, length in enumerate(lens.tolist()):
        mine, slots = slice(b * n, (b + 1) * n), table[rows[b], :length].long()
        look = torch.cat((keys[slots], k[mine])).double().repeat_interleave(group, 1)
        take = torch.cat((values[slots], v[mine])).double().repeat_interleave(group, 1)
        scores = torch.einsum("nhc,mhc->hnm", q[mine].double(), look) * scale
        hidden = torch.cat((ancestors.new_ones(n, length), ancestors[b, :n, :n]), 1) == 0
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("hnm,mhc->nhc", weights, take))
    return torch.cat(out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_that_of_a_dense_mask(torch, kernels, shape):
    """Within what rounding to 8 (bfloat16) or 11 bits (float16) leaves: relative to the norm, 2**-7 and 2**-10."""
    for dtype, bound in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        for n in NODES:
            for lens in LENGTHS:
                tensors, seen = a_batch(torch, lens, n, *shape, dtype)
                expected = dense(torch, *tensors, **seen)
                found = kernels.attend(*tensors, **seen).double()
                error = float((found - expected).norm() / expected.norm())
                assert error < bound, (dtype, n, lens, error)


def test_a_graph_replays_other_lengths_and_trees(torch, kernels):
    tensors, seen = a_batch(torch, (900, 1700, 40), 32, 32, 8, 128, torch.bfloat16)
    kernels.attend(*tensors, **seen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attend(*tensors, **seen)
    for lens in ((900, 1700, 40), (1, 64, 3), (129, 1, 1500)):
        seen["lens"].copy_(torch.tensor([min(a, b) for a, b in zip(lens, (900, 1700, 40), strict=True)]))
        seen["ancestors"].copy_(seen["ancestors"].roll(1, 0))
        graph.replay()
        expected = dense(torch, *tensors, **seen)
        assert float((out.double() - expected).norm() / expected.norm()) < 2**-7
