#!/usr/bin/env bash
# On an offline GPU host (CPython 3.12, torch 2.11 for CUDA 13): install a part that collect_wheels.sh made into a venv
# that also sees the packages of the host's own python3.
#   setup_host.sh VENV PART      call once a part, in any order
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: setup_host.sh VENV PART} part=${2:?usage: setup_host.sh VENV PART}
[ -e "$venv" ] || python3 -m venv --without-pip "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
python3 -m pip --python "$venv/bin/python" install --quiet --no-index --no-deps --no-compile --no-cache-dir "$part"/*.whl
if [ -e "$part/sgl_kernel-sm90.tar.xz" ]; then tar -xJf "$part/sgl_kernel-sm90.tar.xz" -C "$site"; fi
cp "$here/offline_stubs.py" "$site/ddtree_offline_stubs.py"
# Last in the path: the venv's own versions win.
{ echo "import ddtree_offline_stubs"; python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; } > "$site/zz_ddtree_offline.pth"
