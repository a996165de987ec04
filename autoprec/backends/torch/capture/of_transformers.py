"""A task of a Hugging Face Trainer, or of one of TRL's and others that are subclasses of it.

The loss is that of `compute_loss`, the optimizer that of `create_optimizer`, the loader that of
`get_train_dataloader` at the batch that is asked for. A language model's loss is a mean over the
tokens of an update: micro-batches are given their number (`num_items_in_batch`) as the Trainer does
it. Where a loss makes nothing of that, or a model does not take it, a mean over the tokens of each
micro-batch remains, and the description of the task finds that its batch cannot be split. Nothing
of transformers is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from autoprec.backends.protocol import Task
from autoprec.backends.shared import worker_process
from autoprec.backends.torch.capture.master_copy import MasterCopy
from autoprec.backends.torch.capture.parts import task_of_parts
from autoprec.backends.torch.capture.rebatch import Batches, rebatch
from autoprec.errors import UsageError

_PACKAGES = ("transformers.", "trl.")
_GENERATING = (
    *("GRPO", "PPO", "RLOO", "OnlineDPO", "XPO", "NashMD", "GKD"),
    *("MiniLLM", "DistillationTrainer"),
)
_UPDATE = "num_items_in_batch"
"""Under what a micro-batch holds its update's number of labels and of micro-batches."""

_FACTORY = "return (model, optimizer, loader, step) from a function, `autoprec tune FILE.py:NAME`"


def from_transformers(trainer: Any, *, name: str) -> Task:
    """Make a task of what `trainer.train()` would train.

    Raises `UsageError` for what cannot be tuned as it is, with the way out.
    """
    _refuse(name, trainer)
    own = copy.copy(trainer)
    own.accelerator = _Unprepared(trainer.accelerator)
    model = own.model
    arguments = own.args
    if arguments.gradient_checkpointing and not getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=arguments.gradient_checkpointing_kwargs
        )
    if own.optimizer is None:
        own.create_optimizer()
    master = MasterCopy(name, model, own.optimizer)
    step = _Step(own, master.model)
    own.optimizer = own.lr_scheduler = None
    return task_of_parts(
        name,
        master,
        _batches(name, own),
        step,
        accumulation=arguments.gradient_accumulation_steps,
        clip_grad_norm=arguments.max_grad_norm,
        weigh=step.weigh,
    )


def _refuse(name: str, trainer: Any) -> None:
    def refuse(what: str, instead: str) -> None:
        raise UsageError(f"{name}: {what}. {instead[0].upper()}{instead[1:]}")

    arguments, kind = trainer.args, type(trainer)
    if any(each.__name__.startswith(_GENERATING) for each in kind.__mro__):
        refuse(
            f"{kind.__name__} generates what it trains on, which takes most of its time and no "
            "step that is tuned has",
            "tune the model on texts, such as with SFTTrainer, and apply that profile",
        )
    if trainer.model is None:
        refuse("the Trainer has no model", "give it `model` or `model_init`")
    if arguments.deepspeed or getattr(arguments, "fsdp", None):
        which = "deepspeed" if arguments.deepspeed else "fsdp"
        refuse(
            f"the arguments' {which} shards and casts the model itself",
            "leave it out while tuning on one device, or tune with nproc=N on several",
        )
    if arguments.n_gpu > 1:
        refuse(
            f"the Trainer sees {arguments.n_gpu} GPUs, and would use nn.DataParallel",
            "let it see one: CUDA_VISIBLE_DEVICES=0",
        )
    if not _is_theirs(kind.training_step):
        refuse(
            f"{kind.__name__} has a training_step of its own, which goes backward itself",
            f"compute the loss in compute_loss, or {_FACTORY}",
        )
    if getattr(trainer, "neftune_noise_alpha", None) is not None:
        worker_process.note("neftune_noise_alpha adds noise that no step of the tuning has")


def _is_theirs(function: Any) -> bool:
    """Say whether a method is one of transformers' or TRL's."""
    return f"{function.__module__}.".startswith(_PACKAGES)


class _Unprepared:
    """A Trainer's Accelerator that prepares nothing: loaders stay on the CPU, without a shard."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def prepare(self, *given: Any, **_: Any) -> Any:
        """Return what was given."""
        return given[0] if len(given) == 1 else given

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_accelerator"], name)


def _batches(name: str, trainer: Any) -> Batches:
    """Return the Trainer's own loader at any batch; one that it is given is rebatched."""
    if not _is_theirs(type(trainer).get_train_dataloader):
        return rebatch(trainer.get_train_dataloader(), name)

    def build(batch_size: int) -> Any:
        trainer._train_batch_size = batch_size
        return trainer.get_train_dataloader()

    return Batches(build, trainer.args.per_device_train_batch_size)


class _Step:
    """A Trainer's loss: a function of the copy that is trained and a batch."""

    def __init__(self, trainer: Any, model: Any) -> None:
        self._trainer, self._model = trainer, model

    def __call__(self, model: Any, batch: Any) -> Any:
        inputs = {**batch} if isinstance(batch, Mapping) else batch  # labels are taken out of it
        known = inputs.pop(_UPDATE, None) if isinstance(batch, Mapping) else None
        items, micro_batches = known or (self._items([batch]), 1)
        self._trainer.model = model
        try:
            loss = self._trainer.compute_loss(model, inputs, num_items_in_batch=items)
        finally:
            self._trainer.model = self._model  # no session's model is kept
        return loss * micro_batches if self._adds_up(items) else loss

    def weigh(self, micro_batches: Sequence[Any]) -> Sequence[Any]:
        """Put what the update's loss is normalised by into each of its micro-batches."""
        if not all(isinstance(batch, Mapping) for batch in micro_batches):
            return micro_batches
        known = self._items(micro_batches), len(micro_batches)
        return [{**batch, _UPDATE: known} for batch in micro_batches]

    def _items(self, micro_batches: Sequence[Any]) -> Any:
        """Count the update's labels as the Trainer does; None where nothing asks for them."""
        return self._trainer._get_num_items_in_batch(micro_batches, self._trainer.args.device)

    def _adds_up(self, items: Any) -> bool:
        """Say whether the Trainer adds up the losses of micro-batches, where others average."""
        trainer = self._trainer
        said: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
        takes = trainer.model_accepts_loss_kwargs and items is not None
        return takes or trainer.compute_loss_func is not None if said is None else said
