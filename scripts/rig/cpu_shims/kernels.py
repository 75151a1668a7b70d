"""A stand-in for sgl_kernel, whose CUDA wheel cannot be imported here, and the few of its CPU kernels that are called.

SGLang imports names from it unconditionally. They exist here and raise NotImplementedError when called, but for those
below, which the releases from 0.5.14 on call in every step with overlap scheduling. The sampling kernel is NOT among
them: as on other hardware without it, SGLang finds no `tree_speculative_sampling_target_only`.
"""

import ctypes
import importlib.abc
import types
from collections.abc import Callable


def assign_req_to_token_pool_cpu(requests, req_to_token, start, end, slots, _row_length):
    """Write `slots`, one request's after the other's, to columns start..end of each request's row. [requests] each."""
    taken = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[request, first:last] = slots[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(requests, req_to_token, start, end, slots, _row_length):
    """The reverse: read columns start..end of each request's row into `slots`."""
    taken = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        slots[taken : taken + last - first] = req_to_token[request, first:last].to(slots.dtype)
        taken += last - first


def copy_all_layer_kv_cache_cpu(addresses, strides, to_slots, from_slots):
    """Copy the rows `from_slots` to `to_slots` in every buffer; all are read before any is written.

    addresses, strides: int64 or uint64, [buffers]: where each begins, and bytes of a row.
    """
    import numpy as np

    to, source = to_slots.numpy(), from_slots.numpy()
    if not len(to):
        return
    rows = int(max(to.max(), source.max())) + 1
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        memory = np.frombuffer((ctypes.c_uint8 * (rows * stride)).from_address(address), np.uint8).reshape(rows, stride)
        memory[to] = memory[source]


WORKING = {
    f.__name__: f for f in (assign_req_to_token_pool_cpu, assign_extend_cache_locs_cpu, copy_all_layer_kv_cache_cpu)
}


def _unavailable(qualified_name: str) -> Callable:
    def call(*_args, **_kwargs):
        raise NotImplementedError(f"{qualified_name} is not available on this CPU-only host")

    return call


class StandIn(importlib.abc.Loader):
    """Loads a module with WORKING, where names that `wanted` accepts exist but raise when called."""

    def __init__(self, wanted: Callable[[str], bool]):
        self.wanted = wanted

    def exec_module(self, module: types.ModuleType) -> None:
        def name_lookup(name: str):
            if not self.wanted(name):
                raise AttributeError(name)  # "from sgl_kernel import other" fails as if the package lacked it
            return WORKING.get(name) or _unavailable(f"{module.__name__}.{name}")

        module.__getattr__ = name_lookup


STAND_INS = {
    "sgl_kernel": StandIn(lambda name: name.endswith("_cpu")),
    "sgl_kernel.kvcacheio": StandIn(lambda name: name.startswith("transfer_kv")),
}
