"""A model and its optimizer as they were given: never trained, and copied for every training.

The optimizer is copied for a model by naming its parameters: what it was made with, its groups and
what it keeps of each parameter go along, whatever its class takes to be made. What a model holds
that cannot be copied (an open file, a lock) is shared by all copies, as long as it holds no tensor.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoprec.backends.shared import worker_process
from autoprec.backends.torch.apply.forward_wrappers import wrappers_on
from autoprec.backends.torch.apply.held_objects import survey
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.train.task_runner import needs_closure
from autoprec.errors import TaskError, UsageError

_OF_SCHEDULES = ("step", "_opt_called", "_step_count")
"""What a learning rate's schedule leaves on an optimizer; its `step` is the first optimizer's."""

_WHOLE = "_autoprec_whole"
"""Where a part holds what it is a part of: not as one of its modules."""

_RATES = ("lr", "initial_lr", "max_lr")

_TASK_FILE = "write a task file, whose build_model() makes the model anew each time"


class MasterCopy:
    """What every model and optimizer of a task is a copy of.

    The model of the task may be a `part` of what is copied, which then holds its whole: see
    `whole_of`. `finish` is called with every whole copy. Raises `UsageError` for an optimizer that
    trains something else than the model, or that steps by a closure, and for a model that has a
    profile.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: Any,
        finish: Callable[[nn.Module], None] | None = None,
        part: str = "",
    ) -> None:
        self._name, self._finish, self._part = name, finish, part
        self._model = unwrap(model).cpu()
        self._optimizer = _raw(optimizer)
        self._shared: list[Any] = []
        self._check()
        _begin_schedules(self._optimizer)

    @property
    def model(self) -> nn.Module:
        """Return the model itself, on the CPU."""
        return self._model

    def build_model(self) -> nn.Module:
        """Return a copy of the model, on the CPU."""
        try:
            model = self._copied()
        except MemoryError:
            raise
        except Exception as error:
            model = self._copied_sharing(error)
        if self._finish is not None:
            self._finish(model)
        part = model.get_submodule(self._part)
        if part is not model:
            vars(part)[_WHOLE] = model
        return part

    def _copied(self) -> nn.Module:
        """Copy the model, but for what is shared.

        A tensor that was computed of others is computed again, as it is before every step.
        """
        memo = {
            id(each): each.detach().clone() if _is_tensor(each) else each for each in self._shared
        }
        return copy.deepcopy(self._model, memo)

    def _copied_sharing(self, error: Exception) -> nn.Module:
        """Copy the model, sharing what cannot be copied; `TaskError` where that holds tensors."""
        own, shared = list[tuple[str, Any]](), list[tuple[str, Any]]()
        for path, value in _uncopied(self._model):
            (own if _holds_tensors(value) else shared).append((path, value))
        self._shared = [value for _, value in shared]
        try:
            model = self._copied()
        except MemoryError:
            raise
        except Exception:
            path, value = next(iter(own or shared), ("the model itself", self._model))
            raise TaskError(
                f"{self._name}: the {_kind(self._model)} cannot be copied, and every trial trains "
                f"a copy of it: {path} is {_a(value)} ({type(error).__name__}: {error}). Make that "
                f"anew in __deepcopy__, or {_TASK_FILE}"
            ) from error
        names = [f"{path} ({_kind(value)})" for path, value in shared if not _is_tensor(value)]
        if names:
            worker_process.note(
                f"all copies of the {_kind(self._model)} share what cannot be copied: "
                + ", ".join(names)
            )
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a copy of the optimizer that trains `model`, a copy of the model."""
        copied = dict(unwrap(model).named_parameters())
        own_part = self._model.get_submodule(self._part)
        memo: dict[int, Any] = {
            id(parameter): copied[path] for path, parameter in own_part.named_parameters()
        }
        optimizer: torch.optim.Optimizer = object.__new__(type(self._optimizer))
        memo[id(self._optimizer)] = optimizer
        kept = {k: v for k, v in vars(self._optimizer).items() if k not in _OF_SCHEDULES}
        vars(optimizer).update(copy.deepcopy(kept, memo))
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    state[key] = value.to(parameter.device)
        return optimizer

    def _check(self) -> None:
        if any(any(wrappers_on(module)) for module in self._model.modules()):
            raise UsageError(
                f"{self._name}: a profile is applied to the {_kind(self._model)}, or to what it is "
                "a copy of, expected a model as it was made: call precision.restore() before"
            )
        given = f"{self._name}: the optimizer is {_a(self._optimizer)}"
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise UsageError(f"{given}, expected a torch.optim.Optimizer")
        if needs_closure(self._optimizer):
            raise UsageError(
                f"{given}, whose step() needs a closure, expected one that steps by the gradients "
                "there are (AdamW, SGD, ...): a closure runs the forward pass several times in one "
                "update, which loss scaling cannot follow"
            )
        known = {id(parameter) for parameter in self._model.get_submodule(self._part).parameters()}
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        others = sum(id(parameter) not in known for parameter in trained)
        if others:
            raise UsageError(
                f"{given} of {len(trained)} parameters, {others} of which are none of the "
                f"{_kind(self._model)}'s: put everything that is trained, such as a loss with "
                "weights, into one module, and make the optimizer after the model is complete"
            )


def whole_of(part: nn.Module) -> nn.Module:
    """Return what a copied part is a part of, or the module itself where it is the whole."""
    whole: nn.Module = vars(part).get(_WHOLE, part)
    return whole


def _raw(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's or Lightning's wrapper."""
    wrapped = type(optimizer).__name__ in ("AcceleratedOptimizer", "LightningOptimizer")
    return _raw(optimizer.optimizer) if wrapped else optimizer


def _begin_schedules(optimizer: torch.optim.Optimizer) -> None:
    """Take the rate that a schedule warms up to: at the first one, often 0, nothing is learnt.

    An optimizer that has stepped keeps its rate.
    """
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        if "initial_lr" in group and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = max(float(group[name]) for name in _RATES if name in group)


def _uncopied(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield parts of a model that cannot be copied, each with its path; the innermost first."""
    modules = model.named_modules()
    inner_first = sorted(modules, key=lambda named: -named[0].count(".") - bool(named[0]))
    for path, each in inner_first:
        for key, value in (*vars(each).items(), *each._parameters.items(), *each._buffers.items()):
            if key not in ("_modules", "_parameters", "_buffers") and not _is_copied(value):
                yield f"{path}.{key}".strip("."), value


def _is_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    finally:
        gc.collect(0)
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _holds_tensors(value: Any) -> bool:
    """Say whether a part holds what is trained or trains; a tensor computed of others does not."""
    if _is_tensor(value):
        return bool(value.grad_fn is None)
    seen = survey(value)
    held = (each for holder in seen.holders.values() for _, _, each in holder.held)
    numbers = (torch.Tensor, nn.Module, torch.optim.Optimizer)
    return seen.unseen or any(isinstance(each, numbers) for each in (value, *held))


def _kind(value: Any) -> str:
    return type(value).__name__


def _a(value: Any) -> str:
    return "None" if value is None else f"a {_kind(value)}"
