"""What each rank gets of the machine, and what is refused before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.errors import TaskError, UsageError
from autoprec.tuning.ranks import (
    batch_of_rank,
    check_device_choice,
    check_engine,
    devices_of_ranks,
    peers_of,
    rank_threads,
    usable_cores,
)


def facts(kind: DeviceKind, index: int = 0, **observed: Any) -> DeviceFacts:
    seen = Observation(kind, index=index, **observed)
    return DeviceFacts(seen, family="some", title="Some device", dtypes={})


def gpus(count: int, kind: DeviceKind = DeviceKind.CUDA) -> tuple[DeviceFacts, ...]:
    return tuple(facts(kind, index) for index in range(count))


def test_each_rank_has_a_device_of_its_own() -> None:
    first, *others = gpus(4)
    assert devices_of_ranks(first, tuple(others), 1) == (first,)
    assert devices_of_ranks(first, tuple(others), 3) == (first, *others[:2])


def test_too_few_devices_are_refused_with_their_number() -> None:
    first, second = gpus(2)
    with pytest.raises(UsageError, match="`nproc=3` given, but there are 2 devices here"):
        devices_of_ranks(first, (second,), 3)


def test_kinds_without_a_library_for_gradients_are_refused() -> None:
    first, second = gpus(2, DeviceKind.XPU)
    with pytest.raises(UsageError, match="on cpu, cuda, rocm only, not on xpu"):
        devices_of_ranks(first, (second,), 2)


def test_ranks_on_a_cpu_share_it_and_none_is_left_without_a_processor() -> None:
    cpu = facts(DeviceKind.CPU, usable_cores=8, cores=4)
    assert devices_of_ranks(cpu, (), 8) == (cpu,)
    with pytest.raises(UsageError, match="may use 8 processors"):
        devices_of_ranks(cpu, (), 9)
    limited = facts(DeviceKind.CPU, usable_cores=8, core_quota=2.5)
    assert usable_cores(limited.observation) == 2
    with pytest.raises(UsageError, match="may use 2 processors"):
        devices_of_ranks(limited, (), 3)
    unknown = facts(DeviceKind.CPU)
    assert devices_of_ranks(unknown, (), 64) == (unknown,)


@pytest.mark.parametrize(
    ("nproc", "environment", "threads"),
    [
        (2, {}, "4"),
        (3, {}, "2"),
        (16, {}, "1"),
        (2, {"OMP_NUM_THREADS": "1"}, "1"),
        (2, {"OMP_NUM_THREADS": "16"}, "4"),
        (2, {"OMP_NUM_THREADS": "2,1"}, "4"),
        (2, {"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "2"}, "4"),
    ],
)
def test_the_ranks_threads_fit_the_processors(
    nproc: int, environment: dict[str, str], threads: str
) -> None:
    cpu = Observation(DeviceKind.CPU, usable_cores=16, cores=8)
    assert rank_threads(cpu, nproc, environment) == {"OMP_NUM_THREADS": threads}


def test_threads_are_left_alone_for_one_process_and_on_gpus() -> None:
    assert rank_threads(Observation(DeviceKind.CPU, usable_cores=16), 1, {}) == {}
    assert rank_threads(Observation(DeviceKind.CPU), 2, {}) == {}
    assert rank_threads(Observation(DeviceKind.CUDA), 2, {}) == {}


def test_a_framework_without_ranks_says_what_it_does_instead() -> None:
    with pytest.raises(UsageError, match=r"one process \(tf\.distribute\), see docs/scale\.md"):
        check_engine("keras", "ddp", 2)
    check_engine("keras", "ddp", 1)
    check_engine("torch", "fsdp2", 2)


def test_an_engine_that_a_framework_lacks_is_refused(monkeypatch) -> None:
    from autoprec.tuning import ranks

    known = cast(Any, SimpleNamespace(title="Some framework", rank_engines=("ddp",)))
    monkeypatch.setattr(ranks.registry, "capabilities", lambda name: known)
    with pytest.raises(UsageError, match="expected one of Some framework's: ddp"):
        check_engine("some", "fsdp2", 2)


def test_the_batch_is_divided_among_the_ranks_or_refused() -> None:
    assert batch_of_rank(64, 4) == 16
    with pytest.raises(TaskError, match=r"BATCH_SIZE = 33 .* cannot be divided among 2"):
        batch_of_rank(33, 2)


def test_one_named_device_is_not_enough_for_ranks() -> None:
    with pytest.raises(UsageError, match=r"`device=cuda:1` names one device .* `device=cuda`"):
        check_device_choice("cuda:1", 2)
    for device, nproc in (("cuda:1", 1), ("cuda", 2), (None, 2), ("cpu:0", 2)):
        check_device_choice(device, nproc)


def test_peers_are_devices_of_one_profile() -> None:
    first, second = gpus(2)
    other = facts(DeviceKind.CUDA, 2, name="another GPU")
    assert peers_of(second, (first, second, other)) == (first,)
    assert peers_of(other, (first, second, other)) == ()
