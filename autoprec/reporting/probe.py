"""The table of `autoprec probe`: what each device is, which precisions it supports, and why.

Names and notes come from drivers and files; they are shown as text, never as markup.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from autoprec.core.device.facts import GIB, DeviceFacts, DTypeFact
from autoprec.core.device.family import Support
from autoprec.core.device.probe_result import DeviceReport, ProbeResult
from autoprec.core.dtypes import DType
from autoprec.reporting.tables import table
from autoprec.reporting.text import printable

_STYLES = {
    Support.NATIVE: "green",
    Support.SLOW: "yellow",
    Support.EMULATED: "yellow",
    Support.ABSENT: "red",
    Support.UNKNOWN: "dim",
}


def print_probe(result: ProbeResult, console: Console | None = None) -> None:
    """Print the whole result; by default on stdout, in colour only on a terminal."""
    console = console or Console()
    for report in result.devices:
        console.print(_panel(report))
    if result.system:
        console.print(_frameworks(result))
    for each in result.unusable:
        console.print(_line("not usable: ", each.text, "red"))
    for note in result.notes:
        console.print(_line("note: ", note, "yellow"))


def _panel(report: DeviceReport) -> RenderableType:
    facts = report.facts
    parts: list[RenderableType] = [_line("", _description(facts)), _dtypes(facts)]
    parts += _verdict(report)
    parts += [_line("note: ", note, "yellow") for note in facts.notes]
    where = "not in this machine" if facts.observation.hypothetical else facts.address
    title = Text(f" {where}: {printable(facts.name)} ", style="bold")
    return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1))


def _description(facts: DeviceFacts) -> str:
    """Describe a device in one line: family, memory, cores, bandwidth, driver."""
    seen = facts.observation
    origin = f" in {facts.origin}" if facts.origin else ""
    known = {
        "compute capability {}": seen.compute_capability,
        "partition {}": seen.partition,
        "{:.1f} GiB memory": (seen.memory_bytes or 0) / GIB,
        "{} usable processors": seen.usable_cores,
        "{:g} GB/s (vendor)": facts.memory_bandwidth_gbps,
        "{} GB/s (measured)": _number(facts.measured_memory_bandwidth_gbps),
        "driver {}": seen.driver,
    }
    parts = (text.format(value) for text, value in known.items() if value)
    return ", ".join((f"{facts.title} (family {facts.family}{origin})", *parts))


def _dtypes(facts: DeviceFacts) -> RenderableType:
    """Tabulate each dtype: support, evidence, alignment, peak, and measured rate."""
    rows = [(dtype, facts.fact(dtype)) for dtype in DType]
    rates = {
        ">peak TFLOP/s": [_number(fact.peak_dense_tflops) for _, fact in rows],
        ">GFLOP/s": [_number(fact.measured_gflops) for _, fact in rows],
    }
    known = {name: column for name, column in rates.items() if any(column)}
    names = ["dtype", "support", "evidence", "align", *known, "reason"]
    cells = [
        [
            dtype.value,
            Text(fact.support.value, style=_STYLES[fact.support]),
            fact.evidence.value,
            _alignment(fact),
            *(column[index] for column in known.values()),
            fact.reason,
        ]
        for index, (dtype, fact) in enumerate(rows)
    ]
    made = table(names, cells, padding=(0, 2, 0, 0), pad_edge=True, header_style="dim")
    for column in made.columns[:-1]:
        column.no_wrap = True
    return Padding(made, (1, 0))


def _alignment(fact: DTypeFact) -> str:
    if fact.support in (Support.ABSENT, Support.EMULATED, Support.SLOW) or fact.best_alignment == 1:
        return ""
    if fact.best_alignment == fact.alignment:
        return str(fact.alignment)
    return f"{fact.alignment}, best {fact.best_alignment}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _verdict(report: DeviceReport) -> list[RenderableType]:
    """List what is recommended and why, the other candidates, and the refusals."""
    proposal = report.proposal
    label = f"recommended: {proposal.recommended} ({_known_by(report.facts)}): "
    lines: list[RenderableType] = [_line(label, proposal.expectation, "bold green")]
    for number, candidate in enumerate(proposal.candidates, 1):
        label = f"  {number}. {candidate.policy}: "
        lines.append(_line(label, "; ".join(candidate.reasons), "bold"))
    lines += [
        _line(f"  refused {refusal.candidate}: ", refusal.reason, "red")
        for refusal in proposal.refusals
    ]
    return lines


def _known_by(facts: DeviceFacts) -> str:
    """Return whether the recommendation was measured on this device, and when."""
    if facts.measured_with:
        day = f" on {facts.measured_on}" if facts.measured_on else ""
        return f"measured here with {facts.measured_with}{day}"
    if facts.observation.hypothetical:
        return "from the catalogue"
    return "from the catalogue, not measured here"


def _frameworks(result: ProbeResult) -> Text:
    installed = [
        f"{each.name} {each.version}" + (f" ({each.build})" if each.build else "")
        for each in result.frameworks
    ]
    where = f"{result.system}, Python {result.python}; frameworks: "
    nothing = "none installed (pip install 'autoprec[torch]' or 'autoprec[tensorflow]')"
    return _line("", where + (", ".join(installed) or nothing))


def _line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((printable(label), style), printable(text))
