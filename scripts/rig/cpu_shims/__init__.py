"""Let the real sglang wheels, 0.5.11 to 0.5.23, serve DFLASH and tree drafts on a machine without a GPU.

Installed into a target venv as a package that a one-line .pth file imports at interpreter start. Nothing is
done until one of the modules below is first imported, and nothing in the installed sglang is edited, so that a
patch still finds every file as the wheel shipped it. What is shimmed, and why:

* torchvision: the PyPI wheel is built for CUDA; beside a CPU torch its meta registrations name two operators
  that do not exist. They are declared.
* sgl_kernel: see kernels.py.
* torch.Tensor.record_stream: CPU tensors have no streams.
* the draft model's input: sglang hands it over as bfloat16 whatever --dtype says; it is cast to the draft's own type,
  so that a float32 pair, whose texts do not depend on the shape of a batch, can be served.
* the attention backend "triton", only with SGLANG_CPU_NATIVE_ATTN=1: the same attention by torch's own
  scaled_dot_product_attention, since interpreted Triton kernels are some twenty times slower. See attention.py.
* 0.5.16 and later refuse DFLASH on this device while they resolve their arguments: there they are shown "cuda".
* 0.5.14 and 0.5.15 read the slots of a block by a function that has no branch for this device, and returns None.

Those after sgl_kernel act only with SGLANG_USE_CPU_ENGINE=1, sglang's own switch for this device.
"""

import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Callable

from ddtree_cpu_shims.attention import make_native_backend
from ddtree_cpu_shims.kernels import STAND_INS, assign_extend_cache_locs_cpu

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
        registry.ATTENTION_BACKENDS["triton"] = make_native_backend


class _OnCuda:
    """What another object has, but for the device."""

    device = "cuda"

    def __init__(self, inner: object):
        self._inner = inner

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


def _accept_this_device(hook: types.ModuleType) -> None:
    handle_dflash = hook._handle_dflash
    view = getattr(hook, "resolving_view", None)  # from 0.5.19 on: through this, arguments are read

    def handle_as_on_cuda(server_args) -> None:
        device = server_args.device
        try:
            if view is None:
                object.__setattr__(server_args, "device", "cuda")  # past the guard of 0.5.17 and 0.5.18
            else:
                hook.resolving_view = lambda args: _OnCuda(view(args))
            handle_dflash(server_args)
        finally:
            if view is None:
                object.__setattr__(server_args, "device", device)
            else:
                hook.resolving_view = view

    hook._handle_dflash = handle_as_on_cuda


def _read_cache_locations(cache_locs: types.ModuleType) -> None:
    def on_cpu(req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device):
        import torch

        slots = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
        assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, slots, None)
        return slots

    cache_locs.assign_extend_cache_locs_func = on_cpu


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
            self.after = {
                "sglang.srt.layers.attention.attention_registry": _register_native_attention,
                "sglang.srt.models.dflash": _cast_draft_input,
                "sglang.srt.arg_groups.speculative_hook": _accept_this_device,  # from 0.5.13 on
                "sglang.srt.speculative.triton_ops.cache_locs": _read_cache_locations,  # 0.5.13 to 0.5.15
            }

    def find_spec(self, name, path=None, target=None):
        prepare = self.before.pop(name, None)  # once: a second import of the name has nothing to prepare
        if prepare is not None:
            prepare()
        if name in STAND_INS and importlib.machinery.PathFinder.find_spec("sgl_kernel") is None:
            return importlib.machinery.ModuleSpec(name, STAND_INS[name], is_package=True)
        if name in self.after:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = _AfterLoad(spec.loader, self.after[name])
            return spec
        return None


sys.meta_path.insert(0, CpuShims())
