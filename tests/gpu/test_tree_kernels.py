"""The draft tree's kernels on a GPU against torch's operations on the CPU, bit for bit, and that nothing compiles late.

Of the installed SGLang, or of the directory $SPECULATIVE_DIR on a host that has torch and triton only.
"""

import pytest

from scripts.speculative import load, patched_directory

pytestmark = pytest.mark.gpu
BATCHES = (1, 2, 3, 4, 8, 16, 17, 32, 64)  # CUDA-graph buckets and what lies between them
CASES = 6  # of each batch size and each of
SIZES = (  # (D, K, budget): each is compiled
    (1, 1, 1),
    (15, 8, 64),
    (15, 8, 32),
    (15, 1, 16),
    (7, 4, 31),
    (2, 3, 40),
    (15, 2, 255),
    (31, 64, 255),
)
VOCABULARY = 151_936


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    torch.manual_seed(20261129)
    return torch


@pytest.fixture(scope="module")
def modules(torch):
    """ddtree_tree, ddtree_kernels, ddtree_top_kernels."""
    directory = patched_directory()
    if directory is None:
        pytest.skip("neither SPECULATIVE_DIR is set nor sglang installed")
    return [load(name, directory) for name in ("ddtree_tree", "ddtree_kernels", "ddtree_top_kernels")]


def any_of(torch, *choices):
    return choices[int(torch.randint(len(choices), ()))]


def candidates(torch, bs, depth, ranks):
    """float32 [bs, D, K], falling along K: a draft's, or made of ties, of what cannot be used, of sums that round."""
    shape = (bs, depth, ranks)
    kinds = (
        lambda: (torch.randn(*shape[:2], 200) * 2).log_softmax(-1)[..., :ranks],
        lambda: -0.5 * torch.randint(3, shape),
        lambda: torch.tensor([0.0, -1.0, -2.0, -torch.inf])[torch.randint(4, shape)],
        lambda: torch.tensor([-1e-9, -3e-8, -1.0, -1.0000001, -1e4])[torch.randint(5, shape)],
        lambda: torch.tensor([0.0, -0.0, -1e38, -3e38])[torch.randint(4, shape)],
        lambda: torch.full(shape, -torch.inf),
    )
    logps = any_of(torch, *kinds)().float().sort(dim=-1, descending=True).values
    if torch.rand(()) < 0.2:
        logps[logps == -torch.inf] = torch.nan
    return logps.contiguous()


def same(torch, one, other):
    one, other = one.cpu(), other.cpu()
    if one.dtype == torch.float32:
        one, other = one.view(torch.int32), other.view(torch.int32)
    return one.dtype == other.dtype and torch.equal(one, other)


def poison(torch):
    """What the kernels get as fresh memory was written before: with something that is no result."""
    sizes = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
    junk = [torch.full((size,), 0x5A, dtype=torch.uint8, device="cuda") for size in sizes]
    del junk


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_trees_links_and_masks(torch, modules, size):
    in_torch, kernels, _ = modules
    depth, ranks, budget = size
    for bs in BATCHES * CASES:
        logps = candidates(torch, bs, depth, ranks).cuda()
        ids = torch.rand(bs, depth, 1000, device="cuda").argsort(-1)[..., :ranks].contiguous()
        roots = torch.randint(1000, (bs, 4), device="cuda")[:, 0]  # strided, as the worker's are
        expected = in_torch.build_tree(roots, logps, ids, budget)
        poison(torch)
        tree = kernels.launch_tree(roots, logps, ids, budget)
        for name, one, other in zip(tree._fields, tree, expected, strict=True):
            assert same(torch, one, other), (name, bs)
        prefixes = torch.randint(200, (bs,))
        for dtype in (torch.int32, torch.int64):
            lengths = prefixes.to("cuda", dtype)
            mask = kernels.launch_mask(tree.ancestors, lengths, int(prefixes.sum()))
            assert same(torch, mask, in_torch.build_tree_mask(expected.ancestors, lengths, int(prefixes.sum()))), bs


def test_on_the_gpu_as_on_the_cpu(torch, modules):
    in_torch, kernels, _ = modules
    for _ in range(20):
        logps, ids = candidates(torch, 4, 15, 8), torch.rand(4, 15, 1000).argsort(-1)[..., :8]
        tree = kernels.launch_tree(torch.arange(4).cuda(), logps.cuda(), ids.cuda(), 64)
        expected = in_torch.build_tree(torch.arange(4), logps, ids, 64)
        assert all(same(torch, one, other) for one, other in zip(tree, expected, strict=True))


def test_sizes_that_no_kernel_has_room_for_go_to_torch(torch, modules):
    in_torch, kernels, top_kernels = modules
    logps, ids = candidates(torch, 2, 31, 100), torch.arange(100).expand(2, 31, 100)
    expected = in_torch.build_tree(torch.arange(2), logps, ids, 400)
    tree = kernels.build_tree(torch.arange(2).cuda(), logps.cuda(), ids.cuda(), 400)
    assert all(same(torch, one, other) for one, other in zip(tree, expected, strict=True))
    values, _, _ = top_kernels.top_candidates(torch.arange(300.0, device="cuda")[None], 200)
    assert values.tolist() == [[float(value) for value in range(299, 99, -1)]]


@pytest.mark.parametrize(
    ("dtype", "counts"), [("bfloat16", (2, 8, 64)), ("float16", (8,)), ("float32", (1, 8))], ids=str
)
@pytest.mark.parametrize("vocabulary", [320, 32_001, VOCABULARY])
def test_best_tokens_and_norm(torch, modules, dtype, counts, vocabulary):
    for count in counts:
        for rows in (1, 15, 60):
            scale = any_of(torch, 1e-3, 1.0, 4.0, 100.0)
            logits = torch.randn(rows, vocabulary, device="cuda") * scale
            if torch.rand(()) < 0.3:
                logits[torch.rand(rows, vocabulary, device="cuda") < 0.9] = -torch.inf
            logits = torch.where(logits.abs() < scale / 10, torch.sign(logits) * 0.0, logits)
            logits = logits.to(getattr(torch, dtype))
            poison(torch)
            values, ids, norm = modules[2].launch_top(logits, count)
            best, order = logits.float().sort(dim=-1, descending=True, stable=True)
            assert torch.equal(values, best[:, :count])
            assert torch.equal(ids, order[:, :count]), "among equal logits the smaller token id comes first"
            exact = logits.double().logsumexp(-1, keepdim=True)
            torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=1e-6)
            assert bool((values <= norm).all()), "no candidate is more than certain"


@pytest.mark.parametrize("poisoned", ["nan", "inf", "all -inf"])
def test_rows_that_are_no_distribution_give_nothing_to_use(torch, modules, poisoned):
    _, kernels, top_kernels = modules
    logits = torch.randn(3, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    if poisoned == "all -inf":
        logits[1] = -torch.inf
    else:
        logits[1, 140_000] = float(poisoned)
    values, ids, norm = top_kernels.launch_top(logits, 8)
    assert bool(((ids >= 0) & (ids < VOCABULARY)).all())
    tree = kernels.launch_tree(torch.arange(3).cuda(), (values - norm)[:, None], ids[:, None], 8)
    assert tree.parents[1].tolist() == [-1] * 9
    assert tree.parents[0].tolist() == tree.parents[2].tolist() == [-1] + [0] * 8


def test_after_one_call_no_batch_size_compiles_anything(torch, modules):
    """As the worker warms its kernels: once, for one request."""
    _, kernels, top_kernels = modules

    def step(bs):
        logits = torch.randn(bs * 7, 32_000, device="cuda", dtype=torch.bfloat16)
        values, ids, norm = top_kernels.top_candidates(logits, 5)
        logps, ids = (values - norm).view(bs, 7, 5), ids.view(bs, 7, 5)
        # Slices, so that addresses are not those of fresh memory.
        roots = torch.zeros(bs + 3, 8, dtype=torch.int64, device="cuda")[bs % 4 :, 0][:bs]
        tree = kernels.build_tree(roots, logps, ids, 33)
        prefixes = torch.arange(bs + 3, device="cuda")[bs % 4 :][:bs]
        kernels.build_tree_mask(tree.ancestors, prefixes, int(prefixes.sum()))

    def compiled():
        programs = [value for module in modules for value in vars(module).values() if hasattr(value, "device_caches")]
        return sum(len(cache[0]) for program in programs for cache in program.device_caches.values())

    step(1)
    before = compiled()
    assert before > 0
    for bs in range(1, 65):
        step(bs)
    assert compiled() == before


def test_in_a_cuda_graph(torch, modules):
    """Nothing waits for the host: a capture would refuse it."""
    in_torch, kernels, _ = modules
    logps, ids = candidates(torch, 8, 15, 8).cuda(), torch.arange(8, device="cuda").expand(8, 15, 8).contiguous()
    roots = torch.arange(8, device="cuda")
    kernels.launch_mask(kernels.launch_tree(roots, logps, ids, 64).ancestors, roots, 28)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree = kernels.launch_tree(roots, logps, ids, 64)
        mask = kernels.launch_mask(tree.ancestors, roots, 28)
    other = candidates(torch, 8, 15, 8)
    logps.copy_(other)
    graph.replay()
    expected = in_torch.build_tree(roots.cpu(), other, ids.cpu(), 64)
    assert all(same(torch, one, there) for one, there in zip(tree, expected, strict=True))
    assert same(torch, mask, in_torch.build_tree_mask(expected.ancestors, roots.cpu(), 28))
