"""On PYTHONPATH: pretends an accelerator in this process, once it imports what looks for one.

Where REHEARSAL is empty, only what is forked from this process pretends one, by `begin`.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys
import types


class _Hook(importlib.abc.MetaPathFinder):
    """Runs something before and after one module is imported."""

    def __init__(self, name, before, after):
        self.name, self.before, self.after = name, before, after

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            self.before(spec)
            run(module)
            self.after(module)

        spec.loader.exec_module = exec_module
        return spec


def _before_torch(spec):
    import ctypes

    # The guard's symbols must be there before `import torch` looks for hooks, and torch's own
    # before the guard.
    library = os.path.join(os.path.dirname(spec.origin), "lib", "libtorch_cpu.so")
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ["REHEARSAL_GUARD"])


class _Dynamo(types.ModuleType):
    """Stands in for Dynamo, which the first step of an optimizer imports only to be let alone.

    That takes as long as importing torch, in every process. Who wants more of it has the real one.
    """

    def disable(self, function=None, recursive=True, **settings):
        return (lambda own: own) if function is None else function

    def graph_break(self, message=""): ...

    def __getattr__(self, name):
        if name.startswith("__") and name != "__path__":  # `inspect` asks every module for these
            raise AttributeError(name)
        if sys.modules.get("torch._dynamo") is self:
            del sys.modules["torch._dynamo"]
        return getattr(importlib.import_module("torch._dynamo"), name)


_waiting = []


def begin():
    """Pretend what the environment names by now, in what was imported without it."""
    while _waiting:
        _waiting.pop(0)()


def _when_named(install):
    """Decorate what is done after an import: at once, or by `begin`."""

    def after(module):
        _waiting.append(lambda: install(module))
        if os.environ["REHEARSAL"]:
            begin()

    return after


@_when_named
def _after_torch(module):
    from pretended import border

    module._dynamo = sys.modules.setdefault("torch._dynamo", _Dynamo("torch._dynamo"))
    border.install()


@_when_named
def _after_tensorflow(module):
    from pretended import tensorflow

    tensorflow.install(module)


@_when_named
def _after_machine(module):
    from pretended import machine

    machine.install(module)


if "REHEARSAL" in os.environ:
    if os.environ["REHEARSAL_DRIVEN"] == "1":
        sys.meta_path.insert(0, _Hook("torch", _before_torch, _after_torch))
        sys.meta_path.insert(0, _Hook("tensorflow", lambda spec: None, _after_tensorflow))
    sys.meta_path.insert(0, _Hook("autoprec.hardware.machine", lambda spec: None, _after_machine))
