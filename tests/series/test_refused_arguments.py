"""Arguments that DDTREE refuses, in every release: one sentence, a ValueError, before any process is started."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from setups import release_params, served

from scripts.rig.server import ENVIRONMENT, MODELS

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).parent / "inside/resolve_arguments.py"
ACCEPTED = {
    "model_path": str(MODELS / "target"),
    "speculative_draft_model_path": str(MODELS / "draft"),
    "speculative_algorithm": "DDTREE",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.1,
    "speculative_ddtree_budget": 16,
    "speculative_ddtree_topk": 4,
}
# {name: (what is changed, a word of the sentence)}
REFUSED = {
    "backend": ({"attention_backend": "torch_native"}, "triton"),
    "DP attention": ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}, "attention"),
    "pipeline": ({"pp_size": 2}, "pp"),
    "budget": ({"speculative_ddtree_budget": 0}, "--speculative-ddtree-budget"),
    "topk": ({"speculative_ddtree_topk": 0}, "--speculative-ddtree-topk"),
    "draft tokens": ({"speculative_num_draft_tokens": 8}, "--speculative-num-draft-tokens"),
}
OF_V1 = {
    "page size": ({"page_size": 16}, "--page-size 1"),
    "decode backend": ({"decode_attention_backend": "torch_native"}, "triton"),
}


@pytest.fixture(scope="module", params=release_params(served()))
def answers(request, patched_venvs):
    """{name: [error's type, text] or None} of one release."""
    cases = {"accepted": ({}, "")} | REFUSED | (OF_V1 if request.param.family == "v1" else {})
    done = subprocess.run(
        [patched_venvs(request.param) / "bin/python", SCRIPT],
        input=json.dumps([ACCEPTED | change for change, _ in cases.values()]),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_what_it_serves_is_accepted(answers):
    assert answers["accepted"] is None


def test_what_it_cannot_serve_is_refused(answers):
    for name, answer in answers.items():
        if name != "accepted":
            kind, text = answer or ("accepted", "")
            assert kind == "ValueError" and (REFUSED | OF_V1)[name][1] in text, (name, answer)
