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


def _digest(*tensors) -> str:
    seen = hashlib.sha256()
    for tensor in tensors:
        seen.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return seen.hexdigest()[:16]


def _trace_v1(module) -> None:
    verify_input = module.DDTreeVerifyInput
    commit, log = verify_input._commit, _Log()

    def traced(self, *args, **kwargs):
        decision = next(a for a in (*args, *kwargs.values()) if isinstance(a, module.Decision))
        said = log.write(decision, self.tree.tokens)
        args = tuple(said if a is decision else a for a in args)
        return commit(self, *args, **{name: said if a is decision else a for name, a in kwargs.items()})

    verify_input._commit = traced


def _trace_v2(module) -> None:
    commit, log = module.commit_path, _Log()
    module.commit_path = lambda decision, tokens, *rest: commit(log.write(decision, tokens), tokens, *rest)


class _Log:
    """This rank's file, opened once the rank is known."""

    def __init__(self):
        self.file = None

    def write(self, decision, tokens):
        """Write a line, and give the decision that is to be committed."""
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        rank, folder = get_tensor_model_parallel_rank(), os.environ["DDTREE_TRACE_DIR"]
        if self.file is None:
            path = os.path.join(folder, f"rank{rank}.txt")
            self.file = open(path, "w", buffering=1)  # noqa: SIM115 - as long as the process lives
        if rank == 1 and os.path.exists(os.path.join(folder, "ALTER")):
            decision = decision._replace(bonus=decision.bonus ^ 1)
        decided = _digest(decision.path, decision.accept_len, decision.bonus)
        self.file.write(f"{decision.path.shape[0]} {_digest(tokens)} {decided}\n")
        return decision


# Where each family of releases commits.
TRACED = {"sglang.srt.speculative.ddtree_info": _trace_v1, "sglang.srt.speculative.ddtree_worker_v2": _trace_v2}


class _AfterLoad(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        TRACED[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in TRACED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _AfterLoad(spec.loader)
        return spec


if "DDTREE_TRACE_DIR" in os.environ:
    sys.meta_path.insert(0, _Finder())
