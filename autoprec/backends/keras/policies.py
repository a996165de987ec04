"""Sets dtype policies: globally before a model is built, and layer by layer on a built one.

In place means in place: weights, names and layer objects stay; only what a layer computes in
changes. A layer that the user made float32 in a model that is otherwise not is their island and
stays, as do layers that only prepare the model's inputs;
layers with 16-bit weights, quantised ones and those without floating arithmetic are left alone.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from autoprec.backends.keras.hooks import Hook, Wraps
from autoprec.backends.keras.layers import Placed
from autoprec.backends.keras.preparation import preparing
from autoprec.core.dtypes import Policy

#: Keras's policy names for ours: TF32 is a mode of float32 arithmetic, not a Keras policy.
_NAMES = {
    Policy.FLOAT32: "float32",
    Policy.TF32: "float32",
    Policy.MIXED_BFLOAT16: "mixed_bfloat16",
    Policy.MIXED_FLOAT16: "mixed_float16",
}

_OURS_TO_CHANGE = ("float32", "mixed_bfloat16", "mixed_float16")


def keras_name(policy: Policy) -> str:
    """The name Keras knows `policy` by."""
    return _NAMES[policy]


def effective(layer: Any) -> Any:
    """The policy that holds for `layer`, looked up where it has a map of them."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path] if layer.path else policy.default_policy
    return policy


class SavedConfig(Hook):
    """A layer's `get_config`, saying the policy it had: a file says what it would without us."""

    def __init__(self, original: Callable[[], dict[str, Any]], policy: Any) -> None:
        super().__init__(original)
        self.policy = policy

    def __call__(self) -> dict[str, Any]:
        """Return the layer's configuration; one that says no dtype goes on saying none."""
        config = dict(self.original())
        if "dtype" in config:
            config["dtype"] = keras.dtype_policies.serialize(self.policy)
        return config


class LayerPolicies:
    """The policies of one model's layers, changed in place and put back by `restore`.

    `inherited` gives the policy a layer would have had without us, by the one that it has: where
    a global policy of ours was set when the layer was made, the global one before it. Files say
    that one; `restore` gives back the one the layer was made with, as Keras would.
    """

    def __init__(self, wraps: Wraps, inherited: Callable[[Any], Any] = lambda policy: policy):
        self._wraps = wraps
        self._inherited = inherited
        self._changed: dict[int, tuple[Any, Any, Any]] = {}

    def apply(
        self, placed: Sequence[Placed], policy: Policy, islands: Sequence[Placed]
    ) -> tuple[Placed, ...]:
        """Give every layer `policy` but `islands`; return the user's own islands that were kept."""
        name = keras_name(policy)
        own: set[int] = set()
        prepare: set[int] = set()
        if policy.mixed:
            own = {id(unit.layer) for unit in users_float32(placed, self.said_of)}
            prepare = preparing(placed)
        kept = []
        for unit in placed:
            current = effective(unit.layer)
            if unit in islands:
                self.set(unit, "float32")
            elif current.name not in _OURS_TO_CHANGE or current.quantization_mode is not None:
                continue
            elif id(unit.layer) in own:
                kept.append(unit)
            elif id(unit.layer) in prepare:
                self.set(unit, "float32")
                kept.append(unit)
            else:
                self.set(unit, name)
        return tuple(kept)

    def extend(
        self, new: Sequence[Placed], policy: Policy, islands: Sequence[Placed]
    ) -> tuple[Placed, ...]:
        """Do the same to layers that were made later, inside the first ones."""
        inherited = {id(before) for _, before, _ in self._changed.values()}
        inherited.add(id(keras.config.dtype_policy()))
        kept = []
        for unit in new:
            current = effective(unit.layer)
            if unit in islands:
                self.set(unit, "float32")
            elif current.name == "float32" and id(current) not in inherited:
                kept.append(unit)
            elif current.name in _OURS_TO_CHANGE and current.quantization_mode is None:
                self.set(unit, keras_name(policy))
        return tuple(kept)

    def set(self, unit: Placed, name: str) -> None:
        """Give one unit, with all its members, the policy `name`."""
        for layer in unit.members:
            current = effective(layer)
            if current.name not in _OURS_TO_CHANGE:
                continue
            changed = self._changed.get(id(layer))
            said = self._inherited(current)
            if changed is None and said.name != name:
                self._wraps.install(layer, "get_config", SavedConfig(layer.get_config, said))
            if current.name != name:
                before = current if changed is None else changed[1]
                layer.dtype_policy = name
                self._changed[id(layer)] = (layer, before, layer.dtype_policy)

    def said_of(self, layer: Any) -> Any:
        """The policy that a file says `layer` has: the one it would have without us."""
        hook = vars(layer).get("get_config")
        return hook.policy if isinstance(hook, SavedConfig) else self._inherited(effective(layer))

    def restore(self) -> None:
        """Put every policy back as it was, but for those that someone else has set since."""
        for layer, before, ours in self._changed.values():
            if layer.dtype_policy is ours:
                layer.dtype_policy = before
        self._changed.clear()


def users_float32(
    placed: Sequence[Placed], said_of: Callable[[Any], Any] = lambda layer: layer.dtype_policy
) -> Iterator[Placed]:
    """The layers that their author made float32, unlike the rest of the model.

    In a mixed model those are its float32 layers. In a float32 one they are told by the policy
    object: layers share the one that was Keras's global policy, but for those given a `dtype` of
    their own. Layers read from a file share none, so where such are the rule they say nothing.
    """
    units = [u for u in placed if not isinstance(u.layer, keras.layers.InputLayer | keras.Model)]
    said = {id(unit.layer): said_of(unit.layer) for unit in placed}
    if any(said[id(unit.layer)].name.startswith("mixed_") for unit in units):
        alone = units
    else:
        shared = collections.Counter(id(said[id(unit.layer)]) for unit in units)
        alone = [unit for unit in units if _alone(unit, said, shared)]
        if len(alone) == len(units) or len(alone) > max(2, len(units) // 2):
            return
    yield from (unit for unit in alone if said[id(unit.layer)].name == "float32")


def _alone(unit: Placed, said: Mapping[int, Any], shared: Mapping[int, int]) -> bool:
    """Whether only a layer and what it holds have its policy object."""
    policy = said[id(unit.layer)]
    top = unit
    while top.parent is not None and said[id(top.parent.layer)] is policy:
        top = top.parent
    if isinstance(top.layer, keras.Model):
        return False
    inside = [top.layer, *top.layer._flatten_layers(include_self=False)]
    return shared[id(policy)] <= len({id(each) for each in inside if said.get(id(each)) is policy})


def low_precision(placed: Sequence[Placed]) -> str:
    """Say what in the model is below float32 before anything was applied; empty if nothing is."""
    found: dict[str, list[str]] = {}
    for unit in placed:
        policy = effective(unit.layer)
        if policy.quantization_mode is not None:
            found.setdefault(f"quantised ({policy.name})", []).append(unit.path or "the model")
        elif any(_sixteen_bit(variable.dtype) for variable in _own_variables(unit.layer)):
            found.setdefault("16-bit weights", []).append(unit.path or "the model")
        elif _sixteen_bit(policy.compute_dtype):
            found.setdefault(f"policy {policy.name}", []).append(unit.path or "the model")
    return "; ".join(f"{what}: {_some(paths)}" for what, paths in found.items())


def _own_variables(layer: Any) -> list[Any]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _sixteen_bit(dtype: Any) -> bool:
    return str(dtype) in ("float16", "bfloat16")


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


@contextmanager
def global_policy_set(policy: Policy) -> Iterator[None]:
    """Hold `policy` as Keras's global one, and put the former one back."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(keras_name(policy))
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
