"""Sets dtype policies: globally before a model is built, and layer by layer on a built one.

In place means in place: weights, names and layer objects stay; only what a layer computes in
changes. A layer that the user made float32 in an otherwise mixed model is their island and stays;
layers with 16-bit weights, quantised ones and those without floating arithmetic are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from autoprec.backends.keras.layers import Placed
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


#: Marks, in a policy map that matches no path, a layer that is float32 only as it was saved.
_MARK = "autoprec/output"


def saved_as_float32() -> Any:
    """The policy an output layer is saved under: float32 on loading, and known to be ours.

    The mark tells it from a layer that the user made float32, so that applying a mixed recipe to
    the loaded model computes what the saved one did.
    """
    return keras.dtype_policies.DTypePolicyMap("float32", {_MARK: keras.DTypePolicy("float32")})


class LayerPolicies:
    """The policies of one model's layers, changed in place and put back by `restore`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any]] = []

    def apply(
        self, placed: Sequence[Placed], policy: Policy, islands: Sequence[Placed]
    ) -> tuple[Placed, ...]:
        """Give every layer `policy` but `islands`; return the user's own islands that were kept."""
        name = keras_name(policy)
        already_mixed = any(effective(p.layer).name.startswith("mixed_") for p in placed)
        kept = []
        for unit in placed:
            current = effective(unit.layer)
            if unit in islands:
                self.set(unit, "float32")
            elif current.name not in _OURS_TO_CHANGE or current.quantization_mode is not None:
                continue
            elif already_mixed and _is_users_float32(unit, current) and policy.mixed:
                kept.append(unit)
            else:
                self.set(unit, name)
        return tuple(kept)

    def set(self, unit: Placed, name: str) -> None:
        """Give one unit, with all its members, the policy `name`."""
        for layer in unit.members:
            current = effective(layer)
            if current.name in _OURS_TO_CHANGE and current.name != name:
                self._before.append((layer, current))
                layer.dtype_policy = name

    def restore(self) -> None:
        """Put every policy back as it was."""
        while self._before:
            layer, policy = self._before.pop()
            layer.dtype_policy = policy


def _is_users_float32(unit: Placed, current: Any) -> bool:
    if current.name != "float32" or isinstance(unit.layer, keras.layers.InputLayer | keras.Model):
        return False
    policy = unit.layer.dtype_policy
    return not (isinstance(policy, keras.dtype_policies.DTypePolicyMap) and _MARK in policy)


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


def global_policy(policy: Policy, islands: Sequence[str] = ()) -> Any:
    """The policy to set before a model is built; a map by layer path where there are islands."""
    name = keras_name(policy)
    if not islands or not policy.mixed:
        return keras.DTypePolicy(name)
    rules = {path: keras.DTypePolicy("float32") for path in islands}
    return keras.dtype_policies.DTypePolicyMap(name, rules)


@contextmanager
def global_policy_set(policy: Policy) -> Iterator[None]:
    """Hold `policy` as Keras's global one, and put the former one back."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(keras_name(policy))
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
