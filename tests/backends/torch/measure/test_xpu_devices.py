"""Which of torch's Intel GPUs a probe means.

No such build is here: what torch would report is made up (synthetic). The UUID is the one that
Intel's driver makes of a PCI address (compute-runtime, `DeviceUUID`).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from autoprec import recipe_for_device
from autoprec.backends.protocol import Backend
from autoprec.backends.torch import devices
from autoprec.backends.torch.backend import TorchBackend
from autoprec.backends.torch.xpu_devices import XpuDevice, find_matching, identify_device
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.placement import XPU_VARIABLE
from autoprec.core.device.probe_result import MachineObservation

pytestmark = pytest.mark.torch

ARC = "8086:56a0"
FIRST, SECOND = "0000:03:00.0", "0000:04:00.0"


def properties(device_id: int = 0, bus: int = 0, part: int = 0, **more: object) -> SimpleNamespace:
    """What torch tells of a GPU on a bus."""
    uuid = struct.pack("<HHHHBBB4xB", 0x8086, device_id, 8, 0, bus, 0, 0, part)
    return SimpleNamespace(
        **{"device_id": device_id, "uuid": SimpleNamespace(bytes=list(uuid)), "name": "Arc", **more}
    )


@pytest.mark.parametrize(
    ("found", "pci", "address"),
    [
        (properties(0x56A0, bus=3), ARC, FIRST),
        (properties(0x0BD5, bus=0x29, part=2), "8086:0bd5", "0000:29:00.0/1"),
        (properties(0x56A0, bus=3, uuid=SimpleNamespace(bytes=[7] * 16)), ARC, ""),
        (properties(0x56A0), ARC, ""),
        (SimpleNamespace(name="of an older torch"), "", ""),
    ],
)
def test_a_uuid_holds_the_address_unless_it_is_the_chips_number(
    monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace, pci: str, address: str
) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: found)
    assert identify_device(0) == XpuDevice(pci, address)


@pytest.mark.parametrize(
    ("listed", "wanted", "index"),
    [
        ([XpuDevice(ARC, SECOND), XpuDevice(ARC, FIRST)], f"0 {ARC} {FIRST}", 1),
        ([XpuDevice("8086:e20b"), XpuDevice(ARC)], f"0 {ARC} {FIRST}", 1),
        ([XpuDevice(ARC), XpuDevice(ARC)], f"1 {ARC} {SECOND}", 1),
        ([XpuDevice(), XpuDevice()], f"1 {ARC} {SECOND}", 1),
        ([XpuDevice(ARC, SECOND)], f"0 {ARC} {FIRST}", None),
        ([XpuDevice("8086:e20b", SECOND)], f"0 {ARC} {FIRST}", None),
        ([XpuDevice(ARC)], "0", 0),
        ([], f"0 {ARC} {FIRST}", None),
    ],
)
def test_a_gpu_is_found_by_address_else_by_product_else_by_number(
    listed: list[XpuDevice], wanted: str, index: int | None
) -> None:
    assert find_matching(listed, wanted) == index


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two cards of one product, the second on the bus first in torch's order; what was set."""
    listed, current = [properties(0x56A0, bus=4), properties(0x56A0, bus=3)], [0]
    answers = {
        "get_device_properties": lambda index: listed[int(index)],
        "device_count": lambda: 2,
        "is_available": lambda: True,
        "current_device": lambda: current[-1],
        "set_device": current.append,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.xpu, name, answer)
    return current


def test_a_process_is_put_on_the_gpu_that_it_was_told(
    monkeypatch: pytest.MonkeyPatch, two: list[int]
) -> None:
    assert devices.resolve_device("xpu") == torch.device("xpu:0")
    monkeypatch.setenv(XPU_VARIABLE, f"0 {ARC} {FIRST}")
    assert devices.resolve_device("xpu") == torch.device("xpu:1")
    assert two[-1] == 1  # what the task itself calls "xpu"
    assert devices.resolve_device("xpu:0") == torch.device("xpu:0")
    assert list(TorchBackend().devices())[-2:] == ["xpu", "cpu"]


def test_a_gpu_that_torch_does_not_list_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, two: list[int]
) -> None:
    monkeypatch.setenv(XPU_VARIABLE, "0 8086:a780 0000:00:02.0")
    assert "xpu" not in TorchBackend().devices()
    with pytest.raises(RuntimeError, match="does not list"):
        devices.resolve_device("xpu")


def test_a_models_intel_gpu_is_known_by_what_torch_says_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probe counts the bus's way, and another card is first in torch's order."""
    said = Observation(DeviceKind.XPU, 0, name="Arc", pci=ARC, uuid=SECOND)
    backend = cast(Backend, SimpleNamespace(name="torch", observe=lambda address: said))
    seen = [
        Observation(DeviceKind.XPU, 0, pci="8086:e20b", uuid=FIRST),
        Observation(DeviceKind.XPU, 1, pci=ARC, uuid=SECOND),
        Observation(DeviceKind.CPU),
    ]
    found = recipe_for_device.facts_of("xpu:0", backend, MachineObservation(tuple(seen)))
    assert found.family == "intel-arc-a770"
    assert found.observation == seen[1]
    said = replace(said, uuid="", pci="8086:e20b")
    assert (
        recipe_for_device.facts_of("xpu:0", backend, MachineObservation(tuple(seen))).observation
        == seen[0]
    )
