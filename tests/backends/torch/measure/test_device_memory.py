"""What Metal and Intel's driver tell of memory: synthetic, in place of torch's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoprec.backends.protocol import USABLE_FREE_MEMORY_SHARE, DeviceMemory
from autoprec.backends.torch import devices
from autoprec.backends.torch.backend import TorchBackend

pytestmark = pytest.mark.torch

GIB = 2**30
MPS, XPU = torch.device("mps"), torch.device("xpu:0")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What they were told to do. Metal recommends 48 GiB, holds 5; of Intel's 16 12 are free."""
    asked: list[Any] = []
    answers = {
        "mps": {"recommended_max_memory": 48 * GIB, "driver_allocated_memory": 5 * GIB},
        "xpu": {
            "mem_get_info": (12 * GIB, 16 * GIB),
            "memory_reserved": 3 * GIB,
            "max_memory_reserved": 9 * GIB,
        },
    }
    told = {"mps": ("empty_cache", "set_per_process_memory_fraction")}
    told["xpu"] = ("reset_peak_memory_stats", "set_per_process_memory_fraction")

    def teller(name: str) -> Any:
        return lambda *given: asked.append((name, *given))

    for kind, found in answers.items():
        for name, value in found.items():
            answer = lambda *_, value=value: value  # noqa: E731
            monkeypatch.setattr(getattr(torch, kind), name, answer, raising=False)
        for name in told[kind]:
            monkeypatch.setattr(getattr(torch, kind), name, teller(name), raising=False)
    return asked


def test_metals_memory_is_what_it_recommends_and_its_peak_what_its_driver_holds(
    said: list[Any],
) -> None:
    assert TorchBackend().memory("mps") == DeviceMemory(48 * GIB, 0)
    devices.limit_memory(MPS)
    devices.reset_peak(MPS)
    assert devices.peak_bytes(MPS) == 5 * GIB
    assert said == [("set_per_process_memory_fraction", USABLE_FREE_MEMORY_SHARE), ("empty_cache",)]


def test_an_intel_gpus_memory_is_what_is_free_and_held_and_its_peak_torchs_own(
    said: list[Any],
) -> None:
    assert TorchBackend().memory("xpu:0") == DeviceMemory(15 * GIB, GIB)
    devices.limit_memory(XPU)
    devices.reset_peak(XPU)
    assert devices.peak_bytes(XPU) == 9 * GIB
    limit = USABLE_FREE_MEMORY_SHARE * 15 / 16
    assert said == [
        ("set_per_process_memory_fraction", limit, XPU),
        ("reset_peak_memory_stats", XPU),
    ]


def test_a_driver_that_does_not_tell_leaves_the_memory_unknown(
    said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(device: Any) -> Any:
        raise RuntimeError("The device does not support querying the available memory")

    monkeypatch.setattr(torch.xpu, "mem_get_info", silent)
    assert TorchBackend().memory("xpu:0") is None
    devices.limit_memory(XPU)
    assert said == []
