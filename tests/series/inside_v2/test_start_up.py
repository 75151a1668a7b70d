"""--speculative-algorithm DDTREE at start-up: two numbers, what a step reserves, refusals in one sentence."""

import dataclasses
import os
from pathlib import Path

import pytest
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, get_req_to_token_extra_context_len
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import ddtree_args, ddtree_identity
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
    assert not args.disable_overlap_schedule
    assert numbers(make_args(speculative_ddtree_budget=None, speculative_ddtree_topk=None)) == (32, BLOCK, 8)
    assert numbers(make_args(speculative_dflash_block_size=5)) == (17, 5, 4)
    assert numbers(make_args(speculative_ddtree_budget="1:20,9:0")) == (21, BLOCK, 4)


@pytest.mark.parametrize(("budget", "widest"), [(3, BLOCK), (16, 17), (32, 33)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_step_reserves_the_wider_of_block_and_tree_and_a_row_holds_it(budget, widest, page_size):
    """Two steps are reserved: under overlap the scheduler is one behind."""
    args = make_args(speculative_ddtree_budget=budget, page_size=page_size)
    assert get_alloc_reserve_per_decode(args) == 2 * widest
    assert get_req_to_token_extra_context_len(args) >= 2 * widest + page_size - 1


def test_other_algorithms_are_not_touched():
    plain = make_args(speculative_algorithm=None, speculative_draft_model_path=None)
    assert (plain.speculative_num_draft_tokens, plain.speculative_dflash_block_size) == (None, None)
    dflash = make_args(speculative_algorithm="DFLASH", speculative_ddtree_budget=None, speculative_ddtree_topk=None)
    assert dflash.speculative_num_draft_tokens == BLOCK
    assert get_alloc_reserve_per_decode(dflash) == 2 * BLOCK
    assert get_req_to_token_extra_context_len(dflash) == 4 + BLOCK


@pytest.mark.parametrize(
    "changes", [{}, {"speculative_ddtree_budget": 3}, {"speculative_dflash_block_size": 5}], ids=str
)
def test_arguments_built_again_from_their_own_values_are_the_same(changes):
    """SGLang does this when it hands arguments to its processes."""
    once = make_args(**changes)
    values = {field.name: getattr(once, field.name) for field in dataclasses.fields(once) if field.init}
    assert numbers(ServerArgs(**values)) == numbers(once)


REFUSED = {
    "budget": ({"speculative_ddtree_budget": 0}, "--speculative-ddtree-budget must be at least 1, got 0"),
    "budget no number": ({"speculative_ddtree_budget": "wide"}, "must be a number, auto, or a table"),
    "budgets rise": ({"speculative_ddtree_budget": "1:8,4:16"}, "rising numbers of requests and falling budgets"),
    "no budget for one": ({"speculative_ddtree_budget": "2:8"}, "a table from 1 request on"),
    "topk": ({"speculative_ddtree_topk": 0}, "--speculative-ddtree-topk must be at least 1, got 0"),
    "draft tokens": ({"speculative_num_draft_tokens": 8}, "derives --speculative-num-draft-tokens"),
    "pipeline": ({"pp_size": 2}, "pipeline"),
    "prefill/decode": ({"disaggregation_mode": "decode"}, "disaggregation"),
    "prefill": ({"disaggregation_mode": "prefill"}, "disaggregation"),
    "deterministic": ({"enable_deterministic_inference": True}, "deterministic"),
    "two-batch overlap": ({"enable_two_batch_overlap": True}, "two-batch overlap"),
    "PD multiplexing": ({"enable_pdmux": True}, "PD multiplexing"),
    "DP attention": ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}, "DP attention"),
    "backend": ({"attention_backend": "torch_native"}, "--attention-backend triton"),
    "verify runs on the prefill backend": ({"prefill_attention_backend": "torch_native"}, "--attention-backend triton"),
    "verify runs on the decode backend": (
        {"decode_attention_backend": "torch_native", "speculative_attention_mode": "decode"},
        "--attention-backend triton",
    ),
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
    if name != "no draft":  # DFLASH's own check
        assert "DDTREE" in text or "--speculative-ddtree" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_attention_backend": "torch_native"},
        {"prefill_attention_backend": "torch_native", "speculative_attention_mode": "decode"},
        {"page_size": 16},
    ],
    ids=str,
)
def test_only_the_backend_that_verifies_is_looked_at(changes):
    assert numbers(make_args(**changes)) == (17, BLOCK, 4)


def test_split_kv_verify_is_refused_where_it_would_run(monkeypatch):
    """It does not read the mask: a tree would be verified as a chain."""
    monkeypatch.setattr(ddtree_args, "is_gfx95_supported", lambda: True)
    with pytest.raises(ValueError, match="SGLANG_ENABLE_SPLITKV_VERIFY=0"):
        make_args()
    with ddtree_args.envs.SGLANG_ENABLE_SPLITKV_VERIFY.override(False):
        assert numbers(make_args()) == (17, BLOCK, 4)


def test_ddtree_is_a_dflash():
    ddtree, dflash = SpeculativeAlgorithm.from_string("DDTREE"), SpeculativeAlgorithm.from_string("DFLASH")
    assert ddtree.is_ddtree() and ddtree.is_dflash() and ddtree.is_dflash_family()
    assert dflash.is_dflash() and not dflash.is_ddtree()
    assert not SpeculativeAlgorithm.from_string(None).is_dflash()


def test_the_server_reports_the_identity_of_the_series_that_was_applied():
    report = ddtree_identity.patch_report()
    assert report == {"identity": os.environ["SERIES_IDENTITY"], "stage": "sampling", "decide": "sample-and-follow"}
