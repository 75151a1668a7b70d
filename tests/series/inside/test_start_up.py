"""--speculative-algorithm DDTREE at start-up: two numbers, refusals in one sentence, and the requests it refuses."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import FakeTreeSamplingOpByReferenceWalk
from sglang.srt.managers.scheduler import validate_dflash_request
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import ddtree_identity, ddtree_refusals
from sglang.srt.speculative.ddtree_args import reserved_tokens_per_step
from sglang.srt.speculative.ddtree_refusals import refuse_request, validate_request
from sglang.srt.speculative.dflash_sampling import start_sampling
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

MODELS = Path(__file__).parents[2] / "models/tiny-b8"
BLOCK = 8  # of the draft model


def make_args(**changes):
    arguments = {
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
    return ServerArgs(**arguments | changes)


def numbers(args):
    return args.speculative_num_draft_tokens, args.speculative_dflash_block_size, args.speculative_ddtree_topk


def test_verify_width_and_block_size_are_two_numbers():
    args = make_args()
    assert numbers(args) == (17, BLOCK, 4)
    assert args.speculative_num_steps == 1 and args.speculative_eagle_topk == 1
    assert args.disable_overlap_schedule
    assert reserved_tokens_per_step(args) == 17
    small = make_args(speculative_ddtree_budget=3)
    assert numbers(small) == (4, BLOCK, 4)
    assert reserved_tokens_per_step(small) == BLOCK  # drafting takes a block of slots


def test_defaults():
    assert numbers(make_args(speculative_ddtree_budget=None, speculative_ddtree_topk=None)) == (33, BLOCK, 8)


def test_a_smaller_block_may_be_asked_for():
    assert numbers(make_args(speculative_dflash_block_size=5)) == (17, 5, 4)


def test_command_line():
    import argparse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = (
        f"--model-path {MODELS}/target --speculative-draft-model-path {MODELS}/draft --device cpu "
        "--skip-tokenizer-init --attention-backend triton --sampling-backend pytorch --grammar-backend none "
        "--mem-fraction-static 0.1 "
        "--speculative-algorithm DDTREE --speculative-ddtree-budget 20 --speculative-ddtree-topk 3"
    )
    args = ServerArgs.from_cli_args(parser.parse_args(words.split()))
    assert numbers(args) == (21, BLOCK, 3)


@pytest.mark.parametrize(
    "changes", [{}, {"speculative_ddtree_budget": 3}, {"speculative_dflash_block_size": 5}], ids=str
)
def test_arguments_built_again_from_their_own_values_are_the_same(changes):
    """SGLang does this when it hands arguments to its processes."""
    once = make_args(**changes)
    values = {field.name: getattr(once, field.name) for field in dataclasses.fields(once) if field.init}
    twice = ServerArgs(**values)
    assert numbers(twice) == numbers(once)
    assert reserved_tokens_per_step(twice) == reserved_tokens_per_step(once)
    assert twice.max_running_requests == once.max_running_requests


REFUSED = {
    "budget": ({"speculative_ddtree_budget": 0}, "--speculative-ddtree-budget must be at least 1, got 0"),
    "negative budget": ({"speculative_ddtree_budget": -5}, "--speculative-ddtree-budget must be at least 1, got -5"),
    "topk": ({"speculative_ddtree_topk": 0}, "--speculative-ddtree-topk must be at least 1, got 0"),
    "draft tokens": ({"speculative_num_draft_tokens": 8}, "derives --speculative-num-draft-tokens"),
    "page size": ({"page_size": 16}, "--page-size 1"),
    "pipeline": ({"pp_size": 2}, "pipeline"),
    "prefill/decode": ({"disaggregation_mode": "decode"}, "disaggregation"),
    "prefill": ({"disaggregation_mode": "prefill"}, "disaggregation"),
    "deterministic": ({"enable_deterministic_inference": True}, "deterministic"),
    "two-batch overlap": ({"enable_two_batch_overlap": True}, "two-batch overlap"),
    "PD multiplexing": ({"enable_pdmux": True}, "PD multiplexing"),
    "DP attention": ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}, "DP attention"),
    "backend": ({"attention_backend": "torch_native"}, "--attention-backend triton"),
    "flashinfer": ({"attention_backend": "flashinfer"}, "--attention-backend triton"),
    "decode backend": ({"decode_attention_backend": "torch_native"}, "--attention-backend triton"),
    "prefill backend": ({"prefill_attention_backend": "torch_native"}, "--attention-backend triton"),
    "block": ({"speculative_dflash_block_size": 1}, "at least 2 tokens, got 1"),
    "no draft": ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_start_up_in_one_sentence(name):
    changes, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence) as refusal:
        make_args(**changes)
    text = str(refusal.value)
    assert "\n" not in text and text.endswith(".")
    if name not in ("no draft",):  # DFLASH's own check
        assert "DDTREE" in text or "--speculative-ddtree" in text


def test_other_algorithms_are_not_touched():
    plain = make_args(speculative_algorithm=None, speculative_draft_model_path=None)
    assert (plain.speculative_num_draft_tokens, plain.speculative_dflash_block_size) == (None, None)
    dflash = make_args(speculative_algorithm="DFLASH", speculative_ddtree_budget=None, speculative_ddtree_topk=None)
    assert dflash.speculative_num_draft_tokens == BLOCK and reserved_tokens_per_step(dflash) == BLOCK


def test_ddtree_is_a_dflash():
    ddtree, dflash = SpeculativeAlgorithm.from_string("DDTREE"), SpeculativeAlgorithm.from_string("DFLASH")
    assert ddtree.is_ddtree() and ddtree.is_dflash()
    assert dflash.is_dflash() and not dflash.is_ddtree()
    assert not SpeculativeAlgorithm.from_string(None).is_dflash()


# ---- requests ----------------------------------------------------------------------------------------------


def make_request(*, processor=None, hidden_states=False, logprob=False, **params):
    return SimpleNamespace(
        sampling_params=SamplingParams(**params),
        custom_logit_processor=processor,
        return_hidden_states=hidden_states,
        return_logprob=logprob,
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
        {"logit_bias": {"5": 1.0}},
        {"stop": ["x"], "stop_token_ids": [3], "ignore_eos": True, "max_new_tokens": 3},
        {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0},
    ],
    ids=str,
)
def test_requests_that_are_served(params):
    assert validate_request(make_request(**params)) is None
    assert validate_dflash_request(make_request(**params)) is None


@pytest.mark.parametrize(
    ("request_with", "named"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"repetition_penalty": 0.9}, "repetition_penalty"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"sampling_seed": 0}, "sampling_seed"),
        ({"sampling_seed": 5}, "sampling_seed"),
        ({"processor": "a processor"}, "custom logit processors"),
        ({"hidden_states": True}, "return_hidden_states"),
        ({"logprob": True}, "return_logprob"),
        ({"regex": "a+"}, "grammar"),
        ({"json_schema": "{}"}, "grammar"),
        ({"ebnf": "root ::= 'a'"}, "grammar"),
        ({"structural_tag": "{}"}, "grammar"),
    ],
    ids=str,
)
def test_requests_that_a_tree_cannot_serve_exactly_are_refused_by_name(request_with, named):
    reason = validate_request(make_request(**request_with))
    assert named in reason and reason.startswith("DDTREE") and reason.endswith(".")


def test_the_stage_before_sampling_serves_greedy_requests_only(monkeypatch):
    monkeypatch.setattr(ddtree_refusals, "PATCH_STAGE", "greedy")
    assert validate_request(make_request(temperature=0.0)) is None
    assert "greedy requests only" in validate_request(make_request(temperature=0.7))


@pytest.mark.parametrize("name", ["speculative_accept_threshold_single", "speculative_accept_threshold_acc"])
def test_accept_thresholds_are_refused_where_nothing_can_honour_them(no_op, settings, name):
    start_sampling(50, "cpu")
    setattr(settings, name, 0.5)
    with pytest.raises(ValueError, match="leave them out"):
        start_sampling(50, "cpu")


def test_the_op_runs_once_at_start_up(install_op):
    """What compiles it does so before a request waits for it."""
    op = install_op(FakeTreeSamplingOpByReferenceWalk())
    start_sampling(50, "cpu")
    assert len(op.coins) == 1


def test_what_was_refused_does_not_run_in_the_prefill_of_a_refused_request():
    request = make_request(processor="a processor", repetition_penalty=1.2, min_new_tokens=3, temperature=0.7)
    assert refuse_request(request) is not None
    params = request.sampling_params
    assert (params.repetition_penalty, params.min_new_tokens, params.top_k) == (1.0, 0, 1)
    assert params.stop_strs == [] and request.custom_logit_processor is None
    served = make_request(temperature=0.7, top_p=0.9)
    kept = served.sampling_params
    assert refuse_request(served) is None and served.sampling_params is kept


@pytest.mark.parametrize(
    "request_with", [{"logprob": True}, {"regex": "a+"}, {"json_schema": "{}"}, {"ebnf": "root ::= 'a'"}], ids=str
)
def test_requests_that_dflash_refuses(request_with):
    assert "does not support" in validate_dflash_request(make_request(**request_with))


# ---- identity ----------------------------------------------------------------------------------------------


def test_the_server_reports_the_identity_of_the_series_that_was_applied():
    report = ddtree_identity.patch_report()
    assert report == {"identity": os.environ["SERIES_IDENTITY"], "stage": "sampling", "decide": "sample-and-follow"}
