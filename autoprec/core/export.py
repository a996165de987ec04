"""A recipe as settings of tools that a profile cannot be attached to, and what is left out.

Only the policy, the batch and a few switches have a setting elsewhere. Islands, padding, layout and
the loss scale's rule have none: what was proven and timed is the whole recipe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe

Settings = Mapping[str, Any]

_FLAGS = {Policy.MIXED_BFLOAT16: "bf16", Policy.MIXED_FLOAT16: "fp16"}
_TF32_ENVIRONMENT = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


def export(recipe: Recipe, target: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of a settings file for `target`, a key of `TARGETS`, and what is left out."""
    settings, left = settings_of(recipe, target)
    return _text(settings, target), tuple(f"{name} ({what})" for name, what in left.items())


def settings_of(recipe: Recipe, target: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings for `target`, and by name what of the recipe has none there."""
    settings, carried = TARGETS[target](recipe)
    left = {
        "float32_modules": ", ".join(recipe.float32_modules),
        "alignment": ", ".join(recipe.alignment.modules),
        "memory_format": "channels_last" if recipe.memory_format == "channels_last" else "",
        "loss_scale": "its rule" if recipe.applied_loss_scale else "",
        "compile": "torch.compile" if recipe.compile else "",
        "tf32": "TF32 products" if recipe.policy is Policy.TF32 else "",
        "batch_size": str(recipe.batch_size),
        "accumulation_steps": str(recipe.accumulation_steps),
        **{name: str(value) for name, value in recipe.knobs.items()},
    }
    return dict(settings), {k: v for k, v in left.items() if v and k not in carried}


def _text(settings: Settings, target: str) -> str:
    if target == "env":
        return "".join(f"{name}={value}\n" for name, value in settings.items())
    return json.dumps(settings, indent=2) + "\n"


def _accelerate(recipe: Recipe) -> tuple[Settings, set[str]]:
    """For `accelerate launch --config_file`; JSON is YAML."""
    flag = _FLAGS.get(recipe.policy, "no")
    return {"compute_environment": "LOCAL_MACHINE", "mixed_precision": flag}, set()


def _deepspeed(recipe: Recipe) -> tuple[Settings, set[str]]:
    """For `deepspeed.initialize(config=...)`: autocast, which leaves the weights in float32.

    Gradients stay as they are: left out, DeepSpeed 0.19 clips them to a norm of 1.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.batch_size,
        "gradient_accumulation_steps": recipe.accumulation_steps,
        "gradient_clipping": 0.0,
    }
    if recipe.policy.mixed:
        settings["torch_autocast"] = {"enabled": True, "dtype": str(recipe.policy.compute_dtype)}
    return settings, {"batch_size", "accumulation_steps"}


def _transformers(recipe: Recipe) -> tuple[Settings, set[str]]:
    """For TrainingArguments, as `HfArgumentParser.parse_json_file` reads them."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.accumulation_steps,
        "bf16": recipe.policy is Policy.MIXED_BFLOAT16,
        "fp16": recipe.policy is Policy.MIXED_FLOAT16,
        "tf32": recipe.policy is Policy.TF32,  # without it torch_compile would switch it on
        "torch_compile": recipe.compile,
    }
    if recipe.knobs.get("fused_optimizer"):
        settings["optim"] = "adamw_torch_fused"
    return settings, {"batch_size", "accumulation_steps", "compile", "tf32", "fused_optimizer"}


def _environment(recipe: Recipe) -> tuple[Settings, set[str]]:
    """For a shell: what accelerate and torch read."""
    settings: dict[str, Any] = {
        "ACCELERATE_MIXED_PRECISION": _FLAGS.get(recipe.policy, "no"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": recipe.accumulation_steps,
    }
    if recipe.policy is Policy.TF32:
        settings[_TF32_ENVIRONMENT] = 1
    if "threads" in recipe.knobs:
        settings["OMP_NUM_THREADS"] = recipe.knobs["threads"]
    return settings, {"accumulation_steps", "tf32", "threads"}


TARGETS: Mapping[str, Callable[[Recipe], tuple[Settings, set[str]]]] = {
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "transformers": _transformers,
    "env": _environment,
}
