"""Applies a profile to the user's own model: finds the framework, the device and the recipe."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from autoprec.backends.shared.worker_process import in_worker, note
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.core.watch_settings import EVERY, Action, check_settings
from autoprec.errors import AutoprecError, AutoprecWarning, UsageError
from autoprec.profiles import load_profile
from autoprec.recipe_for_device import recipe_for

if TYPE_CHECKING:
    from autoprec.backends.keras.apply.precision import Precision as KerasPrecision
    from autoprec.backends.protocol import Backend, Precision
    from autoprec.backends.torch.apply.precision import Precision as TorchPrecision

#: Instead of a profile, or in this environment variable: apply nothing.
OFF = "off"
SWITCH = "AUTOPREC"


class KerasModel(Protocol):
    """Distinguishes a Keras model from a PyTorch one for type checkers, importing neither."""

    @property
    def trainable_variables(self) -> list[Any]:
        """Return the weights that are trained."""


@overload
def apply_profile(
    profile: str | Path | Profile | Recipe | None,
    *,
    model: KerasModel | None = None,
    optimizer: Any = None,
    device: str | None = None,
    strict: bool = False,
    fallback: Literal["measured", "rules"] = "measured",
    watch: Action | Literal[False] = "warn",
    watch_every: int = EVERY,
) -> KerasPrecision: ...


@overload
def apply_profile(
    profile: str | Path | Profile | Recipe | None,
    *,
    model: Callable[..., Any],
    optimizer: Any = None,
    device: str | None = None,
    strict: bool = False,
    fallback: Literal["measured", "rules"] = "measured",
    watch: Action | Literal[False] = "warn",
    watch_every: int = EVERY,
) -> TorchPrecision: ...


def apply_profile(
    profile: str | Path | Profile | Recipe | None,
    *,
    model: Any = None,
    optimizer: Any = None,
    device: str | None = None,
    strict: bool = False,
    fallback: Literal["measured", "rules"] = "measured",
    watch: Action | Literal[False] = "warn",
    watch_every: int = EVERY,
) -> Precision:
    """Apply a profile to a model and its optimizers; return the framework's Precision object.

    `profile` is a profile file, a folder of them (the one that fits this device is taken), a
    Profile, or a Recipe. `optimizer` may be one optimizer or several. Without a model the global
    Keras policy is set, for models built afterwards. If no profile fits the device, an
    `AutoprecWarning` says so and training is in float32, unless an earlier `autoprec probe
    --measure` or `autoprec tune` of this device, or the catalogue's measurement of one of its
    family, found a policy's matrix products faster. With `fallback="rules"` the hardware's rules
    choose, as `autoprec probe` shows them; `strict=True` raises `ProfileMismatch`. Parameters,
    their names and their checkpoints stay as they are. What is done to the model, its optimizers
    and the process is undone by the result's `restore()`, or at the end of a `with` block (kept
    memory, and threads that TensorFlow was given, are not).

    Under a 16-bit policy the training is checked while it goes on: at updates 1, 50, 100, 200,
    400 and so on, at most `watch_every` apart, one micro-batch is computed once more in float32.
    If two checks in a row are not what float32 computes, or one beyond all that noise does,
    `watch="warn"` names the modules, "float32" keeps them so from the next update on, and "raise"
    raises `AutoprecError`;
    False checks nothing. The checks are in the result's `watched`.

    "off" or None changes nothing: the result is that of a float32 recipe, its batch 32. With
    AUTOPREC=off in the environment every profile does so, at its own batch, so that a script runs
    as it would without autoprec and is not edited for it. While a task is tuned or verified it
    changes nothing either: a task may import the script that applies its profile.
    """
    from autoprec.backends.protocol import WatchingSurgeon

    action = check_settings(watch, watch_every)
    if in_worker():
        note("apply_profile in the task's own code changes nothing while the task is measured")
    named = Recipe() if profile is None or profile == OFF else profile
    backend = _backend_for(named, model)
    address = _address(device, model, backend)
    optimizers = _as_sequence(optimizer)
    surgeon = backend.surgeon()
    made = choose_recipe(profile, address, backend, strict=strict, fallback=fallback)
    if not made.applies:
        return surgeon.leave_unchanged(
            made.recipe,
            model=model,
            optimizers=optimizers,
            device=address,
            undo=not in_worker(),
        )
    precision = surgeon.apply(
        made.recipe, model=model, optimizers=optimizers, device=address, facts=made.facts
    )
    if action and made.recipe.policy.mixed and isinstance(surgeon, WatchingSurgeon):
        surgeon.watch(precision, model=model, device=address, action=action, every=watch_every)
    return precision


@dataclass(frozen=True)
class ChosenRecipe:
    """What a profile gives on a device: a recipe, and the device's facts if they were needed.

    If it does not apply (AUTOPREC=off, "off" or None, or while a task is measured), the recipe
    is float32's at the profile's batch.
    """

    recipe: Recipe
    facts: DeviceFacts | None = None
    applies: bool = True


def choose_recipe(
    profile: str | Path | Profile | Recipe | None,
    address: str,
    backend: Backend,
    *,
    strict: bool = False,
    fallback: Literal["measured", "rules"] = "measured",
) -> ChosenRecipe:
    """Return what `apply_profile` would apply on the device at `address`; it needs no model."""
    if fallback not in ("measured", "rules"):
        raise UsageError(f"fallback={fallback!r} given, expected 'measured' or 'rules'")
    off = in_worker() or _is_switched_off()
    if profile is None or profile == OFF:
        profile, off = Recipe(), True
    if off:
        recipe = _recipe_meanwhile(profile, address, backend).plain()
        if in_worker():  # which tunes the batch of an update, and splits that itself
            recipe = replace(recipe, batch_size=recipe.effective_batch, accumulation_steps=1)
        return ChosenRecipe(recipe, applies=False)
    if isinstance(profile, Recipe):
        return ChosenRecipe(profile)
    recipe, facts = recipe_for(profile, address, backend, strict=strict, fallback=fallback)
    return ChosenRecipe(recipe, facts)


def distribute(
    profile: str | Path | Profile | Recipe, model: Any, *, device: str | None = None
) -> Any:
    """Share a PyTorch model over the ranks as its tuning did; return the model to train with.

    By `recipe.distributed` that is DistributedDataParallel around it, or FSDP2's `fully_shard` of
    its islands, blocks and the rest, in place, with the profile's dtypes; without that section, DDP
    as torch has it. Call it on every rank, after `torch.distributed.init_process_group` and before
    the optimizer is made, then `apply_profile` with what it returns. Every rank starts with rank
    0's weights. `profile` and `device` are as for `apply_profile`. AUTOPREC=off wraps in DDP.
    Raises `UsageError` without a process group.
    """
    from autoprec.backends.protocol import RankSurgeon

    if in_worker():  # what is measured is shared by the tuning
        return model
    backend = _backend_for(profile, model)
    surgeon = backend.surgeon()
    if not isinstance(surgeon, RankSurgeon):
        raise UsageError(
            f"model: one of {backend.capabilities.title} given, expected one of PyTorch; build "
            "others under their own strategy (tf.distribute)"
        )
    address = _address(device, model, backend)
    recipe = Recipe() if _is_switched_off() else _unfitted_recipe(profile, address, backend)
    return surgeon.distribute(recipe, model=model, device=address)


def _recipe_meanwhile(
    profile: str | Path | Profile | Recipe, address: str, backend: Backend
) -> Recipe:
    """Return a profile's recipe, which is not applied; a worker needs no profile to be there."""
    if not in_worker():
        return _unfitted_recipe(profile, address, backend)
    try:
        if isinstance(profile, str | Path) and not Path(profile).is_dir():
            profile = load_profile(profile)
        if isinstance(profile, Profile):  # it need not fit this device
            profile = profile.recipe
        return _unfitted_recipe(profile, address, backend)
    except AutoprecError as error:
        recipe = Recipe()
        note(f"the task's own apply_profile gives batch {recipe.batch_size} meanwhile: {error}")
        return recipe


def _backend_for(profile: str | Path | Profile | Recipe, model: Any) -> Backend:
    """Load the backend of the model's framework, or the one that applies without a model."""
    from autoprec.backends import registry

    if model is not None:
        return registry.load(registry.owner(model, "model= was given"))
    return registry.load(_framework_without_model(profile))


def _address(device: str | None, model: Any, backend: Backend) -> str:
    """Return the device named; the model's own if only its kind, or no device, is named."""
    if device is not None and (model is None or ":" in device):
        return device
    own = backend.device_of(model)
    return own if device in (None, own.partition(":")[0]) else str(device)


def _is_switched_off() -> bool:
    """Return whether the environment switches profiles off."""
    said = os.environ.get(SWITCH, "").strip().lower()
    if said not in ("", "on", OFF):
        raise UsageError(f"{SWITCH}={said!r} is set, expected off, or on as if it were not set")
    return said == OFF


def _unfitted_recipe(
    profile: str | Path | Profile | Recipe, address: str, backend: Backend
) -> Recipe:
    """Return the recipe that would be applied, without warnings: its policy is not applied."""
    if isinstance(profile, Recipe):
        return profile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        recipe, _ = recipe_for(profile, address, backend)
    return recipe


def _framework_without_model(profile: str | Path | Profile | Recipe | None) -> str:
    """Return the framework whose policy is set before a model is built, or raise `UsageError`."""
    from autoprec.backends import registry

    if isinstance(profile, str | Path) and Path(profile).is_file():
        profile = load_profile(profile)
    known = registry.built_in()
    default = next(name for name, each in known.items() if each.applies_without_model)
    framework = profile.task.framework if isinstance(profile, Profile) else default
    tuned = registry.capabilities(framework)
    only = f"only {known[default].title} has a policy to set before a model is built"
    if not tuned.applies_without_model:
        raise UsageError(
            f"this profile was tuned with {tuned.title}: apply_profile needs model=... "
            f"({tuned.model}) and optimizer=...; {only}"
        )
    in_use = [
        each.title
        for each in known.values()
        if not each.applies_without_model
        and any(module in sys.modules for module in each.required_modules)
    ]
    needed = tuned.required_modules
    if in_use and needed and not any(module in sys.modules for module in needed):
        raise UsageError(f"apply_profile needs model=... for {in_use[0]}; {only}")
    return framework


def _as_sequence(optimizer: Any) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    return tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
