"""The op's scratch is kept from step to step, and is zero whenever the op is called."""

import pytest
import torch
from fakes import FakeTreeSamplingOpByReferenceWalk
from sglang.srt.speculative import dflash_verify_op
from sglang.srt.speculative.dflash_verify_op import sampling_op


def star(bs, n, vocab):
    """A root and n - 1 children, whose tokens are vocab - n + 1, .., vocab - 1; the target wants none of them."""
    tokens = torch.arange(vocab - n, vocab).repeat(bs, 1)
    target = torch.zeros(bs, n, vocab)
    target[..., 0] = 1.0
    return {
        "candidates": tokens,
        "target_probs": target,
        "predicts": torch.zeros(bs * n, dtype=torch.int32),
        "accept_index": torch.full((bs, 2), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(bs, dtype=torch.int32),
        "retrive_index": torch.arange(bs * n).view(bs, n),
        "retrive_next_token": torch.tensor([1] + [-1] * (n - 1)).repeat(bs, 1),
        "retrive_next_sibling": torch.tensor([-1, *range(2, n), -1]).repeat(bs, 1),
        "uniform_samples": torch.rand(bs, n).clamp_(min=0.1),
        "uniform_samples_for_final_sampling": torch.rand(bs),
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
    }


@pytest.fixture
def op(install_op):
    """Refuses scratch that is not zero, and dirties it at every rejected child."""
    return install_op(FakeTreeSamplingOpByReferenceWalk())


def kept():
    return dflash_verify_op._SCRATCH[torch.device("cpu")]


def test_batches_verify_widths_and_vocabularies_may_change(op):
    for bs, n, vocab in ((2, 5, 9), (2, 5, 9), (1, 5, 9), (7, 5, 9), (7, 3, 30), (1, 4, 1000), (16, 5, 9), (2, 5, 9)):
        call = star(bs, n, vocab)
        sampling_op(**call)
        assert call["accept_token_num"].tolist() == [0] * bs
        assert not kept().any()


def test_scratch_is_made_once_while_it_is_large_enough(op):
    sampling_op(**star(8, 5, 100))
    first = kept()
    for bs in (1, 8, 3):
        sampling_op(**star(bs, 5, 100))
        assert kept() is first
    sampling_op(**star(9, 5, 100))
    assert kept().numel() == 2 * first.numel()  # a batch that grows by one each step does not allocate at each


def test_an_error_of_the_op_leaves_no_dirt_behind(op, monkeypatch):
    def fail(*, draft_probs, **_):
        draft_probs.fill_(0.125)
        raise RuntimeError("CUDA error")

    sampling_op(**star(2, 5, 9))
    with monkeypatch.context() as broken:
        broken.setattr(dflash_verify_op, "VERIFY_OP", fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            sampling_op(**star(2, 5, 9))
    sampling_op(**star(2, 5, 9))
    assert len(op.coins) == 2


def test_what_is_kept_has_a_bound(op, monkeypatch):
    monkeypatch.setattr(dflash_verify_op, "MAX_KEPT_SCRATCH", 300)
    for bs in (1, 5, 6, 7, 8, 2, 30):
        sampling_op(**star(bs, 5, 9))
        assert all(scratch.numel() <= 300 for scratch in dflash_verify_op._SCRATCH.values())
