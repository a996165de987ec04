"""Probes the machine, and measures its devices: what `probe`, `tune` and `check` start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from autoprec import measurement_cache
from autoprec.core.device.facts import DeviceFacts, Fingerprint
from autoprec.core.device.merging import merge, with_measurements
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import propose
from autoprec.core.device.probe_result import DeviceReport, ProbeResult
from autoprec.core.dtypes import DType
from autoprec.errors import UsageError
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.name_lookup import hypothetical_observation, resolve_family
from autoprec.hardware.probes.observe import OnWait, is_device_kind, observe
from autoprec.hardware.probes.observe import select as select_devices
from autoprec.measurement_cache import with_remembered_measurements


def probe(
    *, measure: bool = False, device: str | None = None, on_wait: OnWait = lambda text: None
) -> ProbeResult:
    """Probe this machine: every device, which precisions it supports, and why.

    `measure` also times matrix products per dtype in a child process of the installed framework,
    and remembers the result in the user's cache directory; without it, a remembered result for this
    device and framework is shown with its date. `device` selects one kind ("cuda") or one device
    ("cuda:1"). Any other text names a device of the catalogue, which need not be present ("a100",
    "tpu v5e"). Raises `UsageError` if no device is left, or if no or several catalogue
    entries match. `on_wait` is called with a message when a driver takes longer than two seconds.
    """
    if device is None or is_device_kind(device):
        machine = probe_here(measure=measure, device=device, on_wait=on_wait)
        return machine if measure else recall_measurements(machine)
    if measure:
        raise UsageError(
            f"{device!r} is no device here such as cpu or cuda:0, and only those are measured"
        )
    family = resolve_family(load_catalogue(), device)
    facts = merge(hypothetical_observation(family), family)
    return ProbeResult(devices=(DeviceReport(facts, propose(facts)),))


def probe_here(
    *, measure: bool = False, device: str | None = None, on_wait: OnWait = lambda text: None
) -> ProbeResult:
    """Probe the devices of this machine, without looking up names in the catalogue."""
    machine = observe(on_wait=on_wait)
    observations = select_devices(machine.devices, device, machine.unusable)
    catalogue = load_catalogue()
    facts = [merge(each, catalogue.family_of(each)) for each in observations]
    if measure:
        software = {framework.name: framework.version for framework in machine.frameworks}
        facts = [measure_device(each, software) for each in facts]
    return ProbeResult(
        devices=tuple(DeviceReport(each, propose(each)) for each in facts),
        frameworks=machine.frameworks,
        notes=machine.notes,
        unusable=machine.unusable,
        system=machine.system,
        python=machine.python,
    )


def measure_device(facts: DeviceFacts, software: Mapping[str, str]) -> DeviceFacts:
    """Time the device's matrix products with the first framework able to; remember the result.

    If the same software has timed this device before, its timings count for how far ratios can
    be trusted, too. What other processes disturbed is not remembered.
    """
    if facts.observation.rehearsal:
        return facts  # times of a pretended device mean nothing
    from autoprec.backends.shared.matmul_timing import measure
    from autoprec.workers.cpu_contention import ProcessorUsage

    meter = ProcessorUsage()
    meter.start(())
    measured = measure(facts, list(software))
    usage = meter.usage(())
    if facts.kind is DeviceKind.CPU and usage is not None and usage.is_crowded:
        note = (
            f"other processes used {usage.others:.0%} of the processors while products were timed, "
            "which can slow them a hundredfold; measure again when this machine is idle"
        )
        measured = replace(measured, disturbed=True, notes=(*measured.notes, note))
    same = {name: version for name, version in software.items() if name == measured.framework}
    earlier, _ = measurement_cache.recall(facts.fingerprint, same)
    float32 = measured.product(DType.FLOAT32)
    if float32 is not None and float32.gflops and not measured.disturbed:
        kept = replace(measured, date=f"{datetime.now(UTC):%Y-%m-%d}", notes=())
        name = measured.framework
        note = measurement_cache.remember(
            measurement_cache.TimedDevice(facts.fingerprint, name, software[name], kept, earlier)
        )
        measured = replace(measured, notes=(*measured.notes, *filter(None, (note,))))
    return with_measurements(facts, measured, earlier)


def recall_measurements(machine: ProbeResult) -> ProbeResult:
    """Return the machine with what was measured of its devices before."""
    software = machine.frameworks_installed
    known = [with_remembered_measurements(each, software) for each in machine.facts]
    return replace(machine, devices=tuple(DeviceReport(each, propose(each)) for each in known))


def device_fingerprint(device: str | None = None) -> Fingerprint:
    """Return what profiles are matched by, for `device` or the first device here."""
    return probe_here(device=device).devices[0].facts.fingerprint
