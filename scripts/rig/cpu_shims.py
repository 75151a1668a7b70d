"""Let the real sglang 0.5.11 wheel serve DFLASH and tree drafts on a machine without a GPU.

Installed into a target venv as a module that a one-line .pth file imports at interpreter start. Nothing is
done until one of the modules below is first imported, and nothing in the installed sglang is edited, so that a
patch still finds every file as the wheel shipped it. What is shimmed, and why:

* torchvision: the PyPI wheel is built for CUDA; beside a CPU torch its meta registrations name two operators
  that do not exist. They are declared.
* sgl_kernel: the CUDA wheel cannot be imported here, yet sglang imports a few names from it unconditionally.
  A stand-in has them; calling one raises. The sampling kernel is NOT among them: as on other hardware without
  it, sglang finds no `tree_speculative_sampling_target_only`.
* torch.Tensor.record_stream: CPU tensors have no streams.
* the draft model's input: sglang hands it over as bfloat16 whatever --dtype says; it is cast to the draft's own type,
  so that a float32 pair, whose texts do not depend on the shape of a batch, can be served.
* the attention backend "triton", only with SGLANG_CPU_NATIVE_ATTN=1: the same attention by torch's own
  scaled_dot_product_attention, since interpreted Triton kernels are some twenty times slower. It honours the
  allow-mask of a tree verify.

The last three act only with SGLANG_USE_CPU_ENGINE=1, sglang's own switch for this device.
"""

import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Callable

ATTENTION_REGISTRY = "sglang.srt.layers.attention.attention_registry"
DRAFT_MODEL = "sglang.srt.models.dflash"


# ---- stand-in for sgl_kernel -------------------------------------------------------------------------------


def _unavailable(qualified_name: str) -> Callable:
    def call(*_args, **_kwargs):
        raise NotImplementedError(f"{qualified_name} is not available on this CPU-only host")

    return call


class _StandIn(importlib.abc.Loader):
    """Loads a module whose names that `wanted` accepts exist but raise NotImplementedError when called."""

    def __init__(self, wanted: Callable[[str], bool]):
        self.wanted = wanted

    def exec_module(self, module: types.ModuleType) -> None:
        def name_lookup(name: str):
            if self.wanted(name):
                return _unavailable(f"{module.__name__}.{name}")
            raise AttributeError(name)  # "from sgl_kernel import other" fails as if the package lacked it

        module.__getattr__ = name_lookup


_STAND_INS = {
    "sgl_kernel": _StandIn(lambda name: name.endswith("_cpu")),
    "sgl_kernel.kvcacheio": _StandIn(lambda name: name.startswith("transfer_kv")),
}


# ---- what is done when a real module is imported -----------------------------------------------------------


def _declare_torchvision_operators() -> None:
    import torch

    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _ignore_streams() -> None:
    import torch

    torch.Tensor.record_stream = lambda self, stream: None


def _cast_draft_input(models: types.ModuleType) -> None:
    draft_model = models.DFlashDraftModel
    forward = draft_model.forward

    def cast_then_forward(self, *args, input_embeds, **kwargs):
        return forward(self, *args, input_embeds=input_embeds.to(self.fc.weight.dtype), **kwargs)

    # sglang looks for the name of the parameter before it passes one
    cast_then_forward.__signature__ = inspect.signature(forward)
    draft_model.forward = cast_then_forward


def _register_native_attention(registry: types.ModuleType) -> None:
    if os.environ.get("SGLANG_CPU_NATIVE_ATTN") == "1":
        registry.ATTENTION_BACKENDS["triton"] = _make_native_backend


def _make_native_backend(runner):
    """An attention backend for `runner` (sglang's ModelRunner) that computes TARGET_VERIFY with torch's SDPA."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType

    class CpuVerifyAttnBackend(TorchNativeAttnBackend):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            pool = forward_batch.token_to_kv_pool
            if not forward_batch.forward_mode.is_target_verify():
                if layer.qk_head_dim == pool.get_key_buffer(layer.layer_id).shape[-1]:
                    return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
                # MLA: a prompt without a cached prefix is attended to before its keys are compressed for the cache
                out = prompt_attention(
                    q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                    k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                    v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
                    lengths=forward_batch.extend_seq_lens_cpu,
                    scale=layer.scaling,
                )
                return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
            if save_kv_cache:
                pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
            out = verify_attention(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
                slots=forward_batch.req_to_token_pool.req_to_token[forward_batch.req_pool_indices],
                prefix_lens=forward_batch.seq_lens.tolist(),
                width=forward_batch.spec_info.draft_token_num,
                allow=forward_batch.spec_info.custom_mask,
                causal=layer.attn_type != AttentionType.ENCODER_ONLY,
                scale=layer.scaling,
            )
            return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    return CpuVerifyAttnBackend(runner)


def prompt_attention(query, keys, values, *, lengths, scale):
    """Causal attention within each of some whole prompts.

    Args:
        query, keys: [sum of lengths, heads, head size]. values: [sum of lengths, heads, value size].
        lengths: tokens of each prompt.
        scale: factor on the scores.

    Returns: [sum of lengths, heads, value size].
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    prompts = zip(*(tensor.split(list(lengths)) for tensor in (query, keys, values)), strict=True)
    out = []
    for parts in prompts:
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        out.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1))
    return torch.cat(out)


def verify_attention(query, keys, values, *, slots, prefix_lens, width, allow, causal, scale):
    """Attention of `width` new tokens a request over its prefix and over each other.

    Args:
        query: [requests * width, heads, head size].
        keys, values: the layer's cache, [cache slots, kv heads, head size]; the new tokens are already in it.
        slots: [requests, any length >= prefix + width] cache slot of each token of a request, in order.
        prefix_lens: tokens before the new ones, a number a request.
        width: new tokens a request (N).
        allow: flat bool mask, for each request its [N, prefix + N] rows one after the other, True = may attend;
            None: causal, or everything when `causal` is False (the draft's block sees itself both ways).
        causal: see `allow`; has no say when there is a mask.
        scale: factor on the scores.

    Returns: [requests * width, heads, value size].
    Raises: ValueError if the mask's type or size is wrong, or a row may attend to nothing.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    expected = sum(width * (prefix + width) for prefix in prefix_lens)
    if allow is not None and (allow.dtype != torch.bool or allow.numel() != expected):
        raise ValueError(f"verify mask: {expected} bools expected, got {allow.numel()} of {allow.dtype}")
    out, mask_start = [], 0
    for request, prefix in enumerate(prefix_lens):
        total = prefix + width
        if allow is not None:
            mask = allow[mask_start : mask_start + width * total].view(width, total)
            mask_start += width * total
            if not bool(mask.any(dim=1).all()):
                raise ValueError(f"verify mask: a row of request {request} of the batch may attend to nothing")
        elif causal:
            mask = torch.ones(width, total, dtype=torch.bool).tril(prefix)
        else:
            mask = None
        own = slots[request, :total]
        q = query[request * width : (request + 1) * width]
        attended = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[own].to(q.dtype).transpose(0, 1)[None],
            values[own].to(q.dtype).transpose(0, 1)[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)


# ---- the import hook ---------------------------------------------------------------------------------------


class _AfterLoad(importlib.abc.Loader):
    """The real loader, followed by `action(module)`."""

    def __init__(self, inner: importlib.abc.Loader, action: Callable[[types.ModuleType], None]):
        self.inner = inner
        self.action = action

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        self.action(module)

    def __getattr__(self, name):  # get_source, get_filename and the like, for tracebacks and pickling
        return getattr(self.inner, name)


class CpuShims(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.before = {"torchvision": _declare_torchvision_operators}
        self.after = {}
        if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
            self.before["sglang"] = _ignore_streams
            self.after[ATTENTION_REGISTRY] = _register_native_attention
            self.after[DRAFT_MODEL] = _cast_draft_input

    def find_spec(self, name, path=None, target=None):
        prepare = self.before.pop(name, None)  # once: a second import of the name has nothing to prepare
        if prepare is not None:
            prepare()
        if name in _STAND_INS and importlib.machinery.PathFinder.find_spec("sgl_kernel") is None:
            return importlib.machinery.ModuleSpec(name, _STAND_INS[name], is_package=True)
        if name in self.after:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = _AfterLoad(spec.loader, self.after[name])
            return spec
        return None


sys.meta_path.insert(0, CpuShims())
