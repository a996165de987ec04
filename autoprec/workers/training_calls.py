"""The calls by which trainers train, and how a process waits for one of them.

Trainers are not imported here: what a script imports is changed when it imports it, in this process
only. A call is handed over with what it was called with, in its own frame.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Patch = Callable[[ModuleType], None]


@dataclass(frozen=True)
class TrainingCall:
    """One trainer's call: where it is, what it is to its users, and what captures its task.

    `capture` is a module with a function `from_...`, which takes those of the call's `arguments`
    in this order, None for what was not given, and `named` ones by their names where given.
    """

    module: str
    owner: str
    method: str
    shown: str
    trainer: str
    capture: str
    function: str
    arguments: tuple[str, ...]
    named: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Return the trainer's package, which is also the name that it is installed by."""
        return self.module.partition(".")[0]

    def task_of(self, given: Mapping[str, Any], name: str) -> Any:
        """Return the task of a call that was `given` these arguments."""
        capture = getattr(importlib.import_module(self.capture), self.function)
        named = {each: given[each] for each in self.named if each in given}
        return capture(*(given.get(each) for each in self.arguments), **named, name=name)


_TORCH, _KERAS = "autoprec.backends.torch.capture", "autoprec.backends.keras.capture"
_LIGHTNING = functools.partial(
    TrainingCall,
    owner="Trainer",
    method="fit",
    shown="Trainer.fit",
    trainer="Lightning",
    capture=_TORCH,
    function="from_lightning",
    arguments=("self", "model", "train_dataloaders", "datamodule"),
    named=("ckpt_path",),
)

CALLS: tuple[TrainingCall, ...] = (
    _LIGHTNING(module="lightning.pytorch.trainer.trainer"),
    _LIGHTNING(module="pytorch_lightning.trainer.trainer"),
    TrainingCall(  # what Trainer.train calls when all is set up, also in subclasses
        module="transformers.trainer",
        owner="Trainer",
        method="_inner_training_loop",
        shown="Trainer.train",
        trainer="Transformers",
        capture=_TORCH,
        function="from_transformers",
        arguments=("self",),
    ),
    TrainingCall(
        module="keras.src.models.model",
        owner="Model",
        method="fit",
        shown="Model.fit",
        trainer="Keras",
        capture=_KERAS,
        function="from_keras",
        arguments=("self", "x", "y", "sample_weight", "batch_size"),
        named=(
            *("class_weight", "validation_split", "validation_data"),
            *("shuffle", "steps_per_epoch"),
        ),
    ),
)

TRAINERS = (
    ", ".join(dict.fromkeys(each.trainer for each in CALLS[:-1])) + f" or {CALLS[-1].trainer}"
)


@dataclass
class AwaitedCall:
    """Waits for the call number `at`; calls before it run, with all that they do.

    `reached` gets the call, the names and values of its arguments, and does not return. `looped` is
    called at an update outside any such call, and does not return either.
    """

    at: int
    reached: Callable[[TrainingCall, Mapping[str, Any]], Any]
    looped: Callable[[], Any]
    seen: int = 0
    _inside: int = 0
    _over: bool = False
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def install(self) -> None:
        """Change trainers and optimizers when they are imported, and those that are already."""
        patches: dict[str, Patch] = {
            each.module: functools.partial(self._await, each) for each in CALLS
        }
        patches["torch.optim.optimizer"] = self._await_torch
        patches["keras.src.optimizers.base_optimizer"] = self._await_keras
        patches["transformers.training_args"] = self._save_nothing
        patch_on_import(patches)

    def end(self) -> None:
        """Wait no more: every call and every update is what it was."""
        self._over = True
        while self._undo:
            self._undo.pop()()

    def _await(self, call: TrainingCall, module: ModuleType) -> None:
        owner = getattr(module, call.owner)
        original = getattr(owner, call.method)

        @functools.wraps(original)
        def awaited(*args: Any, **kwargs: Any) -> Any:
            if self._over or self._inside:
                return original(*args, **kwargs)
            try:
                bound = inspect.signature(original).bind(*args, **kwargs)
            except TypeError:  # which the call itself will say
                return original(*args, **kwargs)
            self.seen += 1
            if self.seen == self.at:
                return self.reached(call, bound.arguments)
            with self._passing():
                return original(*args, **kwargs)

        setattr(owner, call.method, awaited)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _await_torch(self, module: ModuleType) -> None:
        if self._over:
            return
        handle = module.register_optimizer_step_pre_hook(lambda *_: self._update())
        self._undo.append(handle.remove)

    def _await_keras(self, module: ModuleType) -> None:
        if self._over:
            return
        owner = module.BaseOptimizer
        original = owner.apply

        @functools.wraps(original)
        def apply(*args: Any, **kwargs: Any) -> Any:
            self._update()
            return original(*args, **kwargs)

        owner.apply = apply
        self._undo.append(lambda: setattr(owner, "apply", original))

    def _save_nothing(self, module: ModuleType) -> None:
        """Keep Transformers' Trainer from making its output folder, which it does when made."""
        owner = module.TrainingArguments
        original = owner.should_save
        owner.should_save = property(lambda arguments: self._over and original.fget(arguments))

    def _update(self) -> None:
        if not (self._over or self._inside):
            self.looped()


def patch_on_import(patches: Mapping[str, Patch]) -> None:
    """Change modules, by name, as soon as they are imported; those that are already, at once."""
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder(patches))


class _PatchingFinder(MetaPathFinder):
    """Finds modules of packages where those are, and changes some when they have run."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = dict(patches)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is to be changed; None for any other."""
        spec = PathFinder.find_spec(name, path, target) if name in self._patches else None
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._patches[name])
        return spec


class _PatchingLoader(Loader):
    """Loads a module by its own loader, which it keeps, and changes it."""

    def __init__(self, loader: Loader, patch: Patch) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then change it."""
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._patch(module)
