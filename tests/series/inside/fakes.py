"""Stand-ins for what a CPU or a single process lacks. All are named for it: fake."""

from types import SimpleNamespace

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from patcher.agent.kernel_probe import reference_walk


class FakeTpGroup:
    """One rank."""

    world_size = 1

    def __init__(self):
        self.broadcasts = 0

    def broadcast(self, tensor):
        self.broadcasts += 1
        return tensor


class FakeTreeSamplingOpByReferenceWalk:
    """In place of the CUDA op `tree_speculative_sampling_target_only`: the reference walk of the kernel probe.

    It does what the op is known to do to its arguments, traps included (only accepted entries are written, scratch is
    dirtied at rejected siblings, retrive_index is what accept_index gets), and refuses what the op would misread.
    """

    def __init__(self):
        self.coins, self.final_coins = [], []

    def __call__(
        self,
        *,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
    ):
        bs, n, vocab = target_probs.shape
        shapes = {
            (bs, n): (candidates, retrive_index, retrive_next_token, retrive_next_sibling, uniform_samples),
            (bs * n,): (predicts,),
            (bs,): (accept_token_num, uniform_samples_for_final_sampling),
            (bs, n, vocab): (draft_probs, target_probs),
        }
        for shape, tensors in shapes.items():
            for tensor in tensors:
                assert tuple(tensor.shape) == shape and tensor.is_contiguous(), (shape, tensor.shape)
        for tensor in (candidates, retrive_index, retrive_next_token, retrive_next_sibling):
            assert tensor.dtype == torch.int64
        for tensor in (predicts, accept_index, accept_token_num):
            assert tensor.dtype == torch.int32
        for tensor in (uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs):
            assert tensor.dtype == torch.float32
        assert accept_index.shape[0] == bs and accept_index.is_contiguous()
        assert deterministic and threshold_single == 1.0
        assert not draft_probs.any(), "scratch must be zero at every call"
        assert bool((uniform_samples > 0).all()) and bool((uniform_samples <= 1).all()), "coins must be in (0, 1]"
        final = uniform_samples_for_final_sampling
        assert bool((final >= 0).all()) and bool((final < 1).all()), "final coins must be in [0, 1)"
        assert bool((retrive_index == torch.arange(bs * n).view(bs, n)).all()), "rows of this call's target_probs"
        assert bool((accept_index == -1).all()) and not predicts.any(), "outputs must be prefilled"
        self.coins.append(uniform_samples.clone())
        self.final_coins.append(final.clone())
        trees = zip(candidates.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist(), strict=True)
        # coin <= sum / threshold is coin * threshold <= sum
        rows, coins = target_probs.tolist(), (uniform_samples * threshold_acc).tolist()
        finals, width = final.tolist(), accept_index.shape[1]
        where, tokens_there, places, counts, rejected = [], [], [], [], []
        for b, (tokens, next_token, next_sibling) in enumerate(trees):
            tree = {"tokens": tokens, "next_token": next_token, "next_sibling": next_sibling}
            path, emitted = reference_walk(tree, rows[b], coins[b], finals[b], width)
            where += [b * n + node for node in path]
            places += range(b * width, b * width + len(path))
            tokens_there += emitted
            counts.append(len(path) - 1)
            for node, accepted in zip(path, [*path[1:], -1], strict=True):
                child = next_token[node]
                while child not in (accepted, -1):
                    rejected.append((b, node, tokens[child]))
                    child = next_sibling[child]
        accept_index.view(-1)[torch.tensor(places)] = torch.tensor(where, dtype=torch.int32)
        predicts[torch.tensor(where)] = torch.tensor(tokens_there, dtype=torch.int32)
        accept_token_num.copy_(torch.tensor(counts))
        for place in rejected:  # a caller that keeps its scratch for the next call must zero it
            draft_probs[place] = 0.125


class FakeBatch:
    """The part of a ScheduleBatch that sampling reads. Attributes: reqs, device, sampling_info."""

    device = "cpu"


def make_batch(settings, vocab_size):
    """A batch of requests: real SamplingParams and a real SamplingBatchInfo, the rest fake.

    settings: a dict of SamplingParams' arguments for each request.
    """
    batch = FakeBatch()
    batch.reqs = []
    for one in settings:
        params = SamplingParams(**one)
        params.verify(vocab_size)
        batch.reqs.append(SimpleNamespace(sampling_params=params, custom_logit_processor=None))
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    return batch
