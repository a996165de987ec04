"""What a recipe changes in what a model's `compile` sets: its optimizers and its train function.

A later `compile` sets it anew, so it is undone before and done again after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from autoprec.backends.keras.apply import optimizer_saving, optimizer_wrapping
from autoprec.backends.keras.apply.accumulation import AccumulatingOptimizer, FinalizeHook
from autoprec.backends.keras.apply.layer_policy_stack import own_policy
from autoprec.backends.keras.apply.loss_scale import LossCountingHook
from autoprec.backends.keras.apply.method_hooks import InstalledHooks
from autoprec.backends.keras.apply.metrics import RealSamplesHook, hookable_metrics
from autoprec.backends.keras.apply.optimizer_attributes import (
    optimizer_attributes,
    optimizers_of,
    replace_optimizers,
)
from autoprec.backends.keras.apply.precision import Precision
from autoprec.backends.keras.apply.replicas import (
    ReplicaShares,
    can_be_weighed,
    reduce_before_clipping,
    refuse_fit_over_processes,
    replica_count,
)
from autoprec.backends.keras.apply.train_function import (
    compile_settings,
    retrace_functions,
    watch_train_function,
)


class CompileOverrides:
    """The optimizers, metrics and train function of one model under a recipe.

    `given` are optimizers of the script that the model does not hold.
    """

    def __init__(self, precision: Precision, model: Any, given: Sequence[Any]) -> None:
        self.model = model
        self.optimizers: tuple[Any, ...] = ()
        self.nonfinite: Any = None
        self.notes: list[str] = []
        self._precision, self._recipe = precision, precision.recipe
        self._given = tuple(given)
        self._hooks = InstalledHooks()
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Carry the recipe into what `compile` has set."""
        self._wrap_optimizers()
        metrics = hookable_metrics(self.model)
        if metrics is not None:
            hook = RealSamplesHook(metrics.update_state, metrics)
            self._hooks.install(metrics, "update_state", hook)
        if getattr(self.model, "compiled", False):
            self._set_train_function()

    def undo(self) -> None:
        """Put back what was changed, but for what the script has changed itself since."""
        self._hooks.restore()
        while self._undo:
            self._undo.pop()()

    def _wrap_optimizers(self) -> None:
        held = [self._as_given_to_compile(optimizer) for optimizer in optimizers_of(self.model)]
        wrapped: dict[int, Any] = {}
        for optimizer in (*self._given, *held):
            inner = id(optimizer_saving.innermost_optimizer(optimizer))
            wrapped[inner] = wrapped.get(inner) or self._precision.wrapped(optimizer)
        self.optimizers = tuple(wrapped.values())
        self._prepare_for_replicas()
        self._count_losses()
        for name in optimizer_attributes(self.model):
            self._hold_wrapped(name, wrapped)
        self._flush_when_fit_ends()

    def _as_given_to_compile(self, optimizer: Any) -> Any:
        """Return what the user gave to `compile`, without the loss scale Keras may have added.

        Keras adds one where the model's policy is mixed_float16, and files name it only where the
        user did; their state must be what they name.
        """
        config = getattr(self.model, "_compile_config", None)
        said = None if config is None else config.config.get("optimizer")
        added = (
            optimizer is getattr(self.model, "optimizer", None)
            and type(optimizer) is keras.optimizers.LossScaleOptimizer
            and said is not optimizer
        )
        return optimizer.inner_optimizer if added else optimizer

    def _hold_wrapped(self, name: str, wrapped: Mapping[int, Any]) -> None:
        """Make the model hold wrapped optimizers where it held the user's."""
        ours = own_policy(self.model).name != "mixed_float16"
        back: dict[int, tuple[Any, Any]] = {}

        def wrap(held: Any) -> Any:
            found = wrapped[id(optimizer_saving.innermost_optimizer(held))]
            if found is not held:
                back[id(found)] = found, self._as_given_to_compile(held) if ours else held
            return found

        def undo() -> None:
            for ours, given in back.values():
                optimizer_wrapping.unwrap(ours, given)
            self._replace_in_attribute(name, lambda held: back.get(id(held), (held, held))[1])

        self._replace_in_attribute(name, wrap)
        if back:
            self._undo.append(undo)

    def _replace_in_attribute(self, name: str, change: Callable[[Any], Any]) -> None:
        """Exchange the optimizers in an attribute of the model."""
        held = vars(self.model).get(name)
        now = replace_optimizers(held, change)
        if now is not held:
            setattr(self.model, name, now)
            retrace_functions(self.model)

    def _flush_when_fit_ends(self) -> None:
        """Flush every optimizer where Keras finalizes the compiled one alone."""
        compiled = getattr(self.model, "optimizer", None)
        found = (
            optimizer_wrapping.find_wrapper(o, AccumulatingOptimizer)
            for o in self.optimizers
            if o is not compiled
        )
        others = [each for each in found if each is not None]
        if compiled is not None and others:
            hook = FinalizeHook(compiled.finalize_variable_values, others)
            self._hooks.install(compiled, "finalize_variable_values", hook)

    def _prepare_for_replicas(self) -> None:
        """Weigh the replicas' losses, and make the variables that no replica can make in a step."""
        if replica_count(self.model) == 1:
            return
        if len(self._given) == 1 and self.model.built and not self.optimizers[0].built:
            self.optimizers[0].build(self.model.trainable_variables)
        refuse_fit_over_processes(self.model, self._hooks)
        for optimizer in self.optimizers:
            reduce_before_clipping(optimizer_saving.innermost_optimizer(optimizer), self._hooks)
        if can_be_weighed(self.model):
            ReplicaShares(self.model).install(self._hooks, self.optimizers)

    def _count_losses(self) -> None:
        """Count losses that are not finite, on every replica."""
        if not self.optimizers:
            return
        if self.nonfinite is None:
            self.nonfinite = keras.Variable(
                0,
                dtype="int64",
                trainable=False,
                aggregation="sum",
                synchronization="on_read",
                name="broken_losses",
            )
        for optimizer in self.optimizers:
            counted = LossCountingHook(optimizer.scale_loss, self.nonfinite)
            self._hooks.install(optimizer, "scale_loss", counted)

    def _set_train_function(self) -> None:
        model, recipe = self.model, self._recipe
        before = (model.jit_compile, model.steps_per_execution)
        steps = recipe.knobs.get("steps_per_execution", model.steps_per_execution)
        obstacle = _single_step_reason(model)
        if obstacle and steps != model.steps_per_execution:
            steps = model.steps_per_execution
            self._say(f"steps_per_execution stays {steps}: {obstacle}")
        compiles = model.jit_compile or (recipe.compile and not model.run_eagerly)
        if compiles and not model.jit_compile and replica_count(model) > 1:
            compiles = False
            self._say("not compiled: TensorFlow cannot compile a step of several replicas with XLA")
        compile_settings(model, compiles, steps)
        watch_train_function(self._precision, model)
        after = (model.jit_compile, model.steps_per_execution)

        def undo() -> None:
            now = (model.jit_compile, model.steps_per_execution)
            pairs = zip(now, after, before, strict=True)
            compile_settings(
                model, *(given if held == ours else held for held, ours, given in pairs)
            )

        self._undo.append(undo)

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _single_step_reason(model: Any) -> str:
    """Say why a model can take but one step in an execution; empty if it can take more."""
    if keras.config.backend() == "torch":
        return "Keras on torch supports no other value"
    if replica_count(model) > 1:
        return "with more, TensorFlow fails on several replicas"
    return ""
