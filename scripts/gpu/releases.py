"""What a real server of each SGLang release needs on an offline host with CPython 3.12 and torch 2.11 for CUDA 13.

The host's own packages come last in the path; what is named here goes before them. Releases from 0.5.18 on pin a newer
torch, and their own sglang-kernel cannot be loaded beside 2.11: they run with the newest kernel that can, if at all.
"""

from dataclasses import dataclass

SKIP_KERNEL_CHECK = {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}


@dataclass(frozen=True)
class Release:
    """Pins of one release. `env`: of its servers, besides what every offline server needs (server.ENVIRONMENT)."""

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
            f"tokenizers=={self.tokenizers}",
        )


def _newer(flashinfer: str, transformers: str = "5.12.1", tokenizers: str = "0.22.2") -> Release:
    """A release whose own kernel needs a newer torch."""
    return Release("0.4.5", flashinfer, transformers, "0.1.11", tokenizers, tuple(SKIP_KERNEL_CHECK.items()))


RELEASES = {
    "0.5.11": Release("0.4.2", "0.6.8.post1", "5.6.0", "0.1.15.post2"),
    "0.5.12": Release("0.4.2.post2", "0.6.11.post1", "5.6.0", "0.1.9"),
    "0.5.13": Release("0.4.3", "0.6.12", "5.8.1", "0.1.9"),
    "0.5.16": Release("0.4.5", "0.6.14", "5.12.1", "0.1.11"),
    "0.5.17": Release("0.4.5", "0.6.15.post1", "5.12.1", "0.1.11"),
    "0.5.18": _newer("0.6.17"),
    "0.5.19": _newer("0.6.18"),
    "0.5.20": _newer("0.6.18"),
    "0.5.21": _newer("0.6.18"),
    # Their flashinfer 0.7 is 65 MB; the one before it is tried in its place.
    "0.5.22": _newer("0.6.18", "5.19.0", "0.23.2"),
    "0.5.23": _newer("0.6.18", "5.19.0", "0.23.2"),
}
