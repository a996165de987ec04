"""Applies one recipe to one model, keeps it applied as the model changes, and puts it back.

Layers get their policies at once; what a later `compile` brings (another optimizer, other settings)
and what a later `build` makes (layers) is taken in as it comes, so that the order in which a script
builds, compiles and applies does not matter.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import keras

from autoprec.backends.keras.apply.change_report import ChangeReport
from autoprec.backends.keras.apply.compile_overrides import CompileOverrides
from autoprec.backends.keras.apply.dtype_policies import LayerPolicies, unreached
from autoprec.backends.keras.apply.earlier_traces import trace_again
from autoprec.backends.keras.apply.first_call_hook import remove_first_call_hook
from autoprec.backends.keras.apply.float32_outputs import Float32Outputs, OutputsInFloat32
from autoprec.backends.keras.apply.layer_names import (
    LayerUnit,
    child_layers,
    layer_units,
    resolve_layers,
)
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.apply.mixed_precision_advice import advise
from autoprec.backends.keras.apply.optimizer_attributes import replace_optimizers
from autoprec.backends.keras.apply.optimizer_saving import optimizer_as_given
from autoprec.backends.keras.apply.padding import PaddedLayer, pad_layers
from autoprec.backends.keras.apply.precision import Precision
from autoprec.backends.keras.apply.raising_layers import explain_errors
from autoprec.backends.keras.apply.replicas import scope_of
from autoprec.backends.keras.apply.sharing_models import SharingModels
from autoprec.backends.keras.apply.skipped_updates import STATE, follow_state
from autoprec.core.device.facts import DeviceFacts
from autoprec.errors import AutoprecWarning, UsageError

#: The attribute in which a model holds the recipe applied to it.
RECIPE_ATTRIBUTE = "_autoprec"


class AppliedRecipe:
    """A recipe applied to `model`; the model holds it, so that it lives as long.

    `given` are optimizers of the script that the model does not hold. With `tolerant`, islands
    that the model does not have are warned of rather than refused: a policy that was set for every
    model to come meets models it was not tuned for.
    """

    def __init__(
        self,
        precision: Precision,
        model: Any,
        facts: DeviceFacts | None,
        *,
        given: Sequence[Any] = (),
        tolerant: bool = False,
    ) -> None:
        if not isinstance(model, keras.Layer):
            raise UsageError(
                f"model: {type(model).__name__} given, expected a keras.Model or keras.Layer"
            )
        self.model = model
        self._compile_overrides = CompileOverrides(precision, model, given)
        self._precision, self._recipe = precision, precision.recipe
        self._facts, self._tolerant = facts, tolerant
        self._hooks = InstalledHooks()
        self._policies = LayerPolicies(self._hooks)
        self._outputs = OutputsInFloat32(self._policies, self._hooks)
        self._sharing = SharingModels(self)
        self._units: tuple[LayerUnit, ...] = ()
        self._islands: tuple[LayerUnit, ...] = ()
        self._kept: list[LayerUnit] = []
        self._padded: list[PaddedLayer] = []
        self._not_padded: dict[str, str] = {}
        self._not_applied: list[str] = []  # of a recipe for models to come, to this one
        self._warned: set[str] = set()
        self._advice: list[str] = []

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Return the user's optimizers, wrapped where the recipe needs it."""
        return self._compile_overrides.optimizers

    @property
    def nonfinite(self) -> Any:
        """Return the counter of losses that were not finite, None where they are not counted."""
        return self._compile_overrides.nonfinite

    def apply(self) -> AppliedRecipe:
        """Apply the recipe, undoing what was applied before to the model or a part of it."""
        undo_former_recipe(self.model)
        try:
            others = trace_again(self.model, warn=True)
            with scope_of(self.model):
                self._change_layers()
                self._compile_overrides.apply()
            if self._recipe.policy.mixed:
                self._sharing.follow(others, new=not self._tolerant)
        except BaseException:
            self.restore()
            raise
        vars(self.model)[RECIPE_ATTRIBUTE] = self
        self.warn()
        return self

    @property
    def report(self) -> ChangeReport:
        """Return what was changed."""
        named = tuple(unit.path for unit in self._islands)
        there = {unit.path for unit in self._units}
        missing = (
            (path, "this model has no layer of that name")
            for path in self._recipe.alignment.modules
            if path not in there
        )
        return ChangeReport(
            self._recipe.policy,
            layers=len(self._units),
            islands=(*named, *(path for path in self._outputs.islands if path not in named)),
            kept=tuple(unit.path for unit in self._kept),
            padded=tuple(self._padded),
            not_padded=(*self._not_padded.items(), *missing),
            warnings=(*self._not_applied, *self._compile_overrides.notes, *self._advice),
        )

    def warn(self) -> None:
        """Warn, once each, of what of the recipe does not fit this model."""
        for note in self._not_applied:
            if note not in self._warned:
                self._warned.add(note)
                warnings.warn(note, AutoprecWarning, stacklevel=3)

    def restore(self) -> None:
        """Put the model back as it was, but for what the script has changed itself since."""
        self._compile_overrides.undo()
        self._sharing.restore()
        self._hooks.restore()
        self._policies.restore()
        STATE.end_loop()
        if vars(self.model).get(RECIPE_ATTRIBUTE) is self:
            del vars(self.model)[RECIPE_ATTRIBUTE]
        trace_again(self.model)

    # Layers --------------------------------------------------------------------------------------

    def _change_layers(self) -> None:
        """Set the layers' policies and make outputs float32; follow layers made later."""
        policy = self._recipe.policy
        units = self._units = layer_units(self.model)
        for unit in units:
            if unit.layer is not self.model and not getattr(unit.layer, "compiled", False):
                undo_former_recipe(unit.layer)
            remove_first_call_hook(unit.layer)
        self._outputs = OutputsInFloat32(self._policies, self._hooks)
        self._islands = self._resolve() if policy.mixed else ()
        self._pad(units)
        self._kept += self._policies.apply(units, policy, self._islands)
        for island in self._islands:
            own_code_in_float32(island, self._islands, self._hooks)
        if policy.mixed:
            self._outputs.apply(self._units)
            _add_losses_in_float32(self.model, self._hooks)
            explain_errors(self, units, policy, self._hooks)
        self._follow_state(units)
        self._await_builds(units)
        self._follow_model(units)
        self._not_applied += unreached(self._units, policy, self._islands)
        self._advice = advise(self._recipe, self._units, self._facts)

    def _follow_model(self, units: Sequence[LayerUnit]) -> None:
        """Install hooks on `compile`, and on a Sequential's `add` and `pop`."""
        if hasattr(self.model, "compile"):
            hook = CompileHook(self.model.compile, self.after_compile, self.before_compile)
            self._hooks.install(self.model, "compile", hook)
        for unit in units:
            if isinstance(unit.layer, keras.Sequential):
                for name in ("add", "pop"):
                    changes = _LayerChangeHook(getattr(unit.layer, name), self)
                    self._hooks.install(unit.layer, name, changes)

    def changed(self) -> None:
        """Apply the recipe anew if the model has other layers by now, such as a new head."""
        if [id(p.layer) for p in layer_units(self.model)] == [id(p.layer) for p in self._units]:
            return
        self._hooks.restore()
        self._policies.restore()
        self._kept, self._padded, self._not_padded = [], [], {}
        self._not_applied = []
        self._tolerant = True  # of an island whose layer is gone
        with scope_of(self.model):
            self._change_layers()

    def _resolve(self) -> tuple[LayerUnit, ...]:
        """Find the islands; while layers may still be added, those that exist."""
        found: list[LayerUnit] = []
        complete = all(unit.layer.built for unit in self._units)
        for pattern in self._recipe.float32_modules:
            try:
                found += resolve_layers((pattern,), self._units)
            except UsageError as error:
                if complete and not self._tolerant:
                    raise
                note = f"not applied to {self.model.name}: {error}"
                if complete and note not in self._not_applied:
                    self._not_applied.append(note)
        return tuple(dict.fromkeys(found))

    def _pad(self, units: Iterable[LayerUnit]) -> None:
        """Pad what the recipe names among `units`; what is not built waits for it."""
        wanted = self._recipe.alignment.modules
        ready = [unit for unit in units if unit.path in wanted]
        alignment = replace(self._recipe.alignment, modules=tuple(unit.path for unit in ready))
        padded, skipped = pad_layers(ready, alignment, self._hooks)
        self._padded += padded
        self._not_padded.update(skipped)
        for unit in padded:
            self._not_padded.pop(unit.path, None)

    def _await_builds(self, units: Sequence[LayerUnit]) -> None:
        for unit in units:
            if not unit.layer.built:
                self._hooks.install(unit.layer, "build", _BuildHook(unit.layer.build, self, unit))

    def built(self, unit: LayerUnit) -> None:
        """Take in the layers that `unit` made when it was built, and pad it."""
        known = {id(known.layer): known for known in self._units}
        if any(id(child) not in known for child in child_layers(unit.layer)):
            self._units = tuple(known.get(id(p.layer), p) for p in layer_units(self.model))
            self._apply_to_new_layers([p for p in self._units if id(p.layer) not in known])
        elif len(self._islands) < len(self._recipe.float32_modules) and self._recipe.policy.mixed:
            self._resolve()  # says what is missing, once nothing more can come
        if unit.path in self._recipe.alignment.modules:
            self._pad([unit])
        self._follow_state([unit])

    def _apply_to_new_layers(self, new: Sequence[LayerUnit]) -> None:
        """Apply the recipe to layers that were made later."""
        policy = self._recipe.policy
        self._outputs.add_units(new)
        self._pad(new)
        before, self._islands = self._islands, self._resolve() if policy.mixed else ()
        self._kept += self._policies.extend(new, policy, self._islands)
        for island in set(self._islands) - set(before):
            own_code_in_float32(island, self._islands, self._hooks)
        if policy.mixed:
            self._outputs.make_softmax_float32(new)
            self._outputs.make_direct_calls_float32(new)
        self._follow_state(new)
        self._await_builds(new)

    def _follow_state(self, units: Collection[LayerUnit]) -> None:
        """Let a skipped update undo what the forward pass changed."""
        if self._recipe.policy.needs_loss_scale:
            follow_state(self.model, units, self._hooks)

    @property
    def units(self) -> tuple[LayerUnit, ...]:
        """Return the model's layers."""
        return self._units

    def keep_in_float32(self, paths: Collection[str]) -> None:
        """Keep further layers in float32, from the model's next step on."""
        more = [u for u in self._units if u.path in paths and u not in self._islands]
        known = self._recipe.float32_modules
        self._recipe = replace(self._recipe, float32_modules=(*known, *(u.path for u in more)))
        self._islands = (*self._islands, *more)
        for unit in more:
            self._policies.set(unit, "float32")
        for unit in more:
            own_code_in_float32(unit, self._islands, self._hooks)
        trace_again(self.model, watched=True)

    # What compile sets ---------------------------------------------------------------------------

    def before_compile(self) -> None:
        """Undo the changes to what the model is compiled with, before it is compiled anew."""
        self._compile_overrides.undo()

    def after_compile(self) -> None:
        """Carry the recipe into what `compile` has set, and to layers that are new."""
        self.changed()
        self._follow_state(self._units)
        with scope_of(self.model):
            self._compile_overrides.apply()
        self.warn()


def undo_former_recipe(layer: Any) -> None:
    """Undo the recipe that is applied to `layer`, if one is."""
    former = vars(layer).get(RECIPE_ATTRIBUTE)
    if former is not None:
        former.restore()


def own_code_in_float32(
    island: LayerUnit, islands: Sequence[LayerUnit], hooks: InstalledHooks
) -> None:
    """Let a container compute its own code in float32 on what its 16-bit layers give it."""
    if len(island.members) > 1:
        return
    inside = {id(other.layer) for other in islands}
    for child in child_layers(island.layer):
        if id(child) not in inside and child.compute_dtype != "float32":
            hooks.install(child, "call", Float32Outputs(child, child.call))


def _add_losses_in_float32(model: Any, hooks: InstalledHooks) -> None:
    """Cast what layers add to the loss: Keras cannot sum 16-bit terms with the float32 loss."""
    if hasattr(model, "_aggregate_additional_loss"):
        aggregate = model._aggregate_additional_loss
        hooks.install(model, "_aggregate_additional_loss", Float32Outputs(model, aggregate))


# The methods that change a model ------------------------------------------------------------------


class CompileHook(Hook):
    """A model's `compile`, the user's own included, between what is done `before` and `after`."""

    def __init__(
        self,
        original: Callable[..., Any],
        after: Callable[[], None],
        before: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(original)
        self.before, self.after = before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the model with the user's optimizers, also where wrapped ones are handed back."""
        if self.before is not None:
            self.before()
        try:
            return self.original(
                *replace_optimizers(args, optimizer_as_given),
                **replace_optimizers(kwargs, optimizer_as_given),
            )
        finally:
            self.after()


class _LayerChangeHook(Hook):
    """A Sequential's `add` or `pop`: the recipe is carried to the layers that are there then.

    A Sequential may outlive the models that it was a part of, and must not keep them.
    """

    def __init__(self, original: Callable[..., Any], applied: AppliedRecipe) -> None:
        super().__init__(original)
        self.applied = weakref.ref(applied)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add or remove the layer."""
        result = self.original(*args, **kwargs)
        applied = self.applied()
        if applied is not None:
            applied.changed()
        return result


class _BuildHook(Hook):
    """A layer's `build`: layers made inside are given the recipe's policies too."""

    def __init__(
        self, original: Callable[..., Any], applied: AppliedRecipe, unit: LayerUnit
    ) -> None:
        super().__init__(original)
        self.applied = applied
        self.unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the layer."""
        result = self.original(*args, **kwargs)
        self.applied.built(self.unit)
        return result
