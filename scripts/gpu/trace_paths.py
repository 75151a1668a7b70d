"""What every tensor-parallel rank commits, one line a step: installed into a copy of the patched environment.

tp2.py copies it there as a module that a .pth file imports at interpreter start. With DDTREE_TRACE_DIR set, each rank
writes rank<N>.txt in it: "<requests> <digest of the trees> <digest of path, accepted, bonus>" a committed step. The
digests are of bytes as they lie on that rank's device, before anything is exchanged. Where that folder has a file
ALTER, rank 1 commits another bonus token than it decided: what a comparison must notice.
"""

import hashlib
import importlib.abc
import importlib.machinery
import os
import sys

MODULE = "sglang.srt.speculative.ddtree_info"


def _digest(*tensors) -> str:
    seen = hashlib.sha256()
    for tensor in tensors:
        seen.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return seen.hexdigest()[:16]


def _trace(module) -> None:
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    verify_input = module.DDTreeVerifyInput
    commit = verify_input._commit
    lines = []  # the open file, once the rank is known

    def traced(self, *args, **kwargs):
        decision = next(a for a in (*args, *kwargs.values()) if isinstance(a, module.Decision))
        rank, folder = get_tensor_model_parallel_rank(), os.environ["DDTREE_TRACE_DIR"]
        if not lines:
            path = os.path.join(folder, f"rank{rank}.txt")
            lines.append(open(path, "w", buffering=1))  # noqa: SIM115 - as long as the process lives
        if rank == 1 and os.path.exists(os.path.join(folder, "ALTER")):
            altered = decision._replace(bonus=decision.bonus ^ 1)
            args = tuple(altered if a is decision else a for a in args)
            kwargs = {name: altered if a is decision else a for name, a in kwargs.items()}
            decision = altered
        decided = _digest(decision.path, decision.accept_len, decision.bonus)
        lines[0].write(f"{decision.path.shape[0]} {_digest(self.tree.tokens)} {decided}\n")
        return commit(self, *args, **kwargs)

    verify_input._commit = traced


class _AfterLoad(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        _trace(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _AfterLoad(spec.loader)
        return spec


if "DDTREE_TRACE_DIR" in os.environ:
    sys.meta_path.insert(0, _Finder())
