"""Everything the probes see of a machine, in bounded time, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoprec.core.device.facts import DeviceKind, Observation
from autoprec.core.probe_result import FrameworkFact, MachineObservation, Unusable
from autoprec.errors import UsageError
from autoprec.hardware.machine import LocalMachine, Machine
from autoprec.hardware.probes import Seen
from autoprec.hardware.probes.amd import amd_wanted, probe_amd
from autoprec.hardware.probes.apple import probe_apple
from autoprec.hardware.probes.cpu import probe_cpu
from autoprec.hardware.probes.frameworks import find_frameworks
from autoprec.hardware.probes.intel import probe_intel
from autoprec.hardware.probes.nvidia import probe_nvidia
from autoprec.hardware.probes.nvidia_signs import nvidia_wanted
from autoprec.hardware.probes.others import probe_others
from autoprec.hardware.probes.tpu import probe_tpu

T = TypeVar("T")

#: Set where devices are only pretended: what is tuned there is marked, and never shown as speed.
REHEARSAL = "AUTOPREC_REHEARSAL"
_REHEARSAL_NOTE = f"a rehearsal ({REHEARSAL} is set): devices are pretended, times mean nothing"

#: A driver that does not answer (NVML can wait on a GPU that fell off the bus) is left behind.
_PROBE_SECONDS = 10.0

#: Without persistence mode NVIDIA's driver initialises each GPU anew, at up to some 3 s; a node has
#: 8 or 16. Source: NVIDIA Driver Persistence documentation.
_NVIDIA_SECONDS = 60.0

#: WSL's way to the GPUs, in place of a PCI bus: the device file /dev/dxg. Source: Linux kernel fork
#: microsoft/WSL2-Linux-Kernel, drivers/hv/dxgkrnl.
_WSL = "dxg"

#: Who waits longer than this is told for whom.
_RETRY_BUDGET_SECONDS = 2.0


@dataclass(frozen=True)
class Probe:
    """A vendor's probe, and how long it may take.

    Where it gives no answer, `wanted` tells without any driver whether such a device is here and
    is not hidden on purpose: then it is one of `kind` that cannot be used.
    """

    name: str
    run: Callable[[Machine], Seen]
    seconds: float = _PROBE_SECONDS
    kind: DeviceKind = DeviceKind.CPU
    wanted: Callable[[Machine], bool] = lambda machine: False


_PROBES = (
    Probe("NVIDIA", probe_nvidia, _NVIDIA_SECONDS, DeviceKind.CUDA, nvidia_wanted),
    Probe("AMD", probe_amd, kind=DeviceKind.ROCM, wanted=amd_wanted),
    Probe("Intel GPU", probe_intel),
    Probe("Apple", probe_apple),
    Probe("TPU", probe_tpu),
    Probe("other accelerators", probe_others),
    Probe("CPU", probe_cpu),
)

OnWait = Callable[[str], None]
"""Told, in a sentence, what is being waited for."""


def observe(
    machine: Machine | None = None, on_wait: OnWait = lambda text: None
) -> MachineObservation:
    """Run every probe on `machine`, by default this one. Accelerators come first, the CPU last."""
    machine = machine or LocalMachine()
    found = [_run(probe, machine, on_wait) for probe in _PROBES]
    devices = [device for seen in found for device in seen.devices]
    notes = [note for seen in found for note in seen.notes]
    if not any(device.kind is DeviceKind.CPU for device in devices):
        devices.append(Observation(kind=DeviceKind.CPU))
    readable: tuple[str, ...] = ()
    missing, trouble = _bounded(lambda: _not_looked_at(machine), readable)
    notes.extend((*missing, *(f"{machine.system}: {each}" for each in trouble)))
    nothing: tuple[FrameworkFact, ...] = ()
    frameworks, trouble = _bounded(lambda: find_frameworks(machine), nothing)
    notes.extend(f"frameworks: {each}" for each in trouble)
    if _bounded(lambda: machine.variable(REHEARSAL), None)[0]:
        devices = [replace(device, rehearsal=True) for device in devices]
        notes.append(_REHEARSAL_NOTE)
    return MachineObservation(
        devices=tuple(devices),
        frameworks=frameworks,
        notes=tuple(notes),
        unusable=tuple(each for seen in found for each in seen.unusable),
        system=f"{machine.system} {machine.architecture}".strip(),
        python=machine.python,
    )


def _run(probe: Probe, machine: Machine, on_wait: OnWait) -> Seen:
    """What a probe sees; where it gives no answer, what that means."""
    said = f"{probe.name}: waiting for the driver's answer, at most {probe.seconds:g} seconds"
    seen, trouble = _bounded(
        lambda: probe.run(machine), Seen(), probe.seconds, lambda: on_wait(said)
    )
    if not trouble:
        return seen
    texts = tuple(f"{probe.name}: {each}" for each in trouble)
    wanted, _ = _bounded(lambda: probe.wanted(machine), False)
    if not wanted:
        return Seen(notes=texts)
    why = "a GPU is in this machine but its probe gave no answer"
    return Seen(unusable=tuple(Unusable(probe.kind, f"{text} ({why})") for text in texts))


def _not_looked_at(machine: Machine) -> tuple[str, ...]:
    """What no probe sees here: GPUs without a PCI bus to look at, and what a Linux hides."""
    if machine.system == "Windows":
        return ("Windows: of GPUs only NVIDIA's are looked at, AMD's and Intel's are not",)
    if machine.system != "Linux":
        return ()
    notes = []
    if _WSL in machine.entries("/dev"):
        notes.append("WSL: of GPUs only NVIDIA's are looked at, AMD's and Intel's are not")
    if machine.read("/proc/self/mountinfo") is None:
        notes.append("/proc cannot be read: limits of control groups are not known")
    if not machine.entries("/sys"):
        notes.append("/sys cannot be read: accelerators without a vendor's library are not seen")
    return tuple(notes)


def _bounded(
    work: Callable[[], T],
    fallback: T,
    seconds: float = _PROBE_SECONDS,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[T, tuple[str, ...]]:
    """Run `work` in a thread; on a failure, or when it takes too long, the fallback and a note."""
    results: list[T] = []
    failures: list[str] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            failures.append(f"the probe failed: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(_RETRY_BUDGET_SECONDS, seconds))
    if thread.is_alive() and seconds > _RETRY_BUDGET_SECONDS:
        on_wait()
        thread.join(seconds - _RETRY_BUDGET_SECONDS)
    if results:
        return results[0], ()
    return fallback, tuple(failures) or (f"no answer in {seconds:g} seconds",)


def names_kind(text: str) -> bool:
    """Whether a text speaks of devices here, as "cuda" and "cuda:1" do, and not of a family."""
    return text.strip().lower().partition(":")[0] in [kind.value for kind in DeviceKind]


def select(
    devices: Sequence[Observation], chosen: str | None, unusable: Sequence[Unusable] = ()
) -> tuple[Observation, ...]:
    """The devices that "cuda" or "cuda:1" names, all without a choice.

    Raises `UsageError` where none is left, or the text names no kind of device.
    """
    if chosen is None:
        return tuple(devices)
    name, colon, number = chosen.strip().lower().partition(":")
    kinds = [kind.value for kind in DeviceKind]
    if name not in kinds or (colon and not (number.isascii() and number.isdigit())):
        raise UsageError(
            f"unknown device {chosen!r}: expected KIND[:INDEX], KIND one of {', '.join(kinds)}; of "
            "one that is not here `autoprec probe --device NAME` and `autoprec tune TASK.py --plan "
            "--device NAME` tell what is known"
        )
    found = [d for d in devices if d.kind.value == name and (not colon or d.index == int(number))]
    if not found:
        here = ", ".join(f"{d.kind}:{d.index}" for d in devices)
        why = "".join(f"; {each.text}" for each in unusable if each.kind.value == name)
        raise UsageError(f"no device {chosen!r} here: found {here}{why}")
    return tuple(found)
