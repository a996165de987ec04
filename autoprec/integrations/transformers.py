"""Hugging Face's Trainer, and TRL's and sentence-transformers', which are subclasses of it.

    trainer = Trainer(model=model, args=arguments, ...)
    precision = autoprec.integrations.transformers.apply(trainer, "model.profile.yaml")
    trainer.train()

The Trainer trains through an Accelerator, so the profile is bound to that. Leave `bf16`, `fp16` and
`torch_compile` out of the arguments: the profile sets precision, batch and accumulation.
"""

from __future__ import annotations

import dis
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from autoprec.backends.shared.worker_process import in_worker
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning
from autoprec.integrations.accelerate import bind_loop, facts_of
from autoprec.integrations.seam import ForeignLoop
from autoprec.integrations.settings import Settings

_SCALED = "loss_is_scaled_for_ga"


def apply(
    trainer: Any,
    profile: str | Path | Profile | Recipe | None,
    *,
    keep_batch: bool = False,
    **settings: Unpack[Settings],
) -> ForeignLoop:
    """Let `trainer` train and evaluate under a profile; call it before `train()`.

    The arguments' batch and accumulation become the profile's, and a warning says where an update
    then holds another number of samples; `keep_batch=True` leaves both as they are. While a script
    is tuned, nothing changes. Raises `UsageError` where the two cannot be together, with the way
    out.
    """
    loop = ForeignLoop("the Trainer", profile, **settings)
    arguments = trainer.args
    loop.choose(str(arguments.device))
    if in_worker():  # the Trainer is tuned as the script made it
        return loop
    loop.require(_facts(trainer))
    given = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    if keep_batch:
        loop.keep_batch(*given)
    else:
        loop.require({"leaves_out_items": _leaves_out_items(trainer)})
    _set_batch(trainer, loop)
    loop.weighs = _adds_up(trainer)
    bind_loop(loop, trainer.accelerator, accumulates=False)
    make = trainer.create_accelerator_and_postprocess

    def make_and_bind() -> None:
        """Bind again what a search of hyperparameters makes anew for every trial."""
        make()
        bind_loop(loop, trainer.accelerator, accumulates=False)

    trainer.create_accelerator_and_postprocess = make_and_bind
    if loop.recipe.memory_format == "channels_last":
        trainer._save = _saving_contiguous(trainer, trainer._save)
    return loop


def _saving_contiguous(trainer: Any, save: Callable[..., Any]) -> Callable[..., Any]:
    """Save weights as every reader expects them: safetensors refuses other layouts."""

    def save_contiguous(output_dir: str | None = None, state_dict: Any = None) -> Any:
        state = trainer.model.state_dict() if state_dict is None else state_dict
        return save(output_dir, {name: value.contiguous() for name, value in state.items()})

    return save_contiguous


def _set_batch(trainer: Any, loop: ForeignLoop) -> None:
    """Give the Trainer the profile's batch, and say where an update holds another number."""
    arguments = trainer.args
    before = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    arguments.per_device_train_batch_size = loop.batch_size
    arguments.gradient_accumulation_steps = loop.accumulation_steps
    trainer._train_batch_size = arguments.train_batch_size
    after = loop.batch_size * loop.accumulation_steps
    if after != before:
        warnings.warn(
            f"an update holds {after} samples on each device, as the profile says, and held "
            f"{before} by the arguments: max_steps, warm-up and the learning rate count updates. "
            "apply(..., keep_batch=True) keeps the arguments' batch",
            AutoprecWarning,
            stacklevel=3,
        )


def _facts(trainer: Any) -> dict[str, Any]:
    """Return what of a Trainer the table of refusals asks for."""
    arguments = trainer.args
    sixteen = [name for name in ("fp16_full_eval", "bf16_full_eval") if getattr(arguments, name)]
    flag = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no"
    return {
        **facts_of(trainer.accelerator, accumulates=False),
        "precision": flag if flag != "no" else trainer.accelerator.mixed_precision,
        "data_parallel": arguments.n_gpu > 1,
        "finds_batch": "auto_find_batch_size" if arguments.auto_find_batch_size else "",
        "deepspeed": bool(arguments.deepspeed),
        "sixteen_bit_evaluation": " and ".join(sixteen),
        "compiles": "torch_compile=True" if arguments.torch_compile else "",
        "deterministic": arguments.full_determinism,
    }


def _adds_up(trainer: Any) -> bool:
    """Say whether the Trainer adds up the losses of micro-batches, where others average."""
    said: bool | None = getattr(trainer, _SCALED, None)
    counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return counted if said is None else said


def _leaves_out_items(trainer: Any) -> str:
    """Name what computes the loss and never reads the number of the update's tokens.

    The Trainer adds up such losses. Empty where the code does not tell, or it does not matter.
    """
    if getattr(trainer, _SCALED, None) is not None or not _adds_up(trainer):
        return ""
    computes = trainer.compute_loss_func or trainer.compute_loss
    if computes.__module__.startswith("transformers."):
        if trainer.label_smoother is not None:
            return ""
        computes = trainer.model.forward
    if _reads(computes, "num_items_in_batch"):
        return ""
    return getattr(inspect.unwrap(computes), "__qualname__", type(computes).__name__)


def _reads(function: Callable[..., Any], argument: str) -> bool:
    """Return whether a function's code reads an argument, or other keywords; True if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    given = inspect.signature(function).parameters.values()
    wanted = {argument, *(each.name for each in given if each.kind is each.VAR_KEYWORD)}
    found = (each.argval for each in dis.get_instructions(code))
    return any(wanted.intersection(v if isinstance(v, tuple) else (v,)) for v in found)
