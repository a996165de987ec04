"""How much memory a tuning takes: the least of what anybody allows, less a reserve."""

from __future__ import annotations

import resource
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.workers import memory_limit
from autoprec.workers.memory_limit import (
    RESERVE_BYTES,
    RESERVE_SHARE,
    control_group_headroom,
    free_main_memory,
    memory_budget,
)
from benchmarks.recordings.machine_replay import synthetic_machine

GIB = 2**30


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 100 GiB free and no limits."""
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(memory_limit, "control_group_headroom", lambda machine: ())
    monkeypatch.setattr(memory_limit, "_resource_limits", list)


@pytest.mark.usefixtures("known")
def test_a_tenth_is_left_to_others() -> None:
    assert memory_budget(free_main_memory()) == 100 * GIB - int(RESERVE_SHARE * 100 * GIB)


@pytest.mark.usefixtures("known")
def test_the_least_counts() -> None:
    assert memory_budget(free_main_memory(), 20 * GIB) == 18 * GIB


def test_a_little_memory_is_not_all_reserved() -> None:
    assert memory_budget(2 * GIB) == 2 * GIB - RESERVE_BYTES
    assert memory_budget(200 * 2**20) == 100 * 2**20


def test_nothing_known_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: None)
    monkeypatch.setattr(memory_limit, "control_group_headroom", lambda machine: ())
    monkeypatch.setattr(memory_limit, "_resource_limits", list)
    assert memory_budget(free_main_memory(), None) is None


@given(st.integers(1, 2**50))
def test_a_budget_is_positive_and_below_what_there_is(limit: int) -> None:
    found = memory_budget(limit)
    assert found is not None
    assert 0 <= found <= limit


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts on Linux only")
def test_a_resource_limit_of_this_process_counts() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (3 * GIB, hard))
    try:
        found = memory_budget(free_main_memory())
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert found is not None
    assert found <= 3 * GIB - RESERVE_BYTES


V1_MEMORY = "31 24 0:27 / /cg/memory rw - cgroup cgroup rw,memory\n"


def test_version_2_groups_and_those_above_count() -> None:
    machine = synthetic_machine(
        files={
            "/proc/self/cgroup": "0::/a/b\n",
            "/sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
            "/sys/fs/cgroup/a/memory.current": f"{6 * GIB}\n",
            "/sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "/sys/fs/cgroup/a/b/memory.max": "max\n",
            "/sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
        },
    )
    assert list(control_group_headroom(machine)) == [3 * GIB]


def test_version_1_groups_count() -> None:
    machine = synthetic_machine(
        files={
            "/proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n",
            "/proc/self/mountinfo": V1_MEMORY,
            "/cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "/cg/memory/memory.usage_in_bytes": f"{GIB}\n",
            "/cg/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "/cg/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
        },
    )
    assert list(control_group_headroom(machine)) == [1]


@pytest.mark.parametrize("text", ["", "garbage", "0::", "0::/../../etc", "::::", "1:memory:"])
def test_what_cannot_be_read_limits_nothing(text: str) -> None:
    files = {"/proc/self/cgroup": text, "/sys/fs/cgroup/memory.max": "garbage"}
    assert list(control_group_headroom(synthetic_machine(files=files))) == []


def test_a_limit_without_its_usage_limits_nothing() -> None:
    files = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": f"{GIB}\n"}
    assert list(control_group_headroom(synthetic_machine(files=files))) == []


def test_no_proc_limits_nothing() -> None:
    assert list(control_group_headroom(synthetic_machine())) == []
