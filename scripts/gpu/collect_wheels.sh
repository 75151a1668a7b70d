#!/usr/bin/env bash
# Collect, for an offline x86-64 GPU host with CPython 3.12 and torch 2.11 (cu130), everything that a real
# SGLang 0.5.11 server needs beyond that host's own packages. Measured: about 63 MiB in all.
#   collect_wheels.sh DEST        -> DEST/a (the four large parts, 40 MiB) and DEST/b (all the rest, 24 MiB): two transfers
# sglang-kernel's wheel unpacks to 1.1 GB, nearly all of it FlashAttention-3; only its Python files and the
# sm90 `common_ops` (20 MB, which holds every speculative op) are kept. The server then runs with the triton backend.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dest=${1:?usage: collect_wheels.sh DEST [sglang-kernel version]}
kernel=${2:-0.4.2}
mkdir -p "$dest/a" "$dest/b"
tags=(); for n in 5 17 24 26 27 28 31 34; do tags+=(--platform "manylinux_2_${n}_x86_64"); done
tags+=(--platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64 --platform any)
pipget() { python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${tags[@]}" -d "$1" "${@:2}"; }
while read -r requirement; do
  case $requirement in
    ''|\#*) ;;
    sglang==*|flashinfer_python==*|transformers==*) pipget "$dest/a" "$requirement" ;;
    *) pipget "$dest/b" "$requirement" ;;
  esac
done < "$here/requirements-sglang-0.5.11.txt"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
pipget "$work" "sglang-kernel==$kernel"
python3 - "$work" "$dest/a/sgl_kernel-sm90.tar.xz" <<'P'
import glob, io, sys, tarfile, zipfile
source = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0])
with tarfile.open(sys.argv[2], "w:xz", preset=9) as out:
    for name in source.namelist():
        keep = name.startswith("sgl_kernel/") and (name.endswith(".py") or name.startswith("sgl_kernel/sm90/"))
        if (keep or ".dist-info/" in name) and not name.endswith("/"):
            data = source.read(name)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            out.addfile(entry, io.BytesIO(data))
P
du -sh "$dest/a" "$dest/b"
