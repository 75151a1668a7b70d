"""What the tool makes of a kernel probe's report, and the probe's own handling of kernels that are missing or wrong."""

import dataclasses
import json
import random
import subprocess
import sys

import pytest

from patcher.agent import kernel_probe
from patcher.errors import KernelProblem
from patcher.server.kernel import FOLLOW, GREEDY, REFUSED, VERIFY, KernelReport, kernel_report, ops_of

GOOD = KernelReport(
    versions={"python": "3.12.3", "sglang": "0.5.11", "sglang-kernel": "0.4.2", "torch": "2.11.0"},
    driver="580.1",
    cuda="13.0",
    gpus=("H200",),
    imports={role: {"path": f"sgl_kernel.{role}", "problem": None} for role in ("verify", "top_k", "top_p")},
    trees={"trees": 1000, "wrong": 0, "first_wrong": None},
    traps={"coin_0_accepts_impossible_child": {"as_known": True, "found": [1, 1]}},
    renorm={"top_k": True, "top_p": True},
    sglang_available=True,
    sglang_problem=None,
    torch_problem=None,
    problem=None,
    where="host",
)
BROKEN_IMPORT = {"path": "sgl_kernel.x", "problem": "ImportError: undefined symbol: _ZN3c10"}
NO_OP = dataclasses.replace(
    GOOD, imports={**GOOD.imports, "verify": BROKEN_IMPORT}, trees=None, traps=None, sglang_available=False
)
NO_GPU = dataclasses.replace(GOOD, gpus=(), trees=None, traps=None, renorm=None)
RAISES = dataclasses.replace(GOOD, trees=None, traps=None, problem="AttributeError: '_OpNamespace' has no attribute")
WRONG = dataclasses.replace(
    GOOD, trees={"trees": 1000, "wrong": 2, "first_wrong": {"after": 8, "predicts": {"expected": [1], "found": [2]}}}
)


@pytest.mark.parametrize(
    ("version", "module"),
    [
        ("0.5.11", "sgl_kernel"),
        ("0.5.20", "sgl_kernel"),
        ("0.5.21", "sglang.kernels.ops.speculative.sampling"),
        ("0.5.22", "sglang.kernels.ops.speculative.sampling"),
        ("0.5.23", "sglang.kernels.ops.speculative.verify_sampling"),
        ("0.5.17.post1", "sgl_kernel"),
        ("0.6.0", "sglang.kernels.ops.speculative.verify_sampling"),
        ("0.5.23+cu129", "sglang.kernels.ops.speculative.verify_sampling"),
    ],
)
def test_where_each_release_has_the_op(version, module):
    assert ops_of(version)["verify"] == (module, VERIFY)


def test_a_good_kernel():
    assert GOOD.usable and GOOD.check(require=True, stage="temperature") == []
    assert GOOD.sampling_path("temperature") == VERIFY and GOOD.sampling_path(None) == VERIFY
    assert GOOD.facts()["sampling kernel"] == "right on 1000 random trees"


@pytest.mark.parametrize("report", [NO_OP, NO_GPU])
def test_a_missing_kernel_fails_and_says_what_is_used_instead(report):
    with pytest.raises(KernelProblem) as caught:
        report.check(require=True, stage="temperature")
    assert caught.value.exit_code == 5 and FOLLOW in caught.value.what
    assert "kernels.require" in caught.value.next_step
    for line in ("torch 2.11.0", "sglang-kernel 0.4.2", "CUDA 13.0", "driver 580.1"):
        assert line in caught.value.detail
    (warning,) = report.check(require=False, stage="temperature")
    assert FOLLOW in warning
    assert GREEDY in report.check(require=False, stage=None)[0]
    assert REFUSED in report.check(require=False, stage="ddtree")[0]


def test_an_undefined_symbol_is_named():
    with pytest.raises(KernelProblem, match="undefined symbol: _ZN3c10"):
        NO_OP.check(require=True, stage=None)


@pytest.mark.parametrize(
    ("report", "what"),
    [(RAISES, "the call raises: AttributeError"), (WRONG, "differs from the reference walk in predicts")],
)
def test_a_wrong_kernel_fails_even_where_none_is_required(report, what):
    with pytest.raises(KernelProblem, match=what):
        report.check(require=False, stage="temperature")
    assert not report.usable


def test_wrong_renormalisation_fails():
    report = dataclasses.replace(GOOD, renorm={"top_k": True, "top_p": False})
    with pytest.raises(KernelProblem, match="top_p"):
        report.check(require=False, stage=None)


def test_a_trap_that_changed_is_a_warning():
    report = dataclasses.replace(GOOD, traps={"nan_gives_last_token": {"as_known": False, "found": [0, 0]}})
    (warning,) = report.check(require=True, stage="temperature")
    assert "nan_gives_last_token" in warning


def test_sglang_that_does_not_use_a_working_kernel_is_a_warning():
    report = dataclasses.replace(GOOD, sglang_available=False)
    (warning,) = report.check(require=True, stage="temperature")
    assert FOLLOW in warning


def ask_here(before="pass"):
    """A stand-in for the agent's run_python: the probe, by an interpreter of its own, after the statement `before`."""

    def ask(op, *, source, argv, env, timeout):
        code = f"import sys;{before};exec(compile(sys.stdin.read(),'probe','exec'))"
        done = subprocess.run(
            [sys.executable, "-I", "-c", code, *argv],
            input=source.encode(),
            capture_output=True,
            timeout=120,
            check=False,
        )
        return {"rc": done.returncode, "stdout": done.stdout.decode(), "stderr": done.stderr.decode()}

    return ask


def test_the_probe_on_a_machine_without_anything():
    report = kernel_report(ask_here(), version="0.5.11", trees=8, where="host")
    assert report.trees is None and not report.usable
    assert report.versions["python"]
    assert "cannot be imported" in report.missing
    json.dumps(report.as_dict())


def test_the_probe_names_an_import_that_breaks(tmp_path):
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text(
        "print('noise')\nraise ImportError('x.so: undefined symbol: _ZN3c1013Message')\n"
    )
    report = kernel_report(ask_here(f"sys.path.insert(0, {str(tmp_path)!r})"), version="0.5.11", where="host")
    with pytest.raises(KernelProblem, match="undefined symbol: _ZN3c1013Message"):
        report.check(require=True, stage=None)


def test_a_probe_that_crashes_is_a_kernel_problem():
    def ask(op, **request):
        return {"rc": -11, "stdout": "", "stderr": "Segmentation fault"}

    with pytest.raises(KernelProblem) as caught:
        kernel_report(ask, version="0.5.11")
    assert "-11" in caught.value.what and "Segmentation fault" in caught.value.detail


def test_a_wrapper_whose_call_raises_is_found(monkeypatch):
    def wrapper(**arguments):
        raise AttributeError("'_OpNamespace' 'sgl_kernel' object has no attribute 'tree_speculative_sampling'")

    monkeypatch.setattr(kernel_probe, "call_op", lambda op, *rest: op())
    monkeypatch.setattr(kernel_probe, "look_at_gpu", lambda: {"cuda": "13.0", "gpus": ["FakeGPU"]})
    monkeypatch.setattr(kernel_probe, "load", lambda module, name: wrapper)
    report = kernel_probe.probe({"ops": [["verify", "sgl_kernel", "x"]], "trees": 8, "seed": 1})
    assert report["problem"].startswith("AttributeError: '_OpNamespace'")
    assert report["imports"]["verify"]["problem"] is None


def test_the_comparison_finds_one_wrong_token(monkeypatch):
    def call_right(op, requests, depth_limit, device, scratch=0.0):
        return kernel_probe.expected_arrays(requests, depth_limit)

    monkeypatch.setattr(kernel_probe, "call_op", call_right)
    assert kernel_probe.compare_trees(None, 200, 1, "cpu") == {"trees": 200, "wrong": 0, "first_wrong": None}
    rng = random.Random(1)

    def call_wrong(op, requests, depth_limit, device, scratch=0.0):
        predicts, index, counts = kernel_probe.expected_arrays(requests, depth_limit)
        if rng.random() < 0.2:
            predicts = [predicts[0] + 1, *predicts[1:]]
        return predicts, index, counts

    monkeypatch.setattr(kernel_probe, "call_op", call_wrong)
    found = kernel_probe.compare_trees(None, 200, 1, "cpu")
    assert found["wrong"] > 0 and "predicts" in found["first_wrong"] and "accept_index" not in found["first_wrong"]
