"""The SGLang releases that have DFLASH, and what each needs to be served here."""

from dataclasses import dataclass
from typing import Literal

from scripts.rig.problem import RigProblem

Family = Literal["v1", "v2"]


@dataclass(frozen=True)
class Release:
    """One release of SGLang.

    Attributes:
        version: as on PyPI.
        family: v1 verifies on the host, one batch at a time; v2 has the worker for overlap scheduling.
        requirements: the file under requirements/ with the packages that this release wants in other versions than
            its neighbours; everything else is in base.txt.
        sha256: of the wheel for CPython 3.11 on x86-64.
    """

    version: str
    family: Family
    requirements: str
    sha256: str

    @property
    def wheel(self) -> str:
        return f"sglang-{self.version}-cp311-cp311-manylinux_2_34_x86_64.whl"


_TRANSFORMERS_5_6 = "from-0.5.11.txt"
_TRANSFORMERS_5_8 = "from-0.5.13.txt"
_TRANSFORMERS_5_12 = "from-0.5.15.txt"
_TRANSFORMERS_5_19 = "from-0.5.22.txt"

RELEASES = {
    release.version: release
    for release in (
        Release("0.5.11", "v1", _TRANSFORMERS_5_6, "fe0748beaff218d3e16c9018a5e19f018db06fc3c7ac4f90d2f93da1cf074b6f"),
        Release("0.5.12", "v1", _TRANSFORMERS_5_6, "4ed786a38655851fd055ef57380c34d29b87753b53f63457309f51e5bf48c2e6"),
        Release(
            "0.5.12.post1", "v1", _TRANSFORMERS_5_6, "94b3f3cc6b97f1364f247b8d9c1d106ec63cf22c55d6b65bc40ff29b0206ef5f"
        ),
        Release("0.5.13", "v1", _TRANSFORMERS_5_8, "9d26266ab7e99165098f9e173f4a5a0ef6a0b64a6f30ef0b5ee859eead37e75a"),
        Release(
            "0.5.13.post1", "v1", _TRANSFORMERS_5_8, "1c1653ecf2893c7d7b1cf0c3e1cc9b7550ebad95c809de2f44bcc91b7a1e1fe3"
        ),
        Release("0.5.14", "v2", _TRANSFORMERS_5_8, "4fe16056b45c8aca00f5f90ceb174dc3a62a3f5dccf159c791370795cd00fc99"),
        Release("0.5.15", "v2", _TRANSFORMERS_5_12, "21492759b4b99e117bd81610f633422f3fdae2896c2cde6931eab886deccc44f"),
        Release(
            "0.5.15.post1", "v2", _TRANSFORMERS_5_12, "8e182e1c449197cb6f98716a7cf432a3ea7af78c172f9b840ab28ad9e6cda9b4"
        ),
        Release("0.5.16", "v2", _TRANSFORMERS_5_12, "d5f345a18953dd35df568ac56bdcb7f5ee910ab39efea4469b714556d1070713"),
        Release("0.5.17", "v2", _TRANSFORMERS_5_12, "575e38f5683624ded3b4bb267f637a098e5ed37d13a1d1ff5ea09bd781a04d16"),
        Release("0.5.18", "v2", _TRANSFORMERS_5_12, "e97b585dd2d5db2802599feba47c84cce972f5e1231a6816fef996200207b5cf"),
        Release("0.5.19", "v2", _TRANSFORMERS_5_12, "425e87377e725d03db8262382008f3fd9561a6cf5d82f485f8b9929f02ffe12b"),
        Release("0.5.20", "v2", _TRANSFORMERS_5_12, "1573527042f4f6b4ead838302818595fc77fdc611dbcc2e40cd150fbc8f8513c"),
        Release("0.5.21", "v2", _TRANSFORMERS_5_12, "96c029f75dec99baa33a5db3d41b1bebefdd6bcfba3a2f7c807fe1cf49a87c20"),
        Release("0.5.22", "v2", _TRANSFORMERS_5_19, "cc9a0f15bd8f877a0584fdb7a1702240177a1f1cc8d17c978715161717b9037b"),
        Release("0.5.23", "v2", _TRANSFORMERS_5_19, "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"),
    )
}

DEFAULT = RELEASES["0.5.11"]
# What `make test` serves: the oldest, the one that the GPU machine runs, and the newest.
ALWAYS = (DEFAULT, RELEASES["0.5.17"], RELEASES["0.5.23"])


def named(version: str) -> Release:
    """Raises RigProblem when the rig does not know that version."""
    if version not in RELEASES:
        raise RigProblem(f"the rig has no SGLang {version!r}; it has {', '.join(RELEASES)}")
    return RELEASES[version]
