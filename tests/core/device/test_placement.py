"""What must hold of a child process's place: it is shown one device, whatever its number is."""

import pytest

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.placement import Placement, expose, expose_only


@pytest.mark.parametrize(
    ("seen", "device", "environment"),
    [
        (
            Observation(DeviceKind.CPU),
            "cpu",
            {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"},
        ),
        (
            Observation(DeviceKind.CUDA, index=1, uuid="MIG-1"),
            "cuda",
            {"CUDA_VISIBLE_DEVICES": "MIG-1"},
        ),
        (Observation(DeviceKind.CUDA), "cuda", {}),
        (
            Observation(DeviceKind.ROCM, index=0, uuid="2"),
            "cuda",
            {"HIP_VISIBLE_DEVICES": "2"},
        ),
        (Observation(DeviceKind.ROCM, index=1), "cuda", {"HIP_VISIBLE_DEVICES": "1"}),
        (
            Observation(DeviceKind.XPU, index=1, pci="8086:56a0", uuid="0000:03:00.0"),
            "xpu",
            {"AUTOPREC_XPU": "1 8086:56a0 0000:03:00.0"},
        ),
        (Observation(DeviceKind.MPS), "mps", {}),
        (Observation(DeviceKind.TPU, uuid="3"), "tpu", {}),
    ],
)
def test_a_child_takes_the_first_of_the_one_it_is_shown(seen, device, environment):
    assert expose_only(seen) == Placement(device, environment)


@pytest.mark.parametrize(
    ("seen", "environment"),
    [
        (
            [
                Observation(DeviceKind.CUDA, uuid="GPU-b"),
                Observation(DeviceKind.CUDA, uuid="GPU-a"),
            ],
            {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"},
        ),
        ([Observation(DeviceKind.CUDA, uuid="GPU-b"), Observation(DeviceKind.CUDA)], {}),
        (
            [Observation(DeviceKind.ROCM, uuid="3"), Observation(DeviceKind.ROCM, index=1)],
            {"HIP_VISIBLE_DEVICES": "3,1"},
        ),
    ],
)
def test_ranks_are_shown_the_same_devices_in_the_same_order(seen, environment):
    assert expose(seen) == Placement("cuda", environment)
