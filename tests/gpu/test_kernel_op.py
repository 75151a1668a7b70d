"""The real op on a real GPU against the reference walk, bit for bit, and its traps as they are known."""

import random
import time

import pytest
import random_trees

from patcher.agent import kernel_probe
from patcher.server.kernel import ops_of

pytestmark = pytest.mark.gpu
PROBED = 1000  # by the comparison that `verify` makes
# (trees, vocabularies): few of the largest, whose rows take the walk longest.
BANDS = [(8700, (8, 9, 31, 64, 320, 1000)), (1000, (4096, 8192, 32_000)), (300, (128_256, 151_936, 163_840))]
WIDTHS = (2, 3, 5, 8, 9, 16, 17, 32, 33, 48, 64, 65)
BATCHES = (1, 2, 3, 4, 7, 8, 16, 31, 32)


@pytest.fixture(scope="module")
def ops():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    version = kernel_probe.versions().get("sglang")
    if version is None:
        pytest.skip("sglang is not installed, so where the op lives is not known")
    return {role: kernel_probe.load(*path) for role, path in ops_of(version).items()}


def compare(op, trees: int, vocabularies, seed: int, device: str = "cuda", **traps) -> None:
    """At least `trees` random trees by `op` and by the walk; prints what was covered, fails at the first difference."""
    rng, began, done, calls = random.Random(seed), time.monotonic(), 0, []
    while done < trees:
        batch = min(rng.choice(BATCHES), trees - done)
        call = random_trees.random_call(rng, batch, rng.choice(WIDTHS), rng.choice(vocabularies), **traps)
        done += batch
        calls.append((batch, call.nodes, call.vocabulary, call.limit, max(call.depths)))
        wanted, found = random_trees.expected(call), random_trees.found(op, call, device)
        for name, e, f in zip(("predicts", "accept_index", "accept_token_num"), wanted, found, strict=True):
            assert f == e, (name, "after", done, "trees", calls[-1], traps)
    batches, nodes, vocabulary, limits, depths = (sorted(set(column)) for column in zip(*calls, strict=True))
    short = sum(limit < depth for *_, limit, depth in calls)
    told = ", ".join(f"{name} {value:g}" for name, value in traps.items())
    print(
        f"covered: {done} trees in {len(calls)} calls, N {nodes[0]} to {nodes[-1]}, V {vocabulary[0]} to "
        f"{vocabulary[-1]}, batches {batches[0]} to {batches[-1]}, S {limits[0]} to {limits[-1]} "
        f"(depth to {depths[-1]}; S below it in {short} calls){told and '; ' + told}; {time.monotonic() - began:.0f} s"
    )


def test_the_comparison_that_verify_makes(ops):
    found = kernel_probe.compare_trees(ops["verify"], PROBED, seed=7, device="cuda")
    assert found["trees"] >= PROBED
    assert found["wrong"] == 0, found["first_wrong"]


@pytest.mark.parametrize(("trees", "vocabularies"), BANDS, ids=lambda value: str(value))
def test_random_trees(trees, vocabularies, ops):
    """Coins of 0 and 1 and children without mass are among them, and S below the depth."""
    compare(ops["verify"], trees, vocabularies, seed=trees)


def test_rows_that_are_not_numbers(ops):
    """Such a row accepts no child and gives the last id of the vocabulary; the other rows are not touched by it."""
    compare(ops["verify"], 1000, (8, 64, 320, 32_000), seed=1, nan=0.2)


@pytest.mark.parametrize("scratch", [1 / 4096, 1 / 8, 1.0])
def test_dirty_scratch(scratch, ops):
    """What the scratch holds is taken away from every token before the last is drawn, except at a depth of S."""
    compare(ops["verify"], 500, (8, 64, 320, 32_000), seed=2, scratch=scratch)


def test_traps_are_as_known(ops):
    traps = kernel_probe.probe_traps(ops["verify"], "cuda")
    assert {name: trap["as_known"] for name, trap in traps.items()} == dict.fromkeys(traps, True), traps


def test_renormalisation(ops):
    assert kernel_probe.check_renorm(ops["top_k"], ops["top_p"], "cuda") == {"top_k": True, "top_p": True}
