"""Collect, where packages can be had, what an offline GPU host needs to serve some releases of SGLang.

    python3 -m scripts.gpu.collect DEST 0.5.17 0.5.11 --wheels CACHE [--common] [--without 0.5.12 ...]

Writes DEST/packages.tar.xz, a folder a package and version; install.py puts environments together from them. Files of
one name in several versions of a package lie beside each other in the archive, so that a second release costs little.
`--common` adds what all releases share; `--without` leaves out what a part with those releases has brought already.

Of sglang-kernel's wheel (1.1 GB, nearly all of it FlashAttention-3) only the Python files and the sm90 `common_ops` are
taken, which hold every speculative op: the servers run with the triton backend.
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from scripts.gpu.releases import RELEASES

HERE = Path(__file__).resolve().parent
COMMON = "common"  # the folder of what all releases share
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (5, 17, 24, 26, 27, 28, 31, 34, 39)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "any"]
# Neighbours in the archive are files of one name, so a window of this size sees the last version of each.
COMPRESS = ["xz", "--format=xz", "--lzma2=preset=8,dict=128MiB", "--stdout"]
# Large, and never imported by a server of a text model that speaks HTTP.
LEFT_OUT = ("sglang/multimodal_gen/", "sglang/test/", "flashinfer/data/cutlass/test/", "flashinfer/data/cutlass/tools/")
KEPT = "flashinfer/data/cutlass/tools/util/include/"  # what compiles kernels at run time looks for it
LEFT_OUT_LIBRARIES = re.compile(r"torchao/.*\.so$|sglang/srt/.*/_(core|grpc|server|bench|multimodal)\.cpython.*\.so$")


def download(requirement: str, wheels: Path) -> Path:
    """The wheel of `name==version` for the host's Python, from `wheels` or an index."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not (found := _suitable(wheels.glob(pattern))):
        tags = [word for platform in PLATFORMS for word in ("--platform", platform)]
        choice = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *tags]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *choice, "--dest", str(wheels), requirement]
        subprocess.run(command, check=True)
        found = _suitable(wheels.glob(pattern))
    return found[0]


def _suitable(wheels: Iterable[Path]) -> list[Path]:
    return [
        wheel
        for wheel in wheels
        if any(tag in wheel.name for tag in ("-cp312-", "-abi3-", "-py3-", "-py37-")) or "-py2.py3-" in wheel.name
    ]


def wanted(member: str) -> bool:
    """Whether a member of a wheel travels."""
    if member.endswith("/") or ".data/" in member or (member.startswith(LEFT_OUT) and not member.startswith(KEPT)):
        return False
    if LEFT_OUT_LIBRARIES.match(member):
        return False
    if member.startswith(("sgl_kernel/", "lib/", "deep_gemm", "triton_kernels", "_mscclpp", "mscclpp")):
        return member.startswith("sgl_kernel/sm90/") or (member.startswith("sgl_kernel/") and member.endswith(".py"))
    return True


def archive(folders: dict[Path, str], target: Path) -> None:
    """Write the wanted members of wheels, {wheel: folder}, compressed, in an order that brings versions together."""
    sources = {wheel: zipfile.ZipFile(wheel) for wheel in folders}
    members = [
        (PurePosixPath(name).suffix, name, wheel)
        for wheel, source in sources.items()
        for name in source.namelist()
        if wanted(name)
    ]
    with target.open("wb") as out:
        xz = subprocess.Popen(COMPRESS, stdin=subprocess.PIPE, stdout=out)
        with tarfile.open(fileobj=xz.stdin, mode="w|") as tar:
            for _suffix, name, wheel in sorted(members, key=lambda m: (m[0], m[1], m[2].name)):
                data = sources[wheel].read(name)
                entry = tarfile.TarInfo(f"{folders[wheel]}/{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        xz.stdin.close()
        if xz.wait():
            raise RuntimeError(f"xz ended with {xz.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument("releases", nargs="+", choices=RELEASES)
    parser.add_argument("--wheels", type=Path, required=True, help="where downloaded wheels are kept")
    parser.add_argument("--common", action="store_true", help="with what all releases share")
    parser.add_argument("--without", nargs="*", default=[], choices=RELEASES, help="releases whose packages are there")
    args = parser.parse_args()
    args.dest.mkdir(parents=True, exist_ok=True)
    args.wheels.mkdir(parents=True, exist_ok=True)
    there = {layer for version in args.without for layer in RELEASES[version].layers(version)}
    layers = [layer for version in args.releases for layer in RELEASES[version].layers(version) if layer not in there]
    folders = {download(layer, args.wheels): layer.replace("==", "-") for layer in dict.fromkeys(layers)}
    if args.common:
        for requirement in (HERE / "requirements.txt").read_text().split():
            folders[download(requirement, args.wheels)] = COMMON
    archive(folders, args.dest / "packages.tar.xz")
    print(f"{args.dest / 'packages.tar.xz'}: {(args.dest / 'packages.tar.xz').stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
