"""What must hold of observations: which kind of device a framework's name means."""

from __future__ import annotations

import pytest

from autoprec.core.device.observation import DeviceKind, kind_of_framework_device


@pytest.mark.parametrize("kind", DeviceKind)
def test_a_framework_calls_a_device_by_its_kind_but_rocms_cuda(kind):
    assert kind.framework_name == ("cuda" if kind is DeviceKind.ROCM else kind.value)


@pytest.mark.parametrize(
    ("name", "present", "kind"),
    [
        ("cuda", {DeviceKind.CPU, DeviceKind.ROCM}, "rocm"),
        ("cuda", {DeviceKind.CUDA, DeviceKind.ROCM}, "cuda"),
        ("cuda", {DeviceKind.CPU}, "cuda"),  # whatever it is, no probe saw it
        ("rocm", {DeviceKind.ROCM}, "rocm"),
        ("cpu", {DeviceKind.CPU}, "cpu"),
        ("gpu", {DeviceKind.CUDA}, "gpu"),  # no framework's name: for the caller to refuse
    ],
)
def test_cuda_means_rocm_where_only_that_is_present(name, present, kind):
    assert kind_of_framework_device(name, present) == kind
