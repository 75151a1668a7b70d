"""What a real server of each SGLang release needs on an offline host with CPython 3.12 and torch 2.11 for CUDA 13.

The host's own packages come last in the path; what is named here goes before them. Releases from 0.5.18 on pin a newer
torch, and their own sglang-kernel cannot be loaded beside 2.11: they run with the newest kernel that can, if at all.
"""

from dataclasses import dataclass

SKIP_KERNEL_CHECK = {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
# The compiled radix tree takes the host torch's int64 tensors for int32 ones.
PYTHON_RADIX_TREE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}


@dataclass(frozen=True)
class Release:
    """Pins of one release. `tokenizers`: "" for the host's own. `env`: of its servers, besides what every offline
    server needs (server.ENVIRONMENT)."""

    kernel: str
    flashinfer: str
    transformers: str
    tvm_ffi: str
    tokenizers: str = "0.22.2"
    env: tuple[tuple[str, str], ...] = ()

    def layers(self, version: str) -> tuple[str, ...]:
        """Requirements that this release does not share with all others, SGLang itself first."""
        return (
            f"sglang=={version}",
            f"sglang-kernel=={self.kernel}",
            f"flashinfer-python=={self.flashinfer}",
            f"transformers=={self.transformers}",
            f"apache-tvm-ffi=={self.tvm_ffi}",
            *([f"tokenizers=={self.tokenizers}"] if self.tokenizers else []),
        )


def _newer(
    flashinfer: str, transformers: str = "5.12.1", tokenizers: str = "0.22.2", env: dict[str, str] = SKIP_KERNEL_CHECK
) -> Release:
    """A release whose own kernel needs a newer torch."""
    return Release("0.4.5", flashinfer, transformers, "0.1.11", tokenizers, tuple(env.items()))


RELEASES = {
    "0.5.11": Release("0.4.2", "0.6.8.post1", "5.6.0", "0.1.15.post2"),
    "0.5.12": Release("0.4.2.post2", "0.6.11.post1", "5.6.0", "0.1.9"),
    "0.5.13": Release("0.4.3", "0.6.12", "5.8.1", "0.1.9"),
    "0.5.16": Release("0.4.5", "0.6.14", "5.12.1", "0.1.11"),
    "0.5.17": Release("0.4.5", "0.6.15.post1", "5.12.1", "0.1.11"),
    "0.5.18": _newer("0.6.17"),
    "0.5.19": _newer("0.6.18"),
    "0.5.20": _newer("0.6.18"),
    "0.5.21": _newer("0.6.18", env=SKIP_KERNEL_CHECK | PYTHON_RADIX_TREE),
    # Their flashinfer 0.7 is 65 MB; the one before it is tried in its place.
    "0.5.22": _newer("0.6.18", "5.19.0", "", SKIP_KERNEL_CHECK | PYTHON_RADIX_TREE),
    "0.5.23": _newer("0.6.18", "5.19.0", "", SKIP_KERNEL_CHECK | PYTHON_RADIX_TREE),
}

# Arguments that releases from 0.5.20 on know by another name only.
RENAMED = {
    "--cuda-graph-max-bs": ["--cuda-graph-max-bs-decode"],
    "--cuda-graph-bs": ["--cuda-graph-bs-decode"],
    "--disable-piecewise-cuda-graph": ["--disable-prefill-cuda-graph"],
}
RENAMED_FROM = (0, 5, 20)


def numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 20) of "0.5.20" and of "0.5.20.post1"."""
    return tuple(int(part) for part in version.split(".")[:3])


def has_overlap(version: str) -> bool:
    """Whether DFLASH runs under the overlap scheduler: from 0.5.14 on."""
    return numbers(version) >= (0, 5, 14)


def spelled(version: str, args: list[str]) -> list[str]:
    """Server arguments, which are written here as 0.5.11 has them, in the words of a release."""
    if numbers(version) < RENAMED_FROM:
        return args
    return [word for arg in args for word in RENAMED.get(arg, [arg])]


def server_environment(version: str) -> dict[str, str]:
    """What servers of a release need in their environment on a host where it is not quite at home."""
    return dict(RELEASES[version].env) if version in RELEASES else {}


# ---- what releases call differently in an answer's meta_info -----------------------------------------------------


def verify_steps(info: dict) -> int:
    """Verify steps of one answer; 0 of plain decoding."""
    return info.get("spec_verify_ct") or 0


def retractions(info: dict) -> int:
    """How often the request was taken back: `total_retractions` in 0.5.11, `num_retractions` later."""
    return info.get("num_retractions") or info.get("total_retractions") or 0
