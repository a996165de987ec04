"""The public functions, and the only wiring: here hardware, backends and tuning meet.

Nothing inside autoprec imports this module except the command line.
"""

from __future__ import annotations

from autoprec.core.device import DeviceFacts, merge
from autoprec.core.probe import DeviceReport, ProbeResult
from autoprec.core.rules import propose
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.observe import observe, select


def probe(*, measure: bool = False, device: str | None = None) -> ProbeResult:
    """Look at this machine: every device, what it is good at, and why.

    `measure` also times matrix products per dtype in a child process of the installed framework.
    `device` keeps one kind ("cuda") or one device ("cuda:1"). Raises `UsageError` if none is left.
    """
    seen = observe()
    observations = select(seen.devices, device)
    catalogue = load_catalogue()
    facts = [merge(each, catalogue.family_of(each)) for each in observations]
    if measure:
        from autoprec.backends.products import measure_products

        names = [framework.name for framework in seen.frameworks]
        facts = [measure_products(each, names) for each in facts]
    return ProbeResult(
        devices=tuple(_report(each) for each in facts),
        frameworks=seen.frameworks,
        notes=seen.notes,
        system=seen.system,
        python=seen.python,
    )


def device_facts(device: str | None = None, *, measure: bool = False) -> DeviceFacts:
    """The facts of `device`, or of the first device here (accelerators before the CPU)."""
    return probe(measure=measure, device=device).devices[0].facts


def _report(facts: DeviceFacts) -> DeviceReport:
    return DeviceReport(facts, propose(facts))
