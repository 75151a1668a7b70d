"""Stand-ins for packages that an offline GPU host lacks and that a text-only SGLang server never calls.

install.py puts it into every environment, imported at interpreter start. A package that is really installed always
wins. Only for getting a server to start on such a host; nothing here may stand in for sgl_kernel, torch, flashinfer or
triton.
"""

import importlib.abc
import importlib.machinery
import sys
from types import SimpleNamespace

NAMES = {"soundfile", "cutlass", "cuda_tile", "xgrammar", "zstandard"}


class _AnyMeta(type):
    def __getattr__(cls, name):
        if name.startswith("__") and "mlir" not in name:  # flashinfer asks a class of cutlass for such names
            raise AttributeError(name)
        return _Any()


class _Any(metaclass=_AnyMeta):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return _Any()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any()

    def __class_getitem__(cls, item):
        return cls

    def __hash__(self):
        return id(self)

    def __or__(self, other):
        return self

    def __ror__(self, other):
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__path__ = []
        module.__version__ = "0.0.0"

        def lookup(name):
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "CUDA_VERSION":  # of cutlass: flashinfer compares its numbers while it is imported
                return SimpleNamespace(major=0, minor=0)
            if name == "StructuralTag":  # of xgrammar: a field's type in a model of SGLang's protocol
                import pydantic

                return type(name, (pydantic.BaseModel,), {})
            return _AnyMeta(name, (_Any,), {})

        module.__getattr__ = lookup


sys.meta_path.append(_Finder())  # last: a package that is really installed always wins
