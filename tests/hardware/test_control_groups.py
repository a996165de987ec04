"""What must hold of memory and CPU limits: the tightest group counts, in either version."""

import pytest

from autoprec.hardware.control_groups import Limits, read_limits
from benchmarks.recordings.machine_replay import synthetic_machine as machine

MEMINFO = {"/proc/meminfo": "MemTotal:  16777216 kB\nMemFree: 1 kB\n"}
GIB = 2**30
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:1 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 24 0:27 {root} /cg/memory rw - cgroup cgroup rw,memory\n"
    "32 24 0:28 {root} /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 24 0:29 / /home rw - ext4 /dev/sda rw\n"
    "not a mount\n"
)


def with_files(files):
    return read_limits(machine(files={**MEMINFO, **files}))


def test_without_groups_everything_installed_may_be_used():
    assert with_files({}) == Limits(16 * GIB, memory_limited=False, core_quota=None)


def test_where_proc_is_missing_the_system_is_asked():
    assert read_limits(machine(physical_memory=8 * GIB)).memory_bytes == 8 * GIB
    assert read_limits(machine()) == Limits()


def test_a_broken_meminfo_counts_as_missing():
    broken = machine(files={"/proc/meminfo": "MemTotal:\nMemTotal: many kB"}, physical_memory=5)
    assert read_limits(broken).memory_bytes == 5


def test_version_2_takes_the_tightest_of_the_own_group_and_those_above():
    found = with_files(
        {
            "/proc/self/cgroup": "0::/a/b\n",
            "/proc/self/mountinfo": V2,
            "/sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n",
            "/sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
            "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "/sys/fs/cgroup/a/cpu.max": "150000 100000\n",
        }
    )
    assert found == Limits(2 * GIB, memory_limited=True, core_quota=1.5)


def test_version_1_reads_its_own_files():
    found = with_files(
        {
            "/proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n",
            "/proc/self/mountinfo": V1.format(root="/"),
            "/cg/memory/box/memory.limit_in_bytes": f"{GIB}\n",
            "/cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "/cg/cpu/box/cpu.cfs_quota_us": "50000\n",
            "/cg/cpu/box/cpu.cfs_period_us": "100000\n",
            "/cg/cpu/cpu.cfs_quota_us": "-1\n",
            "/cg/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert found == Limits(GIB, memory_limited=True, core_quota=0.5)


def test_a_container_sees_its_group_mounted_as_the_root():
    found = with_files(
        {
            "/proc/self/cgroup": "5:memory:/docker/abc/inner\n",
            "/proc/self/mountinfo": V1.format(root="/docker/abc"),
            "/cg/memory/inner/memory.limit_in_bytes": f"{GIB}\n",
        }
    )
    assert found.memory_bytes == GIB


def test_a_group_that_lies_outside_the_mount_leaves_the_mount_itself():
    found = with_files(
        {
            "/proc/self/cgroup": "5:memory:/elsewhere\n",
            "/proc/self/mountinfo": V1.format(root="/docker/abc"),
            "/cg/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        }
    )
    assert found.memory_bytes == 3 * GIB


def test_a_path_that_climbs_out_is_not_followed():
    found = with_files(
        {
            "/proc/self/cgroup": "0::/../other\n",
            "/proc/self/mountinfo": V2,
            "/sys/fs/cgroup/../other/memory.max": "1\n",
            "/sys/fs/cgroup/memory.max": f"{GIB}\n",
        }
    )
    assert found.memory_bytes == GIB


def test_without_mountinfo_the_usual_place_is_tried():
    found = with_files({"/sys/fs/cgroup/memory.max": f"{GIB}\n"})
    assert found == Limits(GIB, memory_limited=True, core_quota=None)


def test_a_limit_above_what_is_installed_limits_nothing():
    found = with_files({"/sys/fs/cgroup/memory.max": f"{64 * GIB}\n"})
    assert found == Limits(16 * GIB, memory_limited=False, core_quota=None)


@pytest.mark.parametrize(
    "text", ["", "max", "nonsense", "1", "0 100000", "100000 0", "a b", "²² 1"]
)
def test_quotas_that_say_nothing_are_none(text):
    assert with_files({"/sys/fs/cgroup/cpu.max": text}).core_quota is None
