"""Compares two profiles: what differs in recipe, device, software, task and claims."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.profile import Profile
from autoprec.core.recipe import plain_recipe


@dataclass(frozen=True)
class Difference:
    """One value that differs, by its key in the file; None where a profile does not have it."""

    key: str
    first: object
    second: object


@dataclass(frozen=True)
class ProfileDiff:
    """What differs between two profiles, by subject; the claims are measured, so they always do."""

    recipe: tuple[Difference, ...]
    task: tuple[Difference, ...]
    device: tuple[Difference, ...]
    software: tuple[Difference, ...]
    claims: tuple[Difference, ...]

    @property
    def same_recipe(self) -> bool:
        """Return whether both profiles train alike."""
        return not self.recipe


def compare_profiles(first: Profile, second: Profile) -> ProfileDiff:
    """Return what differs between two profiles."""
    both = (first, second)
    return ProfileDiff(
        recipe=_differences(*(plain_recipe(each.recipe) for each in both)),
        task=_differences(*(to_plain(each.task) for each in both)),
        device=_differences(*(to_plain(each.device.fingerprint) for each in both)),
        software=_differences(*(dict(each.software) for each in both)),
        claims=_differences(*map(_claims, both)),
    )


def _claims(profile: Profile) -> dict[str, Any]:
    evidence = profile.evidence
    return {
        "speedup": to_plain(evidence.speedup),
        "throughput": to_plain(evidence.throughput),
        "present": to_plain(evidence.present),
        "inconclusive": evidence.inconclusive or None,
        "verdict": evidence.parity.verdict,
        "loss_deviation": evidence.parity.loss_deviation,
        "trajectory_deviation": evidence.parity.trajectory_deviation,
        "samples_per_second": evidence.chosen.samples_per_second,
        "peak_memory_bytes": evidence.chosen.peak_memory_bytes,
    }


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Difference, ...]:
    ours, theirs = dict(_flat(first)), dict(_flat(second))
    return tuple(
        Difference(key, ours.get(key), theirs.get(key))
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key)
    )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value below a mapping by its dotted key; lists are values."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
