"""Sets dtype policies: globally before a model is built, and layer by layer on a built one.

In place means in place: weights, names and layer objects stay; only what a layer computes in
changes. A layer that the user made float32 in a model that is otherwise not is their island and
stays, as do layers that only prepare the model's inputs;
layers with 16-bit weights, quantised ones and those without floating arithmetic are left alone.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from autoprec.backends.keras.apply.hooks import Hook, Wraps
from autoprec.backends.keras.apply.layer_names import Placed
from autoprec.backends.keras.apply.layer_policies import Given, effective, own
from autoprec.backends.keras.apply.preprocessing_layers import preparing
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
    """Return Keras's name for `policy`."""
    return _NAMES[policy]


class SavedConfig(Hook):
    """A layer's `get_config`, saying the policy it had: a file says what it would without us."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.get_config)
        self.layer = layer

    def __call__(self) -> dict[str, Any]:
        """Return the layer's configuration; one that says no dtype goes on saying none."""
        config = dict(self.original())
        if "dtype" in config and Given.of(self.layer) is not None:
            config["dtype"] = keras.dtype_policies.serialize(own(self.layer))
        return config


class LayerPolicies:
    """The policies that one recipe gives a model's layers in place; `restore` takes them back."""

    def __init__(self, wraps: Wraps) -> None:
        self._wraps = wraps
        self._given: dict[int, tuple[Given, Any]] = {}

    def apply(
        self, placed: Sequence[Placed], policy: Policy, islands: Sequence[Placed]
    ) -> tuple[Placed, ...]:
        """Give every layer `policy` but `islands`; return the user's own islands that were kept."""
        name = keras_name(policy)
        users: set[int] = set()
        prepare: set[int] = set()
        if policy.mixed:
            users = {id(unit.layer) for unit in users_float32(placed)}
            prepare = preparing(placed)
        kept = []
        for unit in placed:
            if unit in islands:
                self.set(unit, "float32")
            elif not _ours_to_change(unit.layer):
                continue
            elif id(unit.layer) in users:
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
        inherited = {id(given.own) for given, _ in self._given.values()}
        inherited.add(id(keras.config.dtype_policy()))
        kept = []
        for unit in new:
            current = effective(unit.layer)
            if unit in islands:
                self.set(unit, "float32")
            elif current.name == "float32" and id(current) not in inherited:
                kept.append(unit)
            elif _ours_to_change(unit.layer):
                self.set(unit, keras_name(policy))
        return tuple(kept)

    def set(self, unit: Placed, name: str) -> None:
        """Give one unit, with all its members, the policy `name`."""
        for layer in unit.members:
            if effective(layer).name not in _OURS_TO_CHANGE:
                continue
            former = self._given.pop(id(layer), None)
            if former is not None:
                former[0].take_back(former[1])
            else:
                self._wraps.install(layer, "get_config", SavedConfig(layer))
            self._given[id(layer)] = Given.to(layer, name)

    def restore(self) -> None:
        """Take every policy back, but for those that someone else has set since."""
        for given, policy in self._given.values():
            given.take_back(policy)
        self._given.clear()


def _ours_to_change(layer: Any) -> bool:
    policy = effective(layer)
    return (
        policy.name in _OURS_TO_CHANGE
        and policy.quantization_mode is None
        and not isinstance(layer, keras.layers.InputLayer)
    )


def users_float32(placed: Sequence[Placed]) -> Iterator[Placed]:
    """Yield the layers that their author made float32, unlike the rest of the model.

    In a mixed model those are its float32 layers. In a float32 one they are told by the policy
    object: layers share the one that was Keras's global policy, but for those given a `dtype` of
    their own. Layers read from a file share none, so where such are the rule they say nothing.
    """
    units = [u for u in placed if not isinstance(u.layer, keras.layers.InputLayer | keras.Model)]
    said = {id(unit.layer): own(unit.layer) for unit in placed}
    if any(said[id(unit.layer)].name.startswith("mixed_") for unit in units):
        alone = units
    else:
        shared = collections.Counter(id(said[id(unit.layer)]) for unit in units)
        alone = [unit for unit in units if _alone(unit, said, shared)]
        if len(alone) == len(units) or len(alone) > max(2, len(units) // 2):
            return
    yield from (unit for unit in alone if said[id(unit.layer)].name == "float32")


def _alone(unit: Placed, said: Mapping[int, Any], shared: Mapping[int, int]) -> bool:
    """Say whether only a layer and what it holds have its policy object."""
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
