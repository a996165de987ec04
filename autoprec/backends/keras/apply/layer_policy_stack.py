"""The policies that recipes give to one layer: which is in force, and what the layer's own one is.

Several recipes may be applied to a layer that models share, and end in any order. So the layer
records what it was given: the latest is in force, and its own returns when the last one ends.
"""

from __future__ import annotations

from typing import Any

import keras

#: Where a layer holds what recipes gave it.
_GIVEN_ATTRIBUTE = "_autoprec_given"

#: Where a policy that is set for all layers to come holds the one it was set in place of.
_REPLACED_ATTRIBUTE = "_autoprec_before"


def effective_policy(layer: Any) -> Any:
    """Return the policy in force for `layer`, looked up where it has a map of them."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path] if layer.path else policy.default_policy
    return policy


def policy_replacing(before: Any, name: str) -> Any:
    """Make a policy `name` for future layers, which otherwise would have had `before`."""
    policy = keras.DTypePolicy(name)
    vars(policy)[_REPLACED_ATTRIBUTE] = before
    return policy


def own_policy(layer: Any) -> Any:
    """Return the policy that `layer` would have without a recipe; files name that one."""
    given = GivenPolicies.of(layer)
    policy = effective_policy(layer) if given is None else given.own
    return vars(policy).get(_REPLACED_ATTRIBUTE, policy)


class GivenPolicies:
    """The policies that recipes gave one layer, the latest last, and the one it had before."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.own = effective_policy(layer)
        self.policies: list[Any] = []

    @staticmethod
    def of(layer: Any) -> GivenPolicies | None:
        """Return what `layer` was given; None where other code has set its policy since."""
        found = vars(layer).get(_GIVEN_ATTRIBUTE)
        return found if found is not None and found.holds() else None

    @staticmethod
    def to(layer: Any, name: str) -> tuple[GivenPolicies, Any]:
        """Give `layer` the policy `name`; return the record and the policy, to be taken back."""
        found = GivenPolicies.of(layer) or GivenPolicies(layer)
        now = effective_policy(layer)
        policy = now if now.name == name and not found.policies else keras.DTypePolicy(name)
        found.policies.append(policy)
        layer.dtype_policy = policy
        vars(layer)[_GIVEN_ATTRIBUTE] = found
        return found, policy

    def holds(self) -> bool:
        """Say whether the layer's policy is the last that was given."""
        return bool(self.policies) and effective_policy(self.layer) is self.policies[-1]

    def take_back(self, policy: Any) -> None:
        """Let the layer have what it would have if it had not been given `policy`."""
        held = self.holds()
        self.policies = [each for each in self.policies if each is not policy]
        if held:
            self.layer.dtype_policy = self.policies[-1] if self.policies else self.own
        if not self.policies and vars(self.layer).get(_GIVEN_ATTRIBUTE) is self:
            del vars(self.layer)[_GIVEN_ATTRIBUTE]
