"""Everything the probes find on a machine, in bounded time, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.probe_result import FrameworkFact, MachineObservation, Unusable
from autoprec.errors import UsageError
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.amd import amd_expected, probe_amd
from autoprec.hardware.probes.apple import probe_apple
from autoprec.hardware.probes.cpu import probe_cpu
from autoprec.hardware.probes.frameworks import find_frameworks
from autoprec.hardware.probes.intel import probe_intel
from autoprec.hardware.probes.nvidia import nvidia_expected, probe_nvidia
from autoprec.hardware.probes.pci import probe_other_accelerators, probe_tpu

T = TypeVar("T")

#: Set if devices are pretended: what is tuned there is marked, and its speed is not shown.
REHEARSAL = "AUTOPREC_REHEARSAL"
_REHEARSAL_NOTE = f"a rehearsal ({REHEARSAL} is set): devices are pretended, times mean nothing"

#: A driver that does not answer is given up on (NVML can hang on a GPU that fell off the bus).
_PROBE_TIMEOUT_SECONDS = 10.0

#: Without persistence mode NVIDIA's driver initialises each GPU again, up to about 3 s each; a
#: node has 8 or 16. Source: NVIDIA Driver Persistence documentation.
_NVIDIA_TIMEOUT_SECONDS = 60.0

#: WSL shows GPUs by the device file /dev/dxg instead of a PCI bus. Source: Linux kernel fork
#: microsoft/WSL2-Linux-Kernel, drivers/hv/dxgkrnl.
_WSL_GPU_FILE = "dxg"

#: A user who waits longer than this is told what for.
_SILENT_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class Probe:
    """A vendor's probe, and its time limit.

    If it does not answer, `expected` tells without a driver whether such a device is present and
    not hidden on purpose: then a device of `kind` is reported as unusable.
    """

    name: str
    run: Callable[[Machine], Findings]
    seconds: float = _PROBE_TIMEOUT_SECONDS
    kind: DeviceKind = DeviceKind.CPU
    expected: Callable[[Machine], bool] = lambda machine: False


_PROBES = (
    Probe("NVIDIA", probe_nvidia, _NVIDIA_TIMEOUT_SECONDS, DeviceKind.CUDA, nvidia_expected),
    Probe("AMD", probe_amd, kind=DeviceKind.ROCM, expected=amd_expected),
    Probe("Intel GPU", probe_intel),
    Probe("Apple", probe_apple),
    Probe("TPU", probe_tpu),
    Probe("other accelerators", probe_other_accelerators),
    Probe("CPU", probe_cpu),
)

OnWait = Callable[[str], None]
"""Called with a sentence that says what is being waited for."""


def observe(
    machine: Machine | None = None, on_wait: OnWait = lambda text: None
) -> MachineObservation:
    """Run every probe on `machine`, by default this one. Accelerators come first, the CPU last."""
    machine = machine or Machine()
    findings = [_run(probe, machine, on_wait) for probe in _PROBES]
    devices = [device for seen in findings for device in seen.devices]
    notes = [note for seen in findings for note in seen.notes]
    if not any(device.kind is DeviceKind.CPU for device in devices):
        devices.append(Observation(kind=DeviceKind.CPU))
    no_notes: tuple[str, ...] = ()
    blind_spots, problems = _within_time_limit(lambda: _blind_spots(machine), no_notes)
    notes.extend((*blind_spots, *(f"{machine.system}: {each}" for each in problems)))
    no_frameworks: tuple[FrameworkFact, ...] = ()
    frameworks, problems = _within_time_limit(lambda: find_frameworks(machine), no_frameworks)
    notes.extend(f"frameworks: {each}" for each in problems)
    if _within_time_limit(lambda: machine.variable(REHEARSAL), None)[0]:
        devices = [replace(device, rehearsal=True) for device in devices]
        notes.append(_REHEARSAL_NOTE)
    return MachineObservation(
        devices=tuple(devices),
        frameworks=frameworks,
        notes=tuple(notes),
        unusable=tuple(each for seen in findings for each in seen.unusable),
        system=f"{machine.system} {machine.architecture}".strip(),
        python=machine.python,
    )


def _run(probe: Probe, machine: Machine, on_wait: OnWait) -> Findings:
    """Run one probe; if it does not answer, report what that means."""
    waiting = f"{probe.name}: waiting for the driver, at most {probe.seconds:g} seconds"
    findings, problems = _within_time_limit(
        lambda: probe.run(machine), Findings(), probe.seconds, lambda: on_wait(waiting)
    )
    if not problems:
        return findings
    texts = tuple(f"{probe.name}: {each}" for each in problems)
    expected, _ = _within_time_limit(lambda: probe.expected(machine), False)
    if not expected:
        return Findings(notes=texts)
    why = "this machine has such a GPU, but its probe did not answer"
    return Findings(unusable=tuple(Unusable(probe.kind, f"{text} ({why})") for text in texts))


def _blind_spots(machine: Machine) -> tuple[str, ...]:
    """Note what no probe can see here: GPUs without a PCI bus, and what a Linux hides."""
    if machine.system == "Windows":
        return ("Windows: only NVIDIA GPUs are detected, AMD's and Intel's are not",)
    if machine.system != "Linux":
        return ()
    notes = []
    if _WSL_GPU_FILE in machine.entries("/dev"):
        notes.append("WSL: only NVIDIA GPUs are detected, AMD's and Intel's are not")
    if machine.read("/proc/self/mountinfo") is None:
        notes.append("/proc cannot be read: the limits of control groups are unknown")
    if not machine.entries("/sys"):
        notes.append("/sys cannot be read: GPUs without their vendor's library are not detected")
    return tuple(notes)


def _within_time_limit(
    work: Callable[[], T],
    fallback: T,
    seconds: float = _PROBE_TIMEOUT_SECONDS,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[T, tuple[str, ...]]:
    """Run `work` in a thread; if it fails or takes too long, return the fallback and a note."""
    results: list[T] = []
    failures: list[str] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            failures.append(f"the probe failed: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(_SILENT_WAIT_SECONDS, seconds))
    if thread.is_alive() and seconds > _SILENT_WAIT_SECONDS:
        on_wait()
        thread.join(seconds - _SILENT_WAIT_SECONDS)
    if results:
        return results[0], ()
    return fallback, tuple(failures) or (f"no answer in {seconds:g} seconds",)


def is_device_kind(text: str) -> bool:
    """Return whether a text names devices here, as "cuda" and "cuda:1" do, and not a family."""
    return text.strip().lower().partition(":")[0] in [kind.value for kind in DeviceKind]


def select(
    devices: Sequence[Observation], chosen: str | None, unusable: Sequence[Unusable] = ()
) -> tuple[Observation, ...]:
    """Return the devices that "cuda" or "cuda:1" names, or all of them without a choice.

    Raise `UsageError` if none is left, or if the text names no kind of device.
    """
    if chosen is None:
        return tuple(devices)
    name, colon, number = chosen.strip().lower().partition(":")
    kinds = [kind.value for kind in DeviceKind]
    if name not in kinds or (colon and not (number.isascii() and number.isdigit())):
        raise UsageError(
            f"unknown device {chosen!r}: expected KIND[:INDEX], KIND one of {', '.join(kinds)}; "
            "for a device that is not in this machine use `autoprec probe --device NAME` or "
            "`autoprec tune TASK.py --plan --device NAME`"
        )
    named = [d for d in devices if d.kind.value == name and (not colon or d.index == int(number))]
    if not named:
        here = ", ".join(f"{d.kind}:{d.index}" for d in devices)
        why = "".join(f"; {each.text}" for each in unusable if each.kind.value == name)
        raise UsageError(f"no device {chosen!r} here: found {here}{why}")
    return tuple(named)
