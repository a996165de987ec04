"""Puts back what a skipped float16 step has already changed: statistics, averages, other state.

Layers change their state in the forward pass (BatchNorm's moving averages), before a loss scale
finds that the gradient is not finite and skips the update. One overflow would leave an average that
is not finite for good. So the first assignment of a step notes the value before it, and the skip
assigns that again, on the device. A note is a read of a variable, which shares its memory: nothing
is computed or waited for in a step that is not skipped.

Metrics are left alone: the loss that they report of a skipped step was what they say.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import ops
from keras.src.backend.common.stateless_scope import in_stateless_scope

from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks


class AssignHook(Hook):
    """The `assign` of a variable that layers change, which notes the value before a step."""

    def __init__(self, variable: Any) -> None:
        super().__init__(variable.assign)
        self.variable = variable

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the value that the variable has, then assign."""
        if in_stateless_scope():  # nothing is assigned: Keras asks for shapes
            return self.original(value, *args, **kwargs)
        STATE.assigning(self)
        result = self.original(value, *args, **kwargs)
        STATE.assigned(self)
        return result


def follow_state(units: Iterable[LayerUnit], hooks: InstalledHooks) -> None:
    """Note from now on what a step changes of the layers' own state.

    Weights that are frozen are not state: no layer assigns them.
    """
    for unit in units:
        for layer in unit.members:
            for variable in (*layer._non_trainable_variables, *carried_states(layer)):
                floating = "float" in keras.backend.standardize_dtype(variable.dtype)
                if floating and not isinstance(vars(variable).get("assign"), AssignHook):
                    hooks.install(variable, "assign", AssignHook(variable))


def carried_states(layer: Any) -> list[Any]:
    """List what a stateful recurrent layer carries to the next batch; Keras lists it nowhere."""
    if not isinstance(layer, keras.layers.RNN) or not layer.stateful:
        return []
    return [v for v in keras.tree.flatten(layer.states) if isinstance(v, keras.Variable)]


@dataclass(eq=False)
class _Step:
    """What one step has changed: hooks by variable, and the values before; `ended` by an update."""

    before: dict[int, tuple[AssignHook, Any]] = field(default_factory=dict)
    ended: bool = False


class StateBeforeStep:
    """The state before the step that is running, or that is being traced.

    A step is known by the function that is traced (or by none: a loop that runs eagerly). Where the
    update is made outside of the function that runs the forward pass, the values before are not at
    hand there: copies hold those of the last finite update, and replace what is not finite.
    """

    def __init__(self) -> None:
        self._eager: dict[Any, _Step] = {}
        self._traced: weakref.WeakKeyDictionary[Any, dict[Any, _Step]] = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakKeyDictionary[AssignHook, Any] = weakref.WeakKeyDictionary()
        #: Functions that assign a variable and make no update, as far as they still exist.
        self._open: weakref.WeakKeyDictionary[AssignHook, weakref.WeakSet[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside: what is traced there never runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def assigning(self, hook: AssignHook) -> None:
        """Note the value before the first assignment of a step."""
        if self._paused:
            return
        graph, steps, key = self._place()
        step = steps.get(key)
        if step is None or step.ended:
            step = steps[key] = _Step()
        if id(hook.variable) in step.before:
            return
        with _traced_into(graph):
            step.before[id(hook.variable)] = hook, _value(hook.variable)
        if graph is not None and key is None:
            if hook not in self._copies:
                self._copies[hook] = _copy(hook.variable)
            self._open.setdefault(hook, weakref.WeakSet()).add(graph)

    def assigned(self, hook: AssignHook) -> None:
        """Take over what is assigned outside of steps, such as loaded weights."""
        if hook in self._copies and self._place()[0] is None:
            self._copies[hook].assign(_value(hook.variable))

    def put_back(self) -> None:
        """Undo what the step has changed, because its update is skipped."""
        step = self._step()
        for hook, value in step.before.values():
            # After another optimizer's update only what is broken is surely this step's.
            hook.original(_finite_or(hook.variable, value) if step.ended else value)
        for hook, copy in self._copies_elsewhere(step):
            hook.original(_finite_or(hook.variable, copy))

    def keep(self) -> None:
        """Keep the state of a step whose update is made."""
        for hook, copy in self._copies_elsewhere(self._step()):
            copy.assign(_value(hook.variable))

    def end_step(self) -> None:
        """Begin a new step with the next assignment."""
        graph, steps, key = self._place()
        step = steps.get(key)
        if step is None:
            return
        step.ended = True
        for hook, _ in step.before.values():
            if graph is not None and hook in self._open:
                self._open[hook].discard(graph)

    def _step(self) -> _Step:
        _, steps, key = self._place()
        return steps.get(key) or _Step()

    def _copies_elsewhere(self, step: _Step) -> list[tuple[AssignHook, Any]]:
        """List the copies of what functions without an update assign."""
        found = [(hook, self._copies[hook]) for hook, functions in self._open.items() if functions]
        return [(hook, copy) for hook, copy in found if id(hook.variable) not in step.before]

    def _place(self) -> tuple[Any, dict[Any, _Step], Any]:
        """Return the function that is traced, its steps, and which of its replicas this is."""
        graph, replica = _function_graph(), _replica()
        if graph is None:
            return graph, self._eager, replica
        return graph, self._traced.setdefault(graph, {}), replica


#: The one state of this process: whichever model a step changes, the skip of its update undoes it.
STATE = StateBeforeStep()


def _value(variable: Any) -> Any:
    """Return the value as it is now, also once the variable is assigned another.

    Not `variable.value`, which inside a layer is cast to 16 bits.
    """
    if keras.config.backend() == "tensorflow":
        return variable._value.read_value()
    return ops.copy(variable._value)


def _finite_or(variable: Any, value: Any) -> Any:
    now = _value(variable)
    return ops.where(ops.isfinite(now), now, ops.convert_to_tensor(value))


def _copy(variable: Any) -> Any:
    """Return a variable of the same value, made outside of the function that is traced."""
    import tensorflow as tf

    with tf.init_scope():
        return tf.Variable(_value(variable), trainable=False)


def _function_graph() -> Any:
    """Return the function that TensorFlow traces, without its branches and loops; None eagerly."""
    if keras.config.backend() != "tensorflow":
        return None
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    inner = (
        control_flow.CondBranchFuncGraph,
        control_flow.WhileBodyFuncGraph,
        control_flow.WhileCondFuncGraph,
    )
    while isinstance(graph, inner):
        graph = graph.outer_graph
    return graph


def _replica() -> Any:
    """Return which replica is run or traced; None where there is but one."""
    if keras.config.backend() != "tensorflow":
        return None
    import tensorflow as tf

    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return None
    number = replica._replica_id_in_sync_group  # a TPU's replicas are traced once: a tensor
    return number if isinstance(number, int) else "each"


@contextlib.contextmanager
def _traced_into(graph: Any) -> Iterator[None]:
    """Add operations to `graph`, whichever of its branches is traced."""
    scope: AbstractContextManager[Any] = (
        contextlib.nullcontext() if graph is None else graph.as_default()
    )
    with scope:
        yield
