"""The torch backend's Surgeon: a recipe in, a `Precision` out."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from autoprec.backends.shared.watching import warn_unwatched
from autoprec.backends.torch.apply.attached import AttachedRecipe
from autoprec.backends.torch.apply.autocast_context import EMPTY, ProfileAutocast
from autoprec.backends.torch.apply.change_report import ChangeReport
from autoprec.backends.torch.apply.copy_checks import check_copies, end_checks_of_copies
from autoprec.backends.torch.apply.loop_checks import LoopCheck
from autoprec.backends.torch.apply.loss_scaler import LossScaler
from autoprec.backends.torch.apply.model_changes import current_operation, operate, restore, unwrap
from autoprec.backends.torch.apply.precision import Precision
from autoprec.backends.torch.apply.process_settings import (
    release_process_settings,
    set_process_settings,
)
from autoprec.backends.torch.apply.rank_agreement import (
    fit_to_ranks,
    release_reduction,
    require_agreement,
    set_reduction,
    unproven,
)
from autoprec.backends.torch.apply.stepping_model import is_copy, stepping_model
from autoprec.backends.torch.apply.wrapping import distribute
from autoprec.backends.torch.devices import resolve_device
from autoprec.backends.torch.watch.watch import Watch, why_unwatchable
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.watch_settings import Action
from autoprec.errors import AutoprecWarning, UsageError

_MEMORY_KEPT = f"{KEEP_MEMORY}=True"
_MEMORY_NOT_KEPT = (
    "keep_memory: freed memory cannot be kept here, which needs glibc's malloc and a CPU; steps "
    "may take longer than the profile says. Is jemalloc or tcmalloc loaded?"
)

_LOOP_CHECKS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_WATCHES: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


class TorchSurgeon:
    """Applies recipes to PyTorch models. `compile_backend` is torch.compile's, for tests."""

    def __init__(self, *, compile_backend: str | Callable[..., Any] = "inductor") -> None:
        self._compile_backend = compile_backend

    def apply(
        self,
        recipe: Recipe,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        device: str = "cpu",
        facts: DeviceFacts | None = None,
    ) -> Precision:
        """Apply `recipe` in place and return the `Precision` that the training loop uses.

        A model that was operated on before is restored first, and so are the process settings of
        its recipe (TF32, threads, cuDNN's autotuner, the precision of float32 products). A recipe
        for another number of ranks than train here keeps its effective batch. Ranks that share the
        model all raise the same `UsageError`, and apply nothing, where their recipes do not agree.
        """
        recipe, address, report, undo = self._operate(
            recipe, model, optimizers, device, whole=model
        )
        precision = Precision(
            recipe,
            model=model,
            optimizers=optimizers,
            device=address,
            report=report,
            undo=undo,
        )
        kind = torch.device(address).type
        check = LoopCheck(recipe, model, optimizers, precision.scaler, kind)
        precision.loop_check = _LOOP_CHECKS[unwrap(model)] = check
        check_copies(unwrap(model), str(recipe.policy), kind)
        return precision

    def watch(
        self,
        precision: Precision | AttachedRecipe,
        *,
        model: nn.Module,
        device: str,
        action: Action,
        every: int,
    ) -> None:
        """See `WatchingSurgeon.watch`; what is attached may be given its optimizers later."""
        attached = precision if isinstance(precision, AttachedRecipe) else None
        root = attached.root if attached else unwrap(model)
        operation = current_operation(root)
        if operation is None or not (attached or precision.optimizers):
            return
        why = why_unwatchable(model)
        if why:
            warn_unwatched(why)
            return
        precision.watch = _WATCHES[root] = Watch(
            precision.recipe,
            model,
            precision.optimizers,
            precision.scaler,
            root=root,
            device_type=resolve_device(device).type,
            owner=operation.owner,
            action=action,
            every=every,
        )

    @_disable_dynamo  # a compiled Fabric attaches in its first call
    def attach(
        self,
        recipe: Recipe,
        *,
        model: nn.Module,
        whole: nn.Module,
        scaler: LossScaler,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        device: str = "cpu",
        casts_itself: bool = False,
    ) -> AttachedRecipe:
        """Apply `recipe` in place to a model whose training loop somebody else owns.

        As `apply`, but for the `Precision`: the loop's own backward passes and updates go through
        `scaler`. `whole` is what the loop trains, `model` or a module around it, which ranks may
        share. A model that `casts_itself` runs under autocast wherever it is called.
        """
        recipe, address, report, undo = self._operate(
            recipe, model, optimizers, device, whole=whole, casts_itself=casts_itself
        )
        return AttachedRecipe(
            recipe,
            root=unwrap(model),
            optimizers=optimizers,
            device=address,
            scaler=scaler,
            report=report,
            undo=undo,
        )

    def _operate(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: str,
        *,
        whole: nn.Module,
        casts_itself: bool = False,
    ) -> tuple[Recipe, str, ChangeReport, Callable[[], None]]:
        """Apply a recipe; return it as it fits the ranks, the device, what was done, and undo."""
        _check(model, optimizers)
        address = str(resolve_device(device))
        recipe, refitted = fit_to_ranks(recipe)
        require_agreement(recipe, whole, address)
        _end_checks(model)
        report = operate(
            recipe,
            model,
            optimizers,
            address,
            compile_backend=self._compile_backend,
            casts_itself=casts_itself,
        )
        release_process_settings(unwrap(model))
        done = set_process_settings(recipe, address, unwrap(model))
        unkept = (_MEMORY_NOT_KEPT,) if recipe.keeps_memory and _MEMORY_KEPT not in done else ()
        ranks = (*refitted, *set_reduction(recipe, whole), *unproven(recipe, whole))
        report = replace(report, globals_set=done, warnings=(*report.warnings, *unkept, *ranks))
        for warning in report.warnings:
            warnings.warn(warning, AutoprecWarning, stacklevel=3)
        operation = current_operation(model)

        def undo() -> None:
            if current_operation(model) is operation:  # a later one has undone this already
                _undo_surgery(model)
                release_reduction(whole)

        return recipe, address, report, undo

    def distribute(self, recipe: Recipe, *, model: nn.Module, device: str) -> nn.Module:
        """See `RankSurgeon.distribute`."""
        _check(model, ())
        return distribute(recipe, model, device)

    def leave_unchanged(
        self,
        recipe: Recipe,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        device: str = "cpu",
        undo: bool = True,
    ) -> Precision:
        """See `Surgeon.leave_unchanged`."""
        _check(model, optimizers)
        if undo:
            _undo_surgery(model)
        kind = Precision if undo else IdlePrecision
        address = str(resolve_device(device))
        return kind(recipe, model=model, optimizers=optimizers, device=address)


class IdlePrecision(Precision):
    """The `Precision` of a script that a tuning imports, and whose model the tuning trains.

    It leaves autocast as it finds it: a recipe that is being measured may have set it. Where it was
    given the script's optimizer, the copy of its model that takes a step is called in its place.
    """

    _seen: tuple[Callable[[], nn.Module | None], bool] = (lambda: None, False)  # if it is a copy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model that the tuning trains now, or else the script's."""
        now = stepping_model()
        if now is None or not self.optimizers:
            return self._model(*args, **kwargs)
        if self._seen[0]() is not now:
            self._seen = (weakref.ref(now), is_copy(now, self._model))
        return (now if self._seen[1] else self._model)(*args, **kwargs)

    def _opened(self, cast: ProfileAutocast | None) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return EMPTY


def _undo_surgery(model: nn.Module) -> None:
    """Undo everything `apply` did to `model`, its optimizers and the process.

    Memory that is kept stays kept: no process can undo that.
    """
    _end_checks(model)
    restore(model)
    release_reduction(model)
    release_process_settings(unwrap(model))


def _end_checks(model: nn.Module) -> None:
    """Look no longer at a loop whose profile is undone or replaced."""
    end_checks_of_copies(unwrap(model))
    for looking in (_LOOP_CHECKS, _WATCHES):
        found = looking.pop(unwrap(model), None)
        if found is not None:
            found.end()


def _check(model: object, optimizers: Sequence[object]) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: {type(model).__name__} given, expected a torch.nn.Module")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer: {type(optimizer).__name__} given, expected a torch.optim.Optimizer. "
                "Derive the class from it; or leave it out, call precision.forward(inputs), and "
                "step it by itself, which a profile without a loss scale allows"
            )
