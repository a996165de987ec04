"""Puts back what a skipped float16 step has already changed: statistics, averages, other state.

Layers change their state in the forward pass (BatchNorm's moving averages), before a loss scale
finds that the gradient is not finite and skips the update. One overflow would leave an average that
is not finite for good. So the first assignment of a step notes the value before it, and the skip
assigns that again, on the device. A note is a read of a variable, which shares its memory: nothing
is computed or waited for in a step that is not skipped.

What a train_step assigns after its update, such as an average of the loss, cannot be undone by it:
there, what became non-finite with a skipped update is put back when it is assigned.

Metrics are left alone: the loss that they report of a skipped step was what they say.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import ops
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope

from autoprec.backends.keras.apply.dtype_policies import WEIGHT_WRITERS
from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.apply.untracked_state import (
    carried_states,
    is_keras,
    stored_value,
    untracked_variables,
)

#: Where a function that is traced holds its steps.
_STEPS_ATTRIBUTE = "_autoprec_steps"


#: What else changes a `tf.Variable`; a Keras variable has `assign` only.
_TENSORFLOW_WRITES = (
    *("assign_add", "assign_sub", "batch_scatter_update", "_strided_slice_assign"),
    *("scatter_" + of for of in ("add", "sub", "max", "min", "mul", "div", "update")),
    *("scatter_nd_" + of for of in ("add", "sub", "max", "min", "update")),
)


class AssignHook(Hook):
    """The `assign` of a variable that layers change, which notes the value before a step."""

    def __init__(self, variable: Any) -> None:
        super().__init__(variable.assign)
        self.variable = variable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note the value that the variable has, then assign."""
        return self.around(self.original, args, kwargs)

    def around(self, write: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note the value that the variable has, then call what changes it."""
        if in_stateless_scope():  # nothing is assigned: Keras asks for shapes
            return write(*args, **kwargs)
        STATE.assigning(self)
        result = write(*args, **kwargs)
        STATE.assigned(self)
        return result


class _WriteHook(Hook):
    """Another method that changes a variable whose `assign` is hooked."""

    def __init__(self, original: Callable[..., Any], assign: AssignHook) -> None:
        super().__init__(original)
        self.assign = assign

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.assign.around(self.original, args, kwargs)


def follow_state(model: Any, units: Collection[LayerUnit], hooks: InstalledHooks) -> None:
    """Note from now on what a step changes of the layers' own state, whatever its dtype.

    A queue and its pointer belong together, and so do a sum and its count. Weights are state where
    code assigns them, as it does codebooks: those of people's own layers, and tables of embeddings.
    The states of generators of random numbers are not.
    """
    for unit in units:
        for layer in unit.members:
            written = _weights_that_code_may_assign(layer)
            for variable in (*layer._non_trainable_variables, *carried_states(layer), *written):
                _follow(variable, hooks)
    for each in untracked_variables(model, units):
        if not each.draws:
            _follow(each.variable, hooks)


def _weights_that_code_may_assign(layer: Any) -> list[Any]:
    if isinstance(layer, WEIGHT_WRITERS):
        return [layer.kernel] if layer.built else []
    may = isinstance(layer, keras.layers.Embedding) or not type(layer).__module__.startswith(
        "keras."
    )
    return list(layer._trainable_variables) if may else []


def _follow(variable: Any, hooks: InstalledHooks) -> None:
    if isinstance(vars(variable).get("assign"), AssignHook):
        return
    assign = AssignHook(variable)
    hooks.install(variable, "assign", assign)
    for name in () if is_keras(variable) else _TENSORFLOW_WRITES:
        hooks.install(variable, name, _WriteHook(getattr(variable, name), assign))


@dataclass(eq=False)
class _Step:
    """What one step has changed, with the values before; `ended` by an update.

    `finite` says whether that update was made, where it is known. One `after` another follows it in
    the same function: what that assigns, such as a teacher's averages, waits for no update
    elsewhere. Of `loose` variables it is not known to which of two steps their change belongs.
    """

    before: weakref.WeakKeyDictionary[AssignHook, Any] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    loose: weakref.WeakSet[AssignHook] = field(default_factory=weakref.WeakSet)
    ended: bool = False
    finite: Any = None
    after: _Step | None = None


@dataclass(eq=False)
class _Elsewhere:
    """A variable that `functions` assign and make no update: its value at the last finite one.

    Functions that make the update take the value from a tf.Variable, which is made for the first of
    them; others from a read of the variable, which is no copy.
    """

    value: Any
    functions: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    held_by_functions: bool = False

    def current(self) -> Any:
        """Return the value, for what is run or traced now."""
        if not self.held_by_functions and _function_graph() is not None:
            import tensorflow as tf

            with tf.init_scope():
                self.value = tf.Variable(self.value, trainable=False)
            self.held_by_functions = True
        return self.value

    def keep(self, value: Any) -> None:
        """Take another value, when what is traced now runs."""
        if self.held_by_functions or _function_graph() is not None:
            self.current().assign(value)
        else:
            self.value = value


class StateBeforeStep:
    """The state before the step that is running, or that is being traced.

    A step is known by the function that is traced, which holds it, or by none: a loop that runs
    eagerly. Where the update is made outside of the function that runs the forward pass, the values
    before are not at hand: those of the last finite update replace what is not finite.
    """

    def __init__(self) -> None:
        self._eager: dict[Any, _Step] = {}
        self._elsewhere: weakref.WeakKeyDictionary[AssignHook, _Elsewhere] = (
            weakref.WeakKeyDictionary()
        )
        self._pauses = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside, and put nothing back: what is assigned there belongs to no step."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def end_loop(self) -> None:
        """Forget the step of a loop that ran eagerly: what is assigned next is no part of it."""
        self._eager.clear()

    def assigning(self, hook: AssignHook) -> None:
        """Note the value before the first assignment of a step."""
        if self._pauses:
            return
        graph, steps, key = self._place()
        step = steps.get(key)
        if graph is None and not (_in_step() or _follows_skip(step)):
            return
        if step is None or step.ended:
            if step is not None:
                step.after = None  # what is long past
            step = steps[key] = _Step(after=step)
        if hook in step.before:
            return
        with _traced_into(graph):
            step.before[hook] = stored_value(hook.variable)
        if graph is None and step.after is not None and not _is_recorded():
            step.loose.add(hook)
        if graph is not None and key is None and step.after is None:
            if hook not in self._elsewhere:
                self._elsewhere[hook] = _Elsewhere(_value_now(hook.variable))
            self._elsewhere[hook].functions.add(graph)

    def assigned(self, hook: AssignHook) -> None:
        """Take over what is assigned outside of steps, such as loaded weights.

        After a skipped update in the same function, what is not finite is put back at once.
        """
        if self._pauses:
            return
        graph, steps, key = self._place()
        if hook in self._elsewhere and graph is None:
            self._elsewhere[hook].keep(stored_value(hook.variable))
        step = steps.get(key)
        if step is None or step.after is None or hook not in step.before or _is_recorded():
            return
        finite, value = step.after.finite, step.before[hook]

        def put_back() -> None:
            hook.original(_finite_or(hook.variable, value))

        if finite is not None and _is_known_here(finite):
            ops.cond(finite, lambda: None, put_back)

    def put_back(self) -> None:
        """Undo what the step has changed, because its update is skipped."""
        step = self._step()
        for hook, value in list(step.before.items()):
            # After another optimizer's update only what is broken is surely this step's.
            unsure = step.ended or hook in step.loose
            hook.original(_finite_or(hook.variable, value) if unsure else value)
        for hook, kept in self._changed_elsewhere(step):
            hook.original(_finite_or(hook.variable, kept.current()))

    def keep(self) -> None:
        """Keep the state of a step whose update is made."""
        for hook, kept in self._changed_elsewhere(self._step()):
            kept.keep(stored_value(hook.variable))

    def end_step(self, finite: Any = None) -> None:
        """Begin a new step with the next assignment; `finite` says whether the update was made."""
        graph, steps, key = self._place()
        step = steps.setdefault(key, _Step())
        step.ended, step.finite = True, finite
        for hook in list(step.before) if graph is not None else ():
            kept = self._elsewhere.get(hook)
            if kept is not None:
                kept.functions.discard(graph)
                if not (kept.functions or kept.held_by_functions):
                    del self._elsewhere[hook]

    def _step(self) -> _Step:
        _, steps, key = self._place()
        return steps.get(key) or _Step()

    def _changed_elsewhere(self, step: _Step) -> list[tuple[AssignHook, _Elsewhere]]:
        """List what functions without an update assign, and this step does not."""
        found = [each for each in self._elsewhere.items() if each[1].functions]
        return [(hook, kept) for hook, kept in found if hook not in step.before]

    def _place(self) -> tuple[Any, dict[Any, _Step], Any]:
        """Return the function that is traced, its steps, and which of its replicas this is."""
        graph, replica = _function_graph(), _replica()
        if graph is None:
            return graph, self._eager, replica
        if not hasattr(graph, _STEPS_ATTRIBUTE):
            setattr(graph, _STEPS_ATTRIBUTE, {})
        return graph, getattr(graph, _STEPS_ATTRIBUTE), replica


#: The one state of this process: whichever model a step changes, the skip of its update undoes it.
STATE = StateBeforeStep()


def _finite_or(variable: Any, value: Any) -> Any:
    now = stored_value(variable)
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if not ("float" in dtype or "complex" in dtype):
        return now
    finite = ops.isfinite(ops.abs(now))
    return ops.where(finite, now, ops.convert_to_tensor(value))


def _value_now(variable: Any) -> Any:
    """Return the value that a variable has while a function is traced that changes it."""
    import tensorflow as tf

    with tf.init_scope():
        return stored_value(variable)


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


def _in_step() -> bool:
    """Say whether what runs eagerly is a forward pass, rather than a script that loads weights."""
    if keras.config.backend() != "tensorflow":
        return True
    called = global_state.get_global_attribute("current_call_ctx")
    return called is not None or _is_recorded()


def _is_recorded() -> bool:
    """Say whether a tape of TensorFlow records: its gradient is still to come."""
    if keras.config.backend() != "tensorflow":
        return False
    from tensorflow.python import pywrap_tfe

    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def _follows_skip(step: _Step | None) -> bool:
    """Say whether what runs eagerly, outside of a forward pass, follows a skipped update."""
    update = step if step is None or step.ended else step.after
    return update is not None and update.finite is not None and not bool(update.finite)


def _is_known_here(finite: Any) -> bool:
    """Say whether a tensor can be read where it is traced now: not one of a loop's body outside."""
    if not hasattr(finite, "graph") or keras.config.backend() != "tensorflow":
        return True
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    while graph is not finite.graph and graph is not None:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


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
