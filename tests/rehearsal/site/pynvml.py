"""NVML for pretended GPUs: all of the machine's, whether CUDA shows them to this process or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """What NVML raises, with its return code."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


def _settings() -> Any:
    """Which torch does not ask for when it imports this."""
    from pretended import settings

    return settings


def nvmlInit() -> None:
    if _settings().KIND != "cuda" or not _settings().GIVEN["nvml"]:
        raise NVMLError(12, "NVML Shared Library Not Found")
    if _settings().GIVEN["nvml_error"]:
        raise NVMLError(_settings().GIVEN["nvml_error"], "NVML Error")


def nvmlShutdown() -> None: ...


def nvmlSystemGetDriverVersion() -> str:
    return "580.65.06"


def nvmlDeviceGetCount() -> int:
    return len(_settings().MACHINE)


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    return _settings().MACHINE[index]


def nvmlDeviceGetCudaComputeCapability(gpu: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in gpu["capability"].split("."))


def nvmlDeviceGetName(gpu: dict[str, Any]) -> str:
    return gpu["name"]


def nvmlDeviceGetUUID(gpu: dict[str, Any]) -> str:
    return gpu["uuid"]


def nvmlDeviceGetPciInfo(gpu: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(busId=f"00000000:0{_settings().MACHINE.index(gpu) + 1}:00.0")


def nvmlDeviceGetMigMode(gpu: dict[str, Any]) -> tuple[int, int]:
    return (0, 0)


def nvmlDeviceGetMemoryInfo(gpu: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        total=gpu["bytes"], free=gpu["bytes"] - gpu["others"], used=gpu["others"]
    )
