"""What a trainer and a profile cannot do together, in one table: each row with its way out.

Facts are plain values that the trainers' own files look up; a fact that is absent is false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """A combination that cannot be: when it is there, what it is, and the way out."""

    when: Callable[[Recipe, Facts], Any]
    what: str
    instead: str


def _fact(name: str) -> Callable[[Recipe, Facts], Any]:
    return lambda recipe, facts: facts.get(name)


def _accumulating(name: str) -> Callable[[Recipe, Facts], Any]:
    return lambda recipe, facts: recipe.accumulation_steps > 1 and facts.get(name)


FLAGS = {"bf16": Policy.MIXED_BFLOAT16, "fp16": Policy.MIXED_FLOAT16}
"""What accelerate's `mixed_precision`, and the Trainer's arguments, mean as policies."""


def _other_precision(recipe: Recipe, facts: Facts) -> bool:
    flag = facts.get("precision") or "no"
    return flag != "no" and FLAGS.get(str(flag)) is not recipe.policy


REFUSALS = (
    Refusal(
        _other_precision,
        "the trainer is told {precision} and the profile's policy is {policy}",
        "leave mixed_precision, bf16, fp16 and --amp out (TRL: bf16=False): the profile sets that",
    ),
    Refusal(
        lambda recipe, facts: facts.get("accumulates", 1) not in (1, recipe.accumulation_steps),
        "the trainer accumulates {accumulates} micro-batches and the profile {steps}",
        "leave the trainer's own setting out: the profile's is used",
    ),
    Refusal(
        _fact("fsdp1"),
        "the model is under FullyShardedDataParallel (FSDP1), which has a precision of its own",
        "use fully_shard: Lightning's ModelParallelStrategy, accelerate's fsdp_version=2",
    ),
    Refusal(
        _fact("deepspeed"),
        "DeepSpeed casts parameters and scales losses itself, and switches other autocasts off",
        "write its settings with `autoprec export PROFILE --to deepspeed`, or train without it",
    ),
    Refusal(
        _fact("own_precision"),
        "{own_precision} has a precision of its own",
        "train with one device, DDP or FSDP2",
    ),
    Refusal(
        _fact("data_parallel"),
        "the model is under torch.nn.DataParallel, whose replicas call the first device's weights",
        "use one device (CUDA_VISIBLE_DEVICES=0), or torchrun for DistributedDataParallel",
    ),
    Refusal(
        _fact("finds_batch"),
        "{finds_batch} changes the batch, and the profile was checked with its own",
        "leave that out: the tuning has found the batch",
    ),
    Refusal(
        _accumulating("accumulation_schedule"),
        "GradientAccumulationScheduler changes how often gradients accumulate",
        "take the callback out: the profile accumulates {steps} micro-batches",
    ),
    Refusal(
        _accumulating("manual"),
        "manual optimization steps as its own code says, and the profile accumulates {steps} "
        "micro-batches",
        "use automatic optimization, or tune with a batch that need not be split",
    ),
    Refusal(
        _accumulating("leaves_out_items"),
        "{leaves_out_items} makes nothing of num_items_in_batch, so the Trainer would add up the "
        "losses of {steps} micro-batches where it should take their mean",
        "set loss_is_scaled_for_ga = False on the trainer, divide by num_items_in_batch, or keep "
        "the arguments' batch: apply(..., keep_batch=True)",
    ),
    Refusal(
        _accumulating("fsdp2"),
        "FSDP2 keeps unreduced gradients where they cannot be made the mean of a partial update",
        "tune with a batch that need not be split",
    ),
    Refusal(
        _fact("closures"),
        "{closures} calls the training step several times in one update",
        "use an optimizer that steps once, such as AdamW or SGD",
    ),
    Refusal(
        _fact("regional_compile"),
        "regional compilation copies modules and leaves the profile's changes behind",
        "switch use_regional_compilation off; the profile compiles the model if that pays",
    ),
    Refusal(
        lambda recipe, facts: recipe.compile and facts.get("compiles"),
        "the profile compiles the model, and {compiles} does as well",
        "take that out: the profile compiles",
    ),
    Refusal(
        _fact("prepared"),
        "the trainer has prepared its {prepared} already, without the profile",
        "attach the profile right after the trainer is made, before prepare() or train()",
    ),
    Refusal(
        _fact("sixteen_bit_evaluation"),
        "{sixteen_bit_evaluation} casts the weights to 16 bits for evaluation",
        "leave it out: evaluation runs under the profile's precision",
    ),
    Refusal(
        lambda recipe, facts: facts.get("deterministic") and recipe.knobs.get("cudnn_benchmark"),
        "full_determinism is asked for, and the profile lets cuDNN choose by timing",
        "take cudnn_benchmark out of the profile, or full_determinism out of the arguments",
    ),
    Refusal(
        _fact("device_map"),
        "the model's layers are placed on several devices (device_map)",
        "load it without device_map, so that it is on one device",
    ),
)


def refuse(trainer: str, recipe: Recipe, facts: Facts) -> None:
    """Raise `UsageError` for the first row of the table that holds."""
    for row in REFUSALS:
        if row.when(recipe, facts):
            words = {"policy": recipe.policy, "steps": recipe.accumulation_steps, **facts}
            raise UsageError(
                f"{trainer} with this profile: {row.what.format(**words)}. "
                f"{row.instead.format(**words)}"
            )
