"""`autoprec tune --plan`: what would be tried on a device, and what can be expected of it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoprec.core.device.facts import GIB
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY
from autoprec.core.speed.plan import Estimate, MemoryPlan, Plan
from autoprec.reporting.text import bytes_text, printable, seconds_text

_WIDTH = 120

#: The choices a search has, as people call them; a further knob goes by its own name.
_DIMENSION_NAMES = {
    "policy": "policy",
    "batch_size": "batch size",
    "memory_format": "memory layout",
    "compile": "compiling",
    "alignment": "padding",
    KEEP_MEMORY: "keeping freed memory",
}

#: More dimensions than that are counted, not listed.
_MAX_LISTED = 8


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan; by default on stdout, in colour only on a terminal."""
    console = console or _console()

    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    device, task = plan.device, plan.facts
    here = "not here" if device.observation.hypothetical else device.address
    say(f"plan for {plan.task} on {device.title} ({here}, {device.family})", "bold")
    say("nothing is measured: by the catalogue, and by one float32 step on this machine's CPU")
    if plan.refusal:
        say(f"it would be refused: {plan.refusal}", "bold red")
    for sentence in plan.expectation:
        say(f"expectation: {sentence}", "bold")
    say("the hardware alone makes plausible:" if plan.refusal else "would be tried:")
    for candidate in plan.proposal.candidates:
        say(f"  {candidate.policy}: {'; '.join(candidate.reasons)}")
    for refusal in plan.proposal.refusals:
        say(f"  {refusal.candidate} refused: {refusal.reason}", "dim")
    batch = "" if task.batch_size is None else f", BATCH_SIZE = {task.batch_size}"
    say(f"  {task.framework} model of {task.parameters:,} parameters{batch}")
    say(f"  {_search(plan)}")
    if plan.figures:
        say(f"least time of a step, by the figures of {plan.figures}:")
        console.print(_estimates(plan.estimates))
    for line in (*_alignment(plan), *_memory(plan.memory)):
        say(line)
    for note in (*plan.notes, *device.notes):
        say(f"note: {note}", "yellow")


def _console() -> Console:
    """Standard output; wide enough for the table where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _search(plan: Plan) -> str:
    """How many recipes there are, and of what choices."""
    factors = [
        f"{len(levels)} of {_DIMENSION_NAMES.get(name, name)}"
        for name, levels in plan.space.levels().items()
        if len(levels) > 1
    ]
    made = f" ({' x '.join(factors)})" if factors else ""
    if plan.recipes == 1:
        return "there is one recipe to try"
    return f"at most {plan.recipes} recipes to try{made}; it ends when none is worth a trial"


def _estimates(estimates: tuple[Estimate, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), header_style="dim")
    for name in ("policy", "batch", "arithmetic", "memory", "launches", "bound by", "at most"):
        table.add_column(name, justify="left" if name in ("policy", "bound by") else "right")
    for each in estimates:
        seconds = (each.arithmetic_seconds, each.memory_seconds, each.launch_seconds)
        table.add_row(
            each.policy.value,
            str(each.batch),
            *(seconds_text(value) if value else "" for value in seconds),
            each.bound,
            "" if each.policy is Policy.FLOAT32 else f"{each.at_most:.2g}x",
        )
    return table


def _alignment(plan: Plan) -> list[str]:
    """The dimensions that are off the device's alignment."""
    off = plan.off_alignment
    if plan.alignment == 1:
        return []
    if not off:
        return [f"every matrix dimension is a multiple of {plan.alignment}, as this device wants"]
    shown = [f"{d.module or 'the root'} {d.name} {d.size}" for d in off[:_MAX_LISTED]]
    more = f" and {len(off) - _MAX_LISTED} more" if len(off) > _MAX_LISTED else ""
    return [
        f"this device wants dimensions in multiples of {plan.alignment}; these are not: "
        f"{', '.join(shown)}{more}"
    ]


def _memory(memory: MemoryPlan | None) -> list[str]:
    """The predicted memory, and what fits."""
    if memory is None:
        return ["memory: not predicted, for what the forward pass keeps could not be counted"]
    fits = [f"{each.memory_bytes / GIB:.3g} GiB: {_rounded(each.batch):,}" for each in memory.fits]
    return [
        f"memory of a float32 step at batch {memory.batch}: about {bytes_text(memory.peak_bytes)} "
        f"({bytes_text(memory.fixed_bytes)} whatever the batch, "
        f"{memory.bytes_per_sample / 2**20:.2g} MiB for a sample), and the framework's own",
        f"largest batch in float32, about: {', '.join(fits)}",
    ]


def _rounded(count: int) -> int:
    """A count with two significant digits, rounded down: it is a prediction."""
    unit = int(10 ** max(0, len(str(count)) - 2))
    return count // unit * unit
