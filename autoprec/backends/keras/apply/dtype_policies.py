"""Sets dtype policies: globally before a model is built, and layer by layer on a built one.

In place means in place: weights, names and layer objects stay; only what a layer computes in
changes. A layer that the user made float32 in a model that is otherwise not is their island and
stays, as do layers that only prepare the model's inputs, mask them or assign their own weights;
layers with 16-bit weights, quantised ones and those without floating arithmetic are left alone.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.apply.layer_policy_stack import (
    GivenPolicies,
    effective_policy,
    own_policy,
)
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.apply.nested_outputs import to_float32
from autoprec.backends.keras.apply.preprocessing_layers import input_preparing_layers
from autoprec.backends.keras.dtypes import dtype_name, is_low
from autoprec.core.dtypes import Policy, own_precision

#: Keras's policy names for ours: TF32 is a mode of float32 arithmetic, not a Keras policy.
_NAMES = {
    Policy.FLOAT32: "float32",
    Policy.TF32: "float32",
    Policy.MIXED_BFLOAT16: "mixed_bfloat16",
    Policy.MIXED_FLOAT16: "mixed_float16",
}

#: Layers that assign weights when they are called: in 16 bits the weights would stay rounded.
WEIGHT_WRITERS = (keras.layers.SpectralNormalization,)

#: Layers that compare inputs with a number of the user's, which rounded inputs may not be equal to.
_COMPARING_LAYERS = (keras.layers.Masking,)

_CHANGEABLE_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def keras_name(policy: Policy) -> str:
    """Return Keras's name for `policy`."""
    return _NAMES[policy]


class Float32Penalty(Hook):
    """A layer's `activity_regularizer`, given its outputs in float32.

    It sums over a whole batch: in float16 the sum overflows where every output is small.
    """

    def __call__(self, outputs: Any) -> Any:
        """Return what is added to the loss."""
        return self.original(to_float32(outputs))


class SavedConfig(Hook):
    """A layer's `get_config`, saying the policy it had: a file says what it would without us."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.get_config)
        self.layer = layer

    def __call__(self) -> dict[str, Any]:
        """Return the layer's configuration; one that says no dtype goes on saying none."""
        penalty = given = self.layer.activity_regularizer
        while isinstance(given, Float32Penalty):
            given = given.original
        object.__setattr__(self.layer, "activity_regularizer", given)
        try:
            config = dict(self.original())
        finally:
            object.__setattr__(self.layer, "activity_regularizer", penalty)
        if "dtype" in config and GivenPolicies.of(self.layer) is not None:
            config["dtype"] = keras.dtype_policies.serialize(own_policy(self.layer))
        return config


class LayerPolicies:
    """The policies that one recipe gives a model's layers in place; `restore` takes them back."""

    def __init__(self, hooks: InstalledHooks) -> None:
        self._hooks = hooks
        self._given: dict[int, tuple[GivenPolicies, Any]] = {}

    def apply(
        self, units: Sequence[LayerUnit], policy: Policy, islands: Sequence[LayerUnit]
    ) -> tuple[LayerUnit, ...]:
        """Give every layer `policy` but `islands`; return the others that are kept in float32."""
        name = keras_name(policy)
        users: set[int] = set()
        prepare: set[int] = set()
        if policy.mixed:
            users = {id(unit.layer) for unit in user_float32_layers(units)}
            prepare = input_preparing_layers(units)
        kept = []
        for unit in units:
            if unit in islands:
                self.set(unit, "float32")
            elif not _is_changeable(unit.layer):
                continue
            elif id(unit.layer) in users:
                kept.append(unit)
            elif id(unit.layer) in prepare or (policy.mixed and _is_exact(unit)):
                self.set(unit, "float32")
                kept.append(unit)
            else:
                self.set(unit, name)
        return tuple(kept)

    def extend(
        self, new: Sequence[LayerUnit], policy: Policy, islands: Sequence[LayerUnit]
    ) -> tuple[LayerUnit, ...]:
        """Do the same to layers that were made later, inside the first ones."""
        inherited = {id(given.own) for given, _ in self._given.values()}
        inherited.add(id(keras.config.dtype_policy()))
        kept = []
        for unit in new:
            current = effective_policy(unit.layer)
            if unit in islands:
                self.set(unit, "float32")
            elif current.name == "float32" and id(current) not in inherited:
                kept.append(unit)
            elif policy.mixed and _is_exact(unit):
                self.set(unit, "float32")
                kept.append(unit)
            elif _is_changeable(unit.layer):
                self.set(unit, keras_name(policy))
        return tuple(kept)

    def set(self, unit: LayerUnit, name: str) -> None:
        """Give one unit, with all its members, the policy `name`."""
        for layer in unit.members:
            if effective_policy(layer).name not in _CHANGEABLE_POLICIES:
                continue
            former = self._given.pop(id(layer), None)
            if former is not None:
                former[0].take_back(former[1])
            else:
                self._hooks.install(layer, "get_config", SavedConfig(layer))
                if (penalty := layer.activity_regularizer) is not None:
                    hook = Float32Penalty(penalty)
                    self._hooks.install(layer, "activity_regularizer", hook)
            self._given[id(layer)] = GivenPolicies.to(layer, name)

    def restore(self) -> None:
        """Take every policy back, except those that other code has set since."""
        for given, policy in self._given.values():
            given.take_back(policy)
        self._given.clear()


def _is_exact(unit: LayerUnit) -> bool:
    return isinstance(unit.layer, (*WEIGHT_WRITERS, *_COMPARING_LAYERS))


def _is_changeable(layer: Any) -> bool:
    policy = effective_policy(layer)
    return (
        policy.name in _CHANGEABLE_POLICIES
        and policy.quantization_mode is None
        and not isinstance(layer, keras.layers.InputLayer)
    )


def user_float32_layers(units: Sequence[LayerUnit]) -> Iterator[LayerUnit]:
    """Yield the layers that their author made float32, unlike the rest of the model.

    Layers share the policy object that was Keras's global policy, but for those given a `dtype` of
    their own. Where they share none, as layers read from a file do, the float32 ones of a mixed
    model were made so; those of a float32 model say nothing where objects of their own are the
    rule.
    """
    layers = [u for u in units if not isinstance(u.layer, keras.layers.InputLayer | keras.Model)]
    policies = {id(unit.layer): _policy_given_to(unit) for unit in units}
    shared = collections.Counter(id(policies[id(unit.layer)]) for unit in layers)
    mixed = [u for u in layers if policies[id(u.layer)].name.startswith("mixed_")]
    most = max(shared.values(), default=0)
    if mixed and (most == 1 or any(shared[id(policies[id(u.layer)])] == most for u in mixed)):
        with_own_policy = layers
    else:
        with_own_policy = [
            unit for unit in layers if _has_own_policy_object(unit, policies, shared)
        ]
        if len(with_own_policy) == len(layers) or len(with_own_policy) > max(2, len(layers) // 2):
            return
    yield from (unit for unit in with_own_policy if policies[id(unit.layer)].name == "float32")


def _policy_given_to(unit: LayerUnit) -> Any:
    """Return a layer's policy, or the one around it where the layer says no other.

    `Bidirectional` makes its layers anew from their configuration, with policy objects of their
    own.
    """
    own = own_policy(unit.layer)
    if unit.parent is None or not isinstance(unit.parent.layer, keras.layers.Bidirectional):
        return own
    around = own_policy(unit.parent.layer)
    return around if around.name == own.name else own


def _has_own_policy_object(
    unit: LayerUnit, policies: Mapping[int, Any], shared: Mapping[int, int]
) -> bool:
    """Say whether only a layer and what it holds have its policy object."""
    policy = policies[id(unit.layer)]
    top = unit
    while top.parent is not None and policies[id(top.parent.layer)] is policy:
        top = top.parent
    if isinstance(top.layer, keras.Model):
        return False
    inside = [top.layer, *top.layer._flatten_layers(include_self=False)]
    return shared[id(policy)] <= len(
        {id(each) for each in inside if policies.get(id(each)) is policy}
    )


def unreached(
    units: Sequence[LayerUnit], policy: Policy, islands: Sequence[LayerUnit]
) -> list[str]:
    """Say that a mixed policy does nothing where no layer with weights computes in its dtype.

    A layer that is not built yet may get weights.
    """
    members = [each for unit in units if unit not in islands for each in unit.members]
    layers = [each for each in members if _own_variables(each)]
    found = {effective_policy(each).name for each in layers}
    computes = policy.compute_dtype.value
    reached = any(
        dtype_name(each.compute_dtype) == computes
        for each in members
        if _own_variables(each) or not each.built
    )
    if not policy.mixed or not layers or reached:
        return []
    return [
        f"{units[0].layer.name} gains nothing by {policy}: its layers' dtype is "
        f"{' and '.join(sorted(found))}, which is left as it is. Build them with Keras's default "
        "dtype, float32, and let the profile choose what to compute in"
    ]


def low_precision(units: Sequence[LayerUnit]) -> str:
    """Say what in the model is no float32 under a float32 recipe; empty if nothing is."""
    found: dict[str, list[str]] = {}
    for unit in units:
        policy = effective_policy(unit.layer)
        if policy.quantization_mode is not None:
            found.setdefault(f"quantised ({policy.name})", []).append(unit.path or "the model")
        elif any(is_low(variable.dtype) for variable in _own_variables(unit.layer)):
            found.setdefault("16-bit weights", []).append(unit.path or "the model")
        elif dtype_name(policy.compute_dtype) == "float64":
            found.setdefault("policy float64", []).append(unit.path or "the model")
        elif is_low(policy.compute_dtype) and policy.name not in _CHANGEABLE_POLICIES:
            found.setdefault(f"policy {policy.name}", []).append(unit.path or "the model")
    return "; ".join(f"{what}: {_first_few(paths)}" for what, paths in found.items())


def replaced_policies(units: Sequence[LayerUnit]) -> list[str]:
    """Say that mixed policies of the model's own give way to every recipe's, float32's too."""
    found: dict[str, list[str]] = {}
    for unit in units:
        policy = effective_policy(unit.layer)
        if is_low(policy.compute_dtype) and policy.name in _CHANGEABLE_POLICIES:
            found.setdefault(policy.name, []).append(unit.path or "the model")
    return [
        f"the model sets {name} itself ({_first_few(paths)}). Every recipe has its own policy in "
        f"place of that, float32's too: `baseline={name}` also says what is gained over it"
        for name, paths in found.items()
    ]


def weights_in(model: Any) -> str:
    """Return the 16-bit dtype that the model's weights are kept in; empty where in none."""
    return own_precision(
        (dtype_name(each.dtype), math.prod(each.shape), each.trainable) for each in model.weights
    )


def _own_variables(layer: Any) -> list[Any]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _first_few(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
