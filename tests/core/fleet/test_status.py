"""What a folder of profiles says: ages, software that differs, prices, what to verify again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.fleet.status import VERIFY_AFTER_DAYS, FleetStatus, TypeStatus, fleet_status
from autoprec.core.profile import Profile
from autoprec.errors import UsageError
from tests.core.example_profile import HERE, PROFILE

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
A100 = Fingerprint(DeviceKind.CUDA, "nvidia-a100", "NVIDIA A100-SXM4-40GB", 40)
L40 = Fingerprint(DeviceKind.CUDA, "nvidia-l40", "NVIDIA L40", 48)
L4 = Fingerprint(DeviceKind.CUDA, "nvidia-l4", "NVIDIA L4", 24)


def made_on(fingerprint: Fingerprint, **fields: Any) -> Profile:
    device = replace(
        PROFILE.device,
        kind=fingerprint.kind,
        name=fingerprint.name,
        family=fingerprint.family,
        fingerprint=fingerprint,
    )
    return replace(PROFILE, device=device, **fields)


def status(*profiles: Profile, prices: dict[str, float] | None = None, **here: str) -> FleetStatus:
    named = {f"{number}.yaml": each for number, each in enumerate(profiles)}
    return fleet_status(named, now=NOW, here=here, prices=prices or {})


def only(found: FleetStatus) -> TypeStatus:
    (row,) = found.types
    return row


def test_an_age_is_counted_in_days_whatever_the_time_zone() -> None:
    assert only(status(PROFILE)).age_days == 5.0
    elsewhere = replace(PROFILE, created="2026-11-25T08:00:00-04:00")
    assert only(status(elsewhere)).age_days == 0.0


def test_a_fresh_profile_with_the_software_from_here_needs_nothing() -> None:
    found = status(PROFILE, torch="2.13.1", autoprec="0.1.0", python="3.13.0")
    assert only(found).verify == ()
    assert found.drift == ()


def test_an_old_profile_and_one_without_a_date_are_to_be_verified() -> None:
    limit = replace(PROFILE, created="2026-08-27T12:00:00Z")
    assert only(status(limit)).age_days == VERIFY_AFTER_DAYS
    assert only(status(limit)).verify == ()
    older = replace(PROFILE, created="2026-08-26T11:00:00Z")
    assert only(status(older)).verify == ("91 days old",)
    undated = only(status(replace(PROFILE, created="yesterday")))
    assert undated.age_days is None
    assert undated.verify == ("its date 'yesterday' cannot be read",)


def test_software_that_differs_from_here_is_told() -> None:
    found = status(PROFILE, torch="2.14.0")
    assert only(found).verify == ("made with torch 2.13.0+cpu, here is 2.14.0",)
    assert found.drift == ("torch: 2.13.0+cpu in 0.yaml; 2.14.0 here",)


def test_what_is_not_installed_here_differs_from_nothing() -> None:
    assert only(status(PROFILE)).verify == ()
    assert status(PROFILE).drift == ()


def test_of_two_profiles_that_differ_the_older_software_is_to_be_verified() -> None:
    old, new = made_on(L4, software={"torch": "2.9.1"}), made_on(L40, software={"torch": "2.13.0"})
    found = status(old, new)
    assert [row.verify for row in found.types] == [
        ("made with torch 2.9.1, another profile with 2.13.0",),
        (),
    ]
    assert found.drift == ("torch: 2.9.1 in 0.yaml; 2.13.0 in 1.yaml; not installed here",)


def test_profiles_of_different_frameworks_do_not_differ() -> None:
    found = status(made_on(L4, software={"torch": "2.13"}), made_on(L40, software={"keras": "3"}))
    assert found.drift == ()
    assert all(row.verify == () for row in found.types)


def test_an_earlier_version_of_the_task_is_to_be_verified_another_task_is_not() -> None:
    earlier = replace(PROFILE, created="2026-11-01T00:00:00Z")
    later = replace(PROFILE, task=replace(PROFILE.task, sha256="1" * 64))
    assert [row.verify for row in status(later, earlier).types] == [
        (),
        ("tuned for an earlier version of model.py",),
    ]
    other = replace(earlier, task=replace(PROFILE.task, file="other.py", sha256="2" * 64))
    assert all(row.verify == () for row in status(later, other).types)


def test_an_inconclusive_or_partial_tuning_is_to_be_verified() -> None:
    evidence = replace(PROFILE.evidence, inconclusive="too wide", not_covered=("the proof",))
    row = only(status(replace(PROFILE, evidence=evidence)))
    assert row.verify == ("inconclusive: too wide", "not covered: the proof")


def test_a_rehearsal_has_no_speed() -> None:
    row = only(status(made_on(replace(HERE, rehearsal=True)), prices={"zen4": 1.0}))
    assert row.samples_per_second is None
    assert row.samples_per_price is None
    assert "rehearsal" in row.verify[0]


def test_a_price_buys_the_samples_of_an_hour_for_a_unit_of_it() -> None:
    rows = status(made_on(A100), made_on(HERE), prices={"a100": 1.8}).types
    assert [row.price_per_hour for row in rows] == [1.8, None]
    assert rows[0].samples_per_price == pytest.approx(200.0 * 3600 / 1.8)
    assert rows[1].samples_per_price is None


@pytest.mark.parametrize("name", ["a100", "A100", "nvidia-a100", "a100 40gb", "NVIDIA A100"])
def test_a_price_is_found_by_words_of_the_family_or_the_name(name: str) -> None:
    assert only(status(made_on(A100), prices={name: 2.0})).price_per_hour == 2.0


def test_a_price_is_matched_by_whole_words() -> None:
    rows = status(made_on(L4), made_on(L40), prices={"l4": 1.0}).types
    assert [row.price_per_hour for row in rows] == [1.0, None]


def test_the_price_with_more_words_counts() -> None:
    rows = status(made_on(A100), made_on(L4), prices={"nvidia": 1.0, "nvidia a100": 2.0}).types
    assert [row.price_per_hour for row in rows] == [2.0, 1.0]


def test_two_prices_that_match_equally_well_are_refused() -> None:
    with pytest.raises(UsageError, match=r"two prices for NVIDIA A100.*a100.*nvidia|nvidia.*a100"):
        status(made_on(A100), prices={"nvidia": 1.0, "a100": 2.0})


@pytest.mark.parametrize("name", ["h100", "-", "l"])
def test_a_price_of_nothing_here_lists_what_is(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        status(made_on(L4), made_on(HERE), prices={name: 1.0})
    assert str(refused.value).endswith("nvidia-l4 (NVIDIA L4), amd-zen4 (AMD EPYC)")


@pytest.mark.parametrize("cost", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cost_is_a_positive_number(cost: float) -> None:
    with pytest.raises(UsageError, match="a cost per hour above 0"):
        status(made_on(L4), prices={"l4": cost})
