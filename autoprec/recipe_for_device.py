"""Chooses the recipe that a profile, or a folder of them, gives on the device of a model.

If none fits, it is float32 or a policy measured to be faster; the hardware's rules choose only
on request.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoprec.core.device.dtype_support import distrust_native_support
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.merging import merge
from autoprec.core.device.observation import DeviceKind, Observation, kind_of_framework_device
from autoprec.core.device.policies import measured_choice, propose
from autoprec.core.device.probe_result import FrameworkFact, MachineObservation, Unusable
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.core.profile.fit import carry_over, check_fit, select_profile
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning, ProfileMismatch, UsageError
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.probes.observe import observe
from autoprec.measurement_cache import with_remembered_measurements
from autoprec.profiles import load_folder, load_profile

if TYPE_CHECKING:
    from autoprec.backends.protocol import Backend


def recipe_for(
    profile: str | Path | Profile,
    address: str,
    backend: Backend,
    *,
    strict: bool = False,
    fallback: Literal["measured", "rules"] = "measured",
) -> tuple[Recipe, DeviceFacts]:
    """Return the recipe of the profile that fits the device, or the fallback's, and its facts."""
    if isinstance(profile, Profile):
        profiles = {"the profile": profile}
    elif Path(profile).is_dir():
        profiles = load_folder(Path(profile))
    else:
        profiles = {str(profile): load_profile(profile)}
    machine = observe(on_wait=lambda text: print(f"autoprec: {text}", file=sys.stderr))
    facts, software, framework = (
        facts_of(address, backend, machine),
        backend.versions(),
        backend.name,
    )
    fits = {
        name: check_fit(each, facts.fingerprint, software, framework)
        for name, each in profiles.items()
    }
    chosen = select_profile(fits)
    if chosen is not None:
        made = profiles[chosen]
        recipe, left_out = carry_over(
            made.recipe, made.task.framework, framework, backend.capabilities.knobs
        )
        for warning in (*fits[chosen].warnings, *left_out):
            warnings.warn(f"{chosen}: {warning}", AutoprecWarning, stacklevel=4)
        return recipe, facts
    reasons = [f"{name}: {'; '.join(fit.problems)}" for name, fit in fits.items()]
    why = "; ".join((*reasons, *unusable_accelerators(machine.unusable, profiles.values())))
    if strict:
        raise ProfileMismatch(f"no profile fits this device ({why}); tune on it, or drop strict")
    if all(each.device.fingerprint.rehearsal for each in profiles.values()):
        raise ProfileMismatch(f"no profile to apply: {why}. Run `autoprec tune` here")
    tuned = next(iter(profiles.values()))
    chosen_policy, said = _fallback(facts, address, backend, machine.frameworks, tuned, fallback)
    warnings.warn(f"no profile fits this device ({why}): {said}", AutoprecWarning, stacklevel=4)
    return tuned.recipe.plain().with_policy(chosen_policy), facts


def _fallback(
    facts: DeviceFacts,
    address: str,
    backend: Backend,
    frameworks: Sequence[FrameworkFact],
    tuned: Profile,
    how: Literal["measured", "rules"],
) -> tuple[Policy, str]:
    """Choose the policy for a device that no profile fits; return it and what to tell the user."""
    tune_here = f"Run `{tuned.task.tune_command()}` here"
    missing_kernels = backend.missing_kernels(address)
    by_rules = propose(distrust_native_support(facts, missing_kernels)).recommended
    if how == "rules":
        return by_rules, f"{by_rules} by the hardware's rules, not measured. {tune_here}"
    software = dict(backend.versions())
    if not missing_kernels:  # of another framework's products nothing would follow
        software |= {each.name: each.version for each in frameworks}
    known = with_remembered_measurements(facts, software)
    measured = measured_choice(distrust_native_support(known, missing_kernels))
    said = f"training in {measured.policy}, because {measured.reasons[0]}"
    if measured.policy is not Policy.FLOAT32:
        said += "; that it trains like float32 is not checked"
    said += f". {tune_here}"
    if by_rules not in (measured.policy, Policy.FLOAT32):
        said += f", or take {by_rules} unmeasured with fallback='rules'"
    return measured.policy, "; ".join((said, *known.notes[len(facts.notes) :]))


def facts_of(address: str, backend: Backend, machine: MachineObservation) -> DeviceFacts:
    """Return the facts of the framework's device, as the framework reports it if no probe does."""
    kind, _, index = address.partition(":")
    kind = kind_of_framework_device(kind, {each.kind for each in machine.devices})
    number = int(index) if index and kind not in ("cpu", "mps") else 0
    said = backend.observe(address) if kind == "xpu" else None
    device = next((d for d in machine.devices if _is_same_device(d, kind, number, said)), None)
    if device is None:
        if kind not in {each.value for each in DeviceKind}:
            raise UsageError(f"device {address!r} given, expected KIND[:INDEX] such as cuda:0")
        device = said or backend.observe(address) or Observation(DeviceKind(kind), number)
        device = replace(device, rehearsal=any(each.rehearsal for each in machine.devices))
        warnings.warn(
            f"no probe sees {address} (NVML or the vendor's driver shows none here): it is taken "
            f"for {device.name or 'an unknown device'}, as {backend.name} calls it. What can be "
            "seen `autoprec probe` says",
            AutoprecWarning,
            stacklevel=5,
        )
    return merge(device, load_catalogue().family_of(device))


def _is_same_device(probed: Observation, kind: str, number: int, said: Observation | None) -> bool:
    """Return whether a probed device is the framework's: by its number, an Intel GPU by its PCI id.

    `said` is what the framework reports of an Intel GPU; None for other devices.
    """
    if probed.kind != kind:
        return False
    if said is None or not said.pci:
        return probed.index == number
    return probed.pci == said.pci and said.uuid in ("", probed.uuid)


def unusable_accelerators(
    unusable: Sequence[Unusable], profiles: Iterable[Profile]
) -> tuple[str, ...]:
    """Return what is said of unusable accelerators of a kind that a profile was made on."""
    wanted = {each.device.fingerprint.kind for each in profiles}
    return tuple(each.text for each in unusable if each.kind in wanted)
