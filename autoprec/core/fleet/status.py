"""What a folder of profiles says of the devices they were tuned on.

Their ages, where their software differs, what a price buys, and which should be verified again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter

from autoprec.core.device.facts import Fingerprint
from autoprec.core.profile import Profile
from autoprec.core.profile.fit import minor_version
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError

#: Drivers and libraries change within a quarter of a year; an older profile should be verified.
VERIFY_AFTER_DAYS = 90

_SECONDS_PER_HOUR = 3600
_SECONDS_PER_DAY = 86400

#: No profile depends on Python's own version.
_NOT_COMPARED = {"python"}


@dataclass(frozen=True)
class TypeStatus:
    """One device type, by its profile; `samples_per_price` is what one unit of the currency buys.

    None stands for what is not known: the age of a profile without a date, the speed of one made in
    a rehearsal, the price of a device for which none was given. `verify` holds the reasons to
    verify the profile again, empty if there are none.
    """

    file: str
    fingerprint: Fingerprint
    recipe: Recipe
    created: str
    age_days: float | None
    software: Mapping[str, str]
    samples_per_second: float | None
    price_per_hour: float | None
    samples_per_price: float | None
    verify: tuple[str, ...]

    @property
    def device(self) -> str:
        """Return the device's own name, else its family's."""
        return self.fingerprint.name or self.fingerprint.family


@dataclass(frozen=True)
class FleetStatus:
    """All device types of a folder; `drift` says which software differs between them and here."""

    types: tuple[TypeStatus, ...]
    drift: tuple[str, ...]


def fleet_status(
    profiles: Mapping[str, Profile],
    *,
    now: datetime,
    here: Mapping[str, str],
    prices: Mapping[str, float],
) -> FleetStatus:
    """Compare profiles, by file name, with each other, with `now` and the software installed here.

    `prices` maps names to costs per hour. A name is matched against the words of a device's name
    and family: "a100" is the price of "NVIDIA A100-SXM4-40GB". Raises `UsageError` for a name that
    matches nothing, and if two names match a device equally well.
    """
    _check_prices(profiles, prices)
    versions = {file: _versions(each) for file, each in profiles.items()}
    newest = _newest_by_task(profiles.values())
    types = []
    for file, profile in profiles.items():
        made, software = profile.device.fingerprint, versions[file]
        rate = None if made.rehearsal else profile.evidence.chosen.samples_per_second
        price = _price_of(made, prices)
        bought = rate * _SECONDS_PER_HOUR / price if rate and price else None
        age = _age_days(profile.created, now)
        reasons = _reasons_of_its_own(profile, age, newest)
        reasons += _older_software(software, versions.values(), here)
        known = (file, made, profile.recipe, profile.created, age, software)
        types.append(TypeStatus(*known, rate, price, bought, tuple(reasons)))
    return FleetStatus(tuple(types), _drift(versions, here))


def _versions(profile: Profile) -> dict[str, str]:
    known = {name: each for name, each in profile.software.items() if name not in _NOT_COMPARED}
    return {**known, "autoprec": profile.autoprec}


def _age_days(created: str, now: datetime) -> float | None:
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return (now - then).total_seconds() / _SECONDS_PER_DAY


# What should be verified again ------------------------------------------------------------------


def _newest_by_task(profiles: Iterable[Profile]) -> dict[str, Profile]:
    """Return the newest profile of each task file."""
    newest: dict[str, Profile] = {}
    for each in sorted(profiles, key=attrgetter("created"), reverse=True):
        newest.setdefault(each.task.file, each)
    return newest


def _reasons_of_its_own(
    profile: Profile, age: float | None, newest: Mapping[str, Profile]
) -> list[str]:
    """List the reasons that do not concern software."""
    reasons = []
    task, evidence = profile.task, profile.evidence
    if profile.device.fingerprint.rehearsal:
        reasons.append("made in a rehearsal, on a device that was only pretended")
    if evidence.inconclusive:
        reasons.append(f"inconclusive: {evidence.inconclusive}")
    reasons += [f"not covered: {each}" for each in evidence.not_covered]
    if task.sha256 != newest[task.file].task.sha256:
        reasons.append(f"tuned for an earlier version of {task.file}")
    if age is None:
        reasons.append(f"its date {profile.created!r} cannot be read")
    elif age > VERIFY_AFTER_DAYS:
        reasons.append(f"{age:.0f} days old")
    return reasons


def _older_software(
    own: Mapping[str, str], all_versions: Iterable[Mapping[str, str]], here: Mapping[str, str]
) -> list[str]:
    """List what is newer in another profile, or different here."""
    reasons, known = [], list(all_versions)
    for name, version in own.items():
        latest = max((each[name] for each in known if name in each), key=_version_key)
        if _version_key(latest) > _version_key(version):
            reasons.append(f"made with {name} {version}, another profile with {latest}")
        elif name in here and minor_version(here[name]) != minor_version(version):
            reasons.append(f"made with {name} {version}, here is {here[name]}")
    return reasons


def _version_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version's part that matters; none of them is text."""
    return tuple(int(each) for each in re.findall(r"\d+", minor_version(version)))


def _drift(versions: Mapping[str, Mapping[str, str]], here: Mapping[str, str]) -> tuple[str, ...]:
    """Say of each package whose versions differ which profiles have which, and what is here."""
    names = dict.fromkeys(name for each in versions.values() for name in each)
    said = []
    for name in names:
        files: dict[str, list[str]] = {}
        for file, each in versions.items():
            if name in each:
                files.setdefault(each[name], []).append(file)
        known = {minor_version(version) for version in files}
        local = here.get(name)
        if len(known) > 1 or (local is not None and {minor_version(local)} != known):
            parts = [f"{version} in {', '.join(where)}" for version, where in files.items()]
            parts += [f"{local} here"] if local is not None else ["not installed here"]
            said.append(f"{name}: {'; '.join(parts)}")
    return tuple(said)


# Prices -----------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    """Return the words of a name, so that "l4" is a word of "nvidia-l4" and not of "nvidia-l40"."""
    return frozenset(re.findall(r"[a-z0-9]+", text.lower()))


def _matches(name: str, made: Fingerprint) -> bool:
    return bool(_words(name)) and any(
        _words(name) <= _words(known) for known in (made.family, made.name)
    )


def _check_prices(profiles: Mapping[str, Profile], prices: Mapping[str, float]) -> None:
    known = [each.device.fingerprint for each in profiles.values()]
    for name, cost in prices.items():
        if not (math.isfinite(cost) and cost > 0):
            raise UsageError(f"price {name}={cost:g} given, expected a cost per hour above 0")
        if not any(_matches(name, each) for each in known):
            names = [f"{each.family} ({each.name})" if each.name else each.family for each in known]
            raise UsageError(
                f"price {name}={cost:g} given, but no profile is of such a device; expected "
                f"words of one of: {', '.join(dict.fromkeys(names))}"
            )


def _price_of(made: Fingerprint, prices: Mapping[str, float]) -> float | None:
    """Return a device's cost per hour: that of the name with the most words that match."""
    words = {name: len(_words(name)) for name in prices if _matches(name, made)}
    best, *others = sorted(words, key=lambda name: (words[name], name), reverse=True) or [""]
    if others and words[best] == words[others[0]]:
        raise UsageError(
            f"two prices for {made.name or made.family}: {best} and {others[0]}; give one, or name "
            "the device with more words"
        )
    return prices.get(best)
