"""The real op on a real GPU against the reference walk, bit for bit, and its traps as they are known."""

import pytest

from patcher import kernel_probe
from patcher.kernels import ops_of

pytestmark = pytest.mark.gpu
TREES = 10_000


@pytest.fixture(scope="module")
def ops():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    version = kernel_probe.versions().get("sglang")
    if version is None:
        pytest.skip("sglang is not installed, so where the op lives is not known")
    return {role: kernel_probe.load(*path) for role, path in ops_of(version).items()}


def test_random_trees(ops):
    found = kernel_probe.compare_trees(ops["verify"], TREES, seed=7, device="cuda")
    assert found["trees"] >= TREES
    assert found["wrong"] == 0, found["first_wrong"]


def test_traps_are_as_known(ops):
    traps = kernel_probe.probe_traps(ops["verify"], "cuda")
    assert {name: trap["as_known"] for name, trap in traps.items()} == dict.fromkeys(traps, True), traps


def test_renormalisation(ops):
    assert kernel_probe.check_renorm(ops["top_k"], ops["top_p"], "cuda") == {"top_k": True, "top_p": True}
