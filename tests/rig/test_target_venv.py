"""The target venv copy is a venv with an SGLang of its own."""

import importlib.metadata
import subprocess

import pytest

from scripts.rig.target import site_packages


def test_wheel_tree_is_what_the_wheel_records(wheel_tree):
    (distribution,) = importlib.metadata.distributions(path=[str(wheel_tree)])
    assert distribution.version == "0.5.11"
    missing = [str(file) for file in distribution.files or () if not (wheel_tree / file).exists()]
    assert not missing


def test_copy_has_its_own_sglang_and_shares_the_rest(target_venv, target_copy):
    question = (
        "import sys, sglang, torch, importlib.metadata as m;"
        "print(sys.prefix, sglang.__file__, torch.__file__, m.version('sglang'), sep='\\n')"
    )
    done = subprocess.run(
        [target_copy / "bin/python", "-I", "-c", question], capture_output=True, text=True, check=True
    )
    own, shared = site_packages(target_copy), site_packages(target_venv)
    assert done.stdout.split("\n")[:4] == [
        str(target_copy),
        str(own / "sglang/__init__.py"),
        str(shared / "torch/__init__.py"),
        "0.5.11",
    ]
    server_args = "sglang/srt/server_args.py"
    assert not (own / server_args).samefile(shared / server_args)


@pytest.mark.server
def test_stock_dflash_serves_and_is_greedy_at_temperature_1(target_copy, cpu_server):
    """The failure that this project is for: 200, and the same text every time."""
    server = cpu_server(target_copy)
    prompt = b"def parse_args(self, args=None):"
    greedy = server.generate(prompt, temperature=0, max_new_tokens=48, ignore_eos=True)
    assert len(greedy["output_ids"]) == 48
    assert greedy["meta_info"]["spec_accept_length"] > 2
    outputs = [
        tuple(server.generate(prompt, temperature=1, max_new_tokens=48, ignore_eos=True)["output_ids"])
        for _ in range(4)
    ]
    # The prefill samples the first token; from there on nothing is random any more.
    assert len(set(outputs)) == len({output[0] for output in outputs})
