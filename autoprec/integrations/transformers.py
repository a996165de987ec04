"""Hugging Face's Trainer, and TRL's and sentence-transformers', which are subclasses of it.

    trainer = Trainer(model=model, args=arguments, ...)
    precision = autoprec.integrations.transformers.apply(trainer, "model.profile.yaml")
    trainer.train()

The Trainer trains through an Accelerator, so the profile is bound to that. Leave `bf16`, `fp16` and
`torch_compile` out of the arguments: the profile sets precision, batch and accumulation.
"""

from __future__ import annotations

import math
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
from autoprec.integrations.summed_losses import adds_up, leaves_out_items

_SEARCH = "a search of hyperparameters, without apply(..., keep_batch=True),"


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
    if keep_batch:
        loop.keep_batch(*_batch(trainer))
    else:
        loop.require({"leaves_out_items": leaves_out_items(trainer)})
    _set_batch(trainer, loop)
    loop.weighs = adds_up(trainer)
    bind_loop(loop, trainer.accelerator, accumulates=False)
    make = trainer.create_accelerator_and_postprocess

    def make_and_bind() -> None:
        """Begin anew with what a search of hyperparameters makes for every trial."""
        make()
        loop.forget()
        if keep_batch:
            loop.keep_batch(*_batch(trainer))
        searched = _batch(trainer) != (loop.batch_size, loop.accumulation_steps)
        loop.require(_facts(trainer) | ({"finds_batch": _SEARCH} if searched else {}))
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


def _batch(trainer: Any) -> tuple[int, int]:
    """Return the samples of a micro-batch, and the micro-batches of an update, by the arguments."""
    return trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps


def _set_batch(trainer: Any, loop: ForeignLoop) -> None:
    """Give the Trainer the profile's batch, and say where an update holds another number."""
    arguments = trainer.args
    before = math.prod(_batch(trainer))
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
