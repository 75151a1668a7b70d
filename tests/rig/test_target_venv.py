"""The target venv copy is a venv with an SGLang of its own."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from scripts.rig.releases import ALWAYS, RELEASES
from scripts.rig.target import copy_target, site_packages, target_venv


def test_wheel_tree_is_what_the_wheel_records(wheel_tree):
    (distribution,) = importlib.metadata.distributions(path=[str(wheel_tree)])
    assert distribution.version == "0.5.11"
    missing = [str(file) for file in distribution.files or () if not (wheel_tree / file).exists()]
    assert not missing


def ask(venv):
    """[prefix, and where sglang, torch and transformers come from, and sglang's version] of a venv's Python."""
    question = (
        "import sys, sglang, torch, transformers, importlib.metadata as m;"
        "print(sys.prefix, sglang.__file__, torch.__file__, transformers.__file__, m.version('sglang'), sep='\\n')"
    )
    done = subprocess.run([venv / "bin/python", "-I", "-c", question], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:5]


@pytest.mark.parametrize("release", ALWAYS, ids=lambda release: release.version)
def test_copy_has_its_own_sglang_and_shares_the_rest(release, tmp_path):
    venv = target_venv(release)
    copy = copy_target(tmp_path / "copy", release)
    (_, cached, *shared), (prefix, own, *rest) = ask(venv), ask(copy)
    assert prefix == str(copy) and own == str(site_packages(copy) / "sglang/__init__.py")
    assert rest == shared and rest[-1] == release.version
    assert not any(path.startswith(str(venv)) for path in shared[:2])  # several targets import the same torch
    assert not Path(own).samefile(cached)


@pytest.mark.server
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("release", RELEASES.values(), ids=lambda release: release.version)
def test_stock_dflash_serves(release, cpu_server):
    """Released as they are, with overlap scheduling where they have it. `make test` shows the same of some releases."""
    server = cpu_server(target_venv(release), release=release)
    greedy = server.generate(b"def parse_args(self, args=None):", temperature=0, max_new_tokens=48, ignore_eos=True)
    assert len(greedy["output_ids"]) == 48
    assert greedy["meta_info"]["spec_accept_length"] > 2
