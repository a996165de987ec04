"""How a torch task is run, wherever it is run: seeding, data, optimizer, loss.

Timing sessions and numerical traces share these mechanics, so that both train exactly what the
user trains. Nothing here measures, decides or catches the user's own exceptions; what the task
file got wrong is a `TaskError` that names the function and the fix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.shared.raising_modules import note_modules
from autoprec.backends.shared.seeded_batches import draw_batches
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.apply.nested_tensors import (
    copy_deeply,
    items_in,
    tensors_in,
    with_items,
)
from autoprec.backends.torch.apply.stepping_model import stepping
from autoprec.backends.torch.train.checkpoint_loading import load_weights
from autoprec.backends.torch.train.own_loader_workers import OwnLoaderWorkers, keeps_workers
from autoprec.backends.torch.train.rng import TorchGenerators, seed_everything
from autoprec.errors import TaskError

__all__ = [
    "Autocasting",
    "batches",
    "build_model",
    "build_optimizer",
    "compute_loss",
    "materialize",
    "move",
    "needs_closure",
    "seed_everything",
    "weighed",
]

DEFAULT_LEARNING_RATE = 1e-3


class Autocasting(Protocol):
    """What `compute_loss` needs of a Precision object."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context the forward pass runs in."""


def move(value: Any, device: str | torch.device) -> Any:
    """Return `value` with every tensor in it on `device`.

    Objects whose class has a method `to` (packed sequences, tokenizer batches, graphs) move
    themselves; mappings, lists, tuples, named tuples and dataclasses are rebuilt; everything else
    passes through. `TaskError` for a container that holds itself.
    """
    return _move(value, device, ())


def _move(value: Any, device: str | torch.device, outside: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        # What is copied to the CPU is read there at once; only the device waits for its own copies.
        return value.to(device, non_blocking=torch.device(device).type != "cpu")
    if isinstance(value, str | bytes | int | float | type | None):
        return value
    if callable(getattr(type(value), "to", None)):  # a dict with attributes has every attribute
        return value.to(device)
    known = isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value)
    if not known:
        return value
    if id(value) in outside:
        raise TaskError(
            f"build_data yielded a batch with {_kind(value)} that holds itself, which cannot be "
            "put on a device item by item; give its class a method to(device)"
        )
    outside = (*outside, id(value))
    return with_items(value, {k: _move(item, device, outside) for k, item in items_in(value)})


def build_model(task: Task, device: str | torch.device, seed: int) -> nn.Module:
    """Build the user's model with all RNGs seeded, on `device`, in training mode.

    A model in training mode keeps the modes of its modules (BatchNorm that was frozen by `eval()`);
    one that is in evaluation mode as a whole, as `from_pretrained` leaves it, is set to train. It
    begins with the weights of the task's checkpoint, where there is one.
    """
    seed_everything(seed)
    model = _checked(task, task.build_model())
    if task.checkpoint is not None:
        load_weights(model, task.checkpoint)
    model = model.to(device)
    if isinstance(task.loss_fn, nn.Module):  # the weights of its classes, made at import
        task.loss_fn.to(device)
    return model if model.training else model.train()


def _checked(task: Task, model: Any) -> nn.Module:
    given = f"{task.name}: build_model returned {_kind(model)}"
    if not isinstance(model, nn.Module):
        raise TaskError(f"{given}, expected a torch.nn.Module; return the model from build_model")
    if isinstance(model, nn.parallel.DistributedDataParallel) and task.place is not None:
        raise TaskError(
            f"{given}, expected the module inside: every rank is wrapped as the recipe says, in "
            "DistributedDataParallel or by fully_shard; return the model without it"
        )
    if isinstance(model, nn.DataParallel):
        raise TaskError(
            f"{given}, expected the module inside: autoprec tunes one device, and replicas would "
            "go on calling the first one's weights; return the model without nn.DataParallel"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TaskError(
            f"{given}, expected an ordinary torch.nn.Module: what TorchScript compiled cannot be "
            "given another precision module by module; return the model before torch.jit.script "
            "or torch.jit.trace"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise TaskError(
            f"{given} with parameters on the meta device, which hold no numbers; initialise them "
            'in build_model, on the CPU: model.to_empty(device="cpu"), then the initialisation'
        )
    return model


@contextlib.contextmanager
def training_modes_preserved(model: nn.Module) -> Iterator[None]:
    """Put every module back into the mode, training or evaluation, that it was in."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def build_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Build the user's optimizer for `model`, AdamW(lr=1e-3) where the task has none."""
    if task.build_optimizer is None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise TaskError(
                f"{task.name}: build_model returned a model without trainable parameters; "
                "there is nothing to train"
            )
        return torch.optim.AdamW(trainable, lr=DEFAULT_LEARNING_RATE)
    optimizer = task.build_optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"{task.name}: build_optimizer returned {_kind(optimizer)}, expected a "
            "torch.optim.Optimizer; return one optimizer made from model.parameters()"
        )
    if needs_closure(optimizer):
        raise TaskError(
            f"{task.name}: build_optimizer returned {_kind(optimizer)}, whose step() needs a "
            "closure, expected one that steps by the gradients there are (AdamW, SGD, ...): a "
            "closure runs the forward pass several times a step, which loss scaling cannot follow"
        )
    return optimizer


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer's step() cannot be called without a closure, as LBFGS's."""
    try:  # of the class: a learning rate's scheduler puts a function on the optimizer
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # a function of C has no signature to look at
        return False
    return False


def batches(
    task: Task, batch_size: int, seed: int, *, repeat: bool = False
) -> Generator[Any, None, None]:
    """Return the user's batches, on the CPU or wherever `build_data` puts them.

    All RNGs are seeded before `build_data`, and data are drawn from an RNG stream of their own:
    what training consumes (dropout) does not change what the next batch is. With `repeat` the data
    start again at their end (an exhausted generator is built again). A DataLoader's worker
    processes end with the stream, also those that it would keep itself (`persistent_workers`); the
    loader stays usable. Of several ranks each yields its own share. Raises `TaskError` where there
    is nothing to train on.
    """
    drawn = draw_batches(
        task,
        batch_size,
        generators=TorchGenerators(),
        seed=partial(seed_everything, seed),
        iterate=partial(_iterate, task, OwnLoaderWorkers()),
        check=lambda batch, _: _check_batch(task, batch),
        size_in_bytes=_size_in_bytes,
        repeat=repeat,
        hint="Is the data set smaller than the batch, with drop_last=True?",
    )
    if task.place is None:
        return drawn
    from autoprec.backends.torch.train.data_shares import own_batches

    return own_batches(task, task.place, drawn)


def weighed(task: Task, micro_batches: Sequence[Any]) -> Sequence[Any]:
    """Return the micro-batches of one update as the task's step takes them; see `Task.weigh`."""
    return micro_batches if task.weigh is None else task.weigh(micro_batches)


def _iterate(task: Task, workers: OwnLoaderWorkers, data: Any) -> Iterator[Any]:
    if data is None or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise TaskError(
            f"{task.name}: build_data returned {_kind(data)}, expected an iterable of batches: "
            "a DataLoader, a generator or a list of (inputs, targets)"
        )
    return workers.go_through(data) if keeps_workers(data) else iter(data)


def _size_in_bytes(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))


def _check_batch(task: Task, batch: Any) -> None:
    if task.training_step is not None:
        return
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        size = f" of {len(batch)} items" if isinstance(batch, list | tuple) else ""
        raise TaskError(
            f"{task.name}: build_data yielded {_kind(batch)}{size}, expected (inputs, targets); "
            "for any other form define training_step(model, batch) -> loss instead of loss_fn"
        )


def materialize(task: Task, model: nn.Module, batch: Any, seed: int) -> None:
    """Run one forward pass without gradients if `model` has lazy parameters still to be made."""
    lazy = any(nn.parameter.is_lazy(p) for p in (*model.parameters(), *model.buffers()))
    if lazy:
        seed_everything(seed)
        with torch.no_grad():
            compute_loss(task, model, copy_deeply(batch), None)


def compute_loss(
    task: Task, model: nn.Module, batch: Any, precision: Autocasting | None
) -> torch.Tensor:
    """Return the loss of one batch as a float32 scalar, computed as the user's loop would.

    The model runs under autocast, `loss_fn` outside it, on outputs that the surgeon casts up;
    `training_step` holds both and runs under autocast as a whole. The batch must be on the model's
    device. A loss that is not finite is returned as it is; one that is not a scalar, or that no
    gradient can flow from, is a `TaskError`. An exception is raised on with a note of the modules
    that it was raised in.
    """
    given = copy_deeply(batch) if task.copies_batches else batch
    try:
        return _compute_loss(task, model, given, precision)
    except Exception as error:
        note_modules(error, {id(module): path for path, module in unwrap(model).named_modules()})
        raise


def _compute_loss(
    task: Task, model: nn.Module, batch: Any, precision: Autocasting | None
) -> torch.Tensor:
    cast = contextlib.nullcontext() if precision is None else precision.autocast()
    if task.training_step is not None:
        with cast, stepping(model):
            loss = task.training_step(model, batch)
        return _scalar(task, "training_step", loss)
    if task.loss_fn is None:
        raise TaskError(
            f"{task.name}: neither loss_fn(outputs, targets) nor training_step(model, batch) "
            "is defined; define one of them"
        )
    inputs, targets = batch
    with cast:
        outputs = model(inputs)
    return _scalar(task, "loss_fn", task.loss_fn(outputs, targets))


def _scalar(task: Task, name: str, loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"{task.name}: {name} returned {_kind(loss)}, expected a scalar tensor")
    if loss.numel() != 1:
        raise TaskError(
            f"{task.name}: {name} returned a tensor of shape {tuple(loss.shape)}, expected a "
            "scalar; average it with .mean()"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TaskError(
            f"{task.name}: {name} returned a loss without a gradient, expected one that depends "
            "on the model's parameters; is it detached, or made with .item()?"
        )
    return loss.float().reshape(())


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
