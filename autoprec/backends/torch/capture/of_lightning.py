"""A task of a Lightning Trainer, a LightningModule and its data, as `fit` would train them.

What `fit` calls before it trains is called here: `prepare_data`, `setup`, `configure_model`, the
loader, `configure_optimizers`. Of a training step counts what the module computes: loggers,
callbacks and validation are not part of it. Nothing of Lightning is imported, so both of its
packages will do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.shared import worker_process
from autoprec.backends.torch.capture.master_copy import MasterCopy, whole_of
from autoprec.backends.torch.capture.parts import task_of_parts
from autoprec.backends.torch.capture.rebatch import Batches, rebatch
from autoprec.backends.torch.capture.trainer_stand_in import TrainerStandIn
from autoprec.errors import TaskError, UsageError

_PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_OTHER_STRATEGIES = ("DeepSpeed", "FSDP", "ModelParallel", "XLA")
_PLAIN_PRECISIONS = ("32-true", "32", "16-mixed", "bf16-mixed", 32, None)
_LEFT_OUT = ("optimizer_step", "backward", "configure_gradient_clipping")
_FACTORY = "return (model, optimizer, loader, step) from a function, `autoprec tune FILE.py:NAME`"


def from_lightning(
    trainer: Any,
    module: Any,
    loaders: Any = None,
    datamodule: Any = None,
    *,
    name: str,
    ckpt_path: Any = None,
) -> Task:
    """Make a task of what `trainer.fit(module, loaders, datamodule=...)` would train.

    Raises `UsageError` for what cannot be tuned as it is, with the way out.
    """
    _refuse(name, trainer, module)
    if ckpt_path is not None:
        worker_process.note(
            f"ckpt_path={str(ckpt_path)!r} is not loaded: trials begin with the weights that the "
            "module holds; `--checkpoint FILE` lets them begin with a file's"
        )
    if datamodule is None and hasattr(loaders, "train_dataloader"):
        datamodule, loaders = loaders, None
    stand_in = TrainerStandIn(trainer, datamodule, module)
    _attach(module, stand_in)
    loader = _only_loader(name, _train_loader(name, stand_in, module, loaders, datamodule))
    stand_in.use_loader(loader)
    batches = _with_hook(rebatch(loader, name), module, datamodule)
    accumulation = trainer.accumulate_grad_batches
    if batches.fixed and accumulation > 1:
        worker_process.note(
            f"the batch is that of the loader, {batches.own}; accumulate_grad_batches="
            f"{accumulation} stays the Trainer's own"
        )
    optimizer = _only_optimizer(name, module.configure_optimizers())
    stand_in.use_optimizer(optimizer)
    return task_of_parts(
        name,
        MasterCopy(name, module, optimizer, lambda copy: _attach(copy, stand_in), _part(module)),
        batches,
        _Step(name, module, datamodule, batches.own),
        accumulation=accumulation,
        clip_grad_norm=trainer.gradient_clip_val,
    )


def _refuse(name: str, trainer: Any, module: Any) -> None:
    def refuse(what: str, instead: str) -> None:
        raise UsageError(f"{name}: {what}. {instead[0].upper()}{instead[1:]}")

    title = type(module).__name__
    if not isinstance(module, nn.Module) or not hasattr(module, "training_step"):
        refuse(f"a {title} was given beside the Trainer", "Give the LightningModule")
    if not module.automatic_optimization:
        refuse(
            f"{title} optimizes manually (automatic_optimization=False), as GANs do: there is no "
            "one loss and update to tune",
            f"tune the part that takes the time: {_FACTORY}",
        )
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    if any(kind.startswith(_OTHER_STRATEGIES) for kind in kinds):
        refuse(
            f"{kinds[0]} shards and casts the model itself",
            "tune with the default strategy on one device, or with nproc=N on several",
        )
    if trainer.precision not in _PLAIN_PRECISIONS and "autoprec" not in str(
        type(trainer.precision_plugin).__module__
    ):
        refuse(
            f"Trainer(precision={trainer.precision!r}) keeps weights in another precision",
            "leave `precision` out: the tuning finds it",
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        refuse(
            "gradient_clip_algorithm='value' clips each element, and a profile is checked with "
            "gradients clipped by their norm",
            "use gradient_clip_algorithm='norm', or leave clipping out while tuning",
        )
    for callback in trainer.callbacks:
        if type(callback).__name__ == "GradientAccumulationScheduler":
            refuse(
                "GradientAccumulationScheduler changes the batch of an update during training",
                "leave the callback out while tuning, and give accumulate_grad_batches",
            )
    left_out = [each for each in _LEFT_OUT if _overrides(module, each)]
    if left_out:
        worker_process.note(
            f"{title}.{' and '.join(left_out)} is not part of the steps that are tuned: they "
            "compute the loss, go backward and step the optimizer"
        )


def _part(module: nn.Module) -> str:
    """Name the only child with parameters, which is the model; empty where that is the module.

    What a recipe does at the root (compilation, the outputs' dtype, the inputs' layout) happens
    where the root is called, and a LightningModule itself seldom is.
    """
    if next(module.parameters(recurse=False), None) is not None:
        return ""
    trained = [
        (name, child)
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]
    if len(trained) != 1 or hasattr(trained[0][1], "_orig_mod"):
        return ""
    name, child = trained[0]
    return "" if type(child).forward is nn.Module.forward else name


def _attach(module: nn.Module, stand_in: TrainerStandIn) -> None:
    """Let a module, and others of Lightning's inside it, find the Trainer, and log nothing."""
    for each in module.modules():
        if hasattr(each, "training_step") and hasattr(each, "automatic_optimization"):
            own = {"log": _log_nothing, "log_dict": _log_nothing, "optimizers": stand_in.optimizer}
            vars(each).update(own, _trainer=stand_in)


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `self.log`."""


def _train_loader(name: str, stand_in: Any, module: Any, loaders: Any, datamodule: Any) -> Any:
    """Do what `fit` does before it trains; return the loaders of the training data."""
    owners = [each for each in (datamodule, module) if each is not None]
    if datamodule is not None:
        datamodule.trainer = stand_in
    for owner in owners:
        owner.prepare_data()
    for owner in owners:
        owner.setup("fit")
    if hasattr(module, "configure_model"):
        module.configure_model()
    if loaders is not None:
        return loaders
    owner = next((each for each in owners if _overrides(each, "train_dataloader")), None)
    if owner is None:
        raise UsageError(
            f"{name}: {type(module).__name__} came without training data; give a loader or a "
            "datamodule beside it: (trainer, module, loader)"
        )
    return owner.train_dataloader()


def _only_loader(name: str, loaders: Any) -> Any:
    """Return the one loader of what Lightning takes for its loaders."""
    loaders = getattr(loaders, "iterables", loaders)  # of a CombinedLoader
    several = [*loaders.values()] if isinstance(loaders, Mapping) else loaders
    if not isinstance(several, list | tuple) or not several or not hasattr(several[0], "dataset"):
        return loaders
    if len(several) > 1 or isinstance(loaders, Mapping):
        raise UsageError(
            f"{name}: {len(several)} training loaders were given in a {type(loaders).__name__}, "
            "expected one: join them in one DataLoader whose batches hold what the step takes"
        )
    return several[0]


def _only_optimizer(name: str, configured: Any) -> Any:
    """Return the one optimizer of what `configure_optimizers` returned."""
    found = list(_optimizers(configured))
    if len(found) != 1:
        raise UsageError(
            f"{name}: configure_optimizers returned {len(found) or 'no'} optimizers, expected one: "
            f"a step is one loss and one update. {_FACTORY[0].upper()}{_FACTORY[1:]}"
        )
    return found[0]


def _optimizers(configured: Any) -> Iterator[Any]:
    if isinstance(configured, Mapping):
        yield from _optimizers(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        pair = len(configured) == 2 and all(isinstance(each, list | tuple) for each in configured)
        for each in configured[0] if pair else configured:
            yield from _optimizers(each)
    elif configured is not None:
        yield configured


def _overrides(owner: Any, method: str) -> bool:
    """Say whether an object has a method of the user's own."""
    if method in getattr(owner, "__dict__", {}):
        return True
    function = getattr(type(owner), method, None)
    return function is not None and not f"{function.__module__}.".startswith(_PACKAGES)


def _hook(method: str, module: Any, datamodule: Any) -> Any:
    """Return who has a hook that is called for each batch: the datamodule first; None: nobody."""
    return next((each for each in (datamodule, module) if _overrides(each, method)), None)


def _with_hook(batches: Batches, module: Any, datamodule: Any) -> Batches:
    """Let the batches go through `on_before_batch_transfer`, where there is one."""
    owner = _hook("on_before_batch_transfer", module, datamodule)
    if owner is None:
        return batches
    build = batches.build
    return Batches(lambda size: _Changed(build(size), owner), batches.own, batches.fixed)


class _Changed:
    """Batches as a hook changes them on the CPU."""

    def __init__(self, batches: Any, owner: Any) -> None:
        self._batches, self._owner = batches, owner

    def __iter__(self) -> Iterator[Any]:
        return (self._owner.on_before_batch_transfer(batch, 0) for batch in self._batches)


class _Step:
    """A module's training step: a function of the copy that is trained and a batch.

    Lightning passes over a batch without a loss, so steps may answer so when memory is out: where
    the batch is larger than the loader's `own`, that is what having none is taken for.
    """

    def __init__(self, name: str, module: Any, datamodule: Any, own: int | None) -> None:
        self._name, self._own = name, own
        self._takes_index = _takes_index(module.training_step)
        hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
        of_data = {each: _overrides(datamodule, each) for each in hooks}
        self._hooks = {
            each: datamodule if of_data[each] else None
            for each in hooks
            if of_data[each] or _overrides(module, each)
        }

    def __call__(self, model: Any, batch: Any) -> Any:
        module: Any = whole_of(model)
        if not hasattr(module, "training_step"):
            raise UsageError(
                f"{self._name}: a LightningModule is tuned on one device; leave `nproc` out"
            )
        device = next(model.parameters()).device
        if module.device != device:  # the model was moved, and what is around it was not
            module.to(device)
        if isinstance(batch, dict | list):
            batch = batch.copy()  # the module may take items out: batches are trained on again
        if "transfer_batch_to_device" in self._hooks:
            owner = self._hooks["transfer_batch_to_device"] or module
            batch = owner.transfer_batch_to_device(batch, device, 0)
        if "on_after_batch_transfer" in self._hooks:
            owner = self._hooks["on_after_batch_transfer"] or module
            batch = owner.on_after_batch_transfer(batch, 0)
        result = module.training_step(*((batch, 0) if self._takes_index else (batch,)))
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None:
            given = "None" if result is None else f"a dict of {', '.join(map(str, result))}"
            size = _samples(batch)
            if self._own is not None and size is not None and size > self._own:
                raise MemoryError(f"training_step returned {given} for {size} samples")
            raise TaskError(
                f"{self._name}: {type(module).__name__}.training_step returned {given}, expected "
                "the loss, or a dict with 'loss'"
            )
        return loss


def _samples(batch: Any) -> int | None:
    """Return the length of the first tensor in a batch; None where there is none."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch
    found = map(_samples, parts) if isinstance(parts, list | tuple) else ()
    return next((each for each in found if each is not None), None)


def _takes_index(training_step: Any) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(training_step).parameters.values()
    positional = [each for each in given if each.kind in kinds]
    return len(positional) >= 2 or any(each.kind is each.VAR_POSITIONAL for each in given)
