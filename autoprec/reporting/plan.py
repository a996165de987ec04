"""`autoprec tune --plan`: what would be tried on a device, and what to expect of it."""

from __future__ import annotations

from functools import partial

from rich.console import Console
from rich.table import Table

from autoprec.core.device.facts import GIB
from autoprec.core.dtypes import Policy
from autoprec.core.number_words import about_times, plain_number
from autoprec.core.recipe import KEEP_MEMORY
from autoprec.core.speed.step_bounds import Estimate, MemoryPlan, Plan
from autoprec.reporting import tables
from autoprec.reporting.tables import make_console
from autoprec.reporting.text import bytes_text, seconds_text

#: The dimensions of a search in plain words; a further knob keeps its own name.
_DIMENSION_NAMES = {
    "policy": "policy",
    "batch_size": "batch size",
    "memory_format": "memory layout",
    "compile": "compiling",
    "alignment": "padding",
    KEEP_MEMORY: "keeping freed memory",
}

#: More matrix dimensions than that are counted, not listed.
_MAX_LISTED = 8


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan; by default on stdout, in colour only on a terminal."""
    console = console or make_console()
    say = partial(tables.say, console)
    device, task = plan.device, plan.facts
    here = "not in this machine" if device.observation.hypothetical else device.address
    say(f"plan for {plan.task} on {device.title} ({here}, {device.family})", "bold")
    say("nothing was measured: based on the catalogue and one float32 step on this machine's CPU")
    if plan.refusal:
        say(f"this tuning would be refused: {plan.refusal}", "bold red")
    for sentence in plan.expectation:
        say(f"expectation: {sentence}", "bold")
    say("plausible for the hardware:" if plan.refusal else "would be tried:")
    for candidate in plan.proposal.candidates:
        say(f"  {candidate.policy}: {'; '.join(candidate.reasons)}")
    for refusal in plan.proposal.refusals:
        say(f"  {refusal.candidate} refused: {refusal.reason}", "dim")
    batch = "" if task.batch_size is None else f", batch {task.batch_size}"
    say(f"  {task.framework} model of {task.parameters:,} parameters{batch}")
    say(f"  {_search(plan)}")
    if plan.figures:
        say(f"lower bound of the step time, from the figures of {plan.figures}:")
        console.print(_estimates(plan.estimates))
    for line in (*_alignment(plan), *_memory(plan.memory)):
        say(line)
    for note in (*plan.notes, *device.notes):
        say(f"note: {note}", "yellow")


def _search(plan: Plan) -> str:
    """Say how many recipes there are, and how they come about."""
    factors = [
        f"{_DIMENSION_NAMES.get(name, name)}: {len(levels)}"
        for name, levels in plan.space.levels().items()
        if len(levels) > 1
    ]
    made = f" ({', '.join(factors)})" if factors else ""
    if plan.recipes == 1:
        return "there is one recipe to try"
    return f"at most {plan.recipes} recipes to try{made}, until none is worth another trial"


def _estimates(estimates: tuple[Estimate, ...]) -> Table:
    names = ["policy", ">batch", ">arithmetic", ">memory", ">launches", "bound by", ">speed-up"]
    rows = []
    for each in estimates:
        seconds = (each.arithmetic_seconds, each.memory_seconds, each.launch_seconds)
        gain = "" if each.policy is Policy.FLOAT32 else f"at most {about_times(each.at_most)}"
        parts = (seconds_text(value) if value else "" for value in seconds)
        rows.append([each.policy.value, str(each.batch), *parts, each.bound, gain])
    return tables.table(rows=rows, names=names, padding=(0, 2), pad_edge=True, header_style="dim")


def _alignment(plan: Plan) -> list[str]:
    """List the matrix dimensions that miss the device's alignment."""
    off = plan.off_alignment
    if plan.alignment == 1:
        return []
    if not off:
        return [f"every matrix dimension is a multiple of {plan.alignment}, as suits this device"]
    shown = [f"{d.module or 'the model'} ({d.name} {d.size})" for d in off[:_MAX_LISTED]]
    more = f" and {len(off) - _MAX_LISTED} more" if len(off) > _MAX_LISTED else ""
    return [
        f"matrix dimensions should be multiples of {plan.alignment} on this device; these are not: "
        f"{', '.join(shown)}{more}"
    ]


def _memory(memory: MemoryPlan | None) -> list[str]:
    """Say what memory is predicted, and which batches fit."""
    if memory is None:
        return ["memory: not predicted, because what the forward pass keeps could not be counted"]
    fits = [
        f"{_rounded(each.batch):,} in {plain_number(each.memory_bytes / GIB)} GiB"
        for each in memory.fits
    ]
    return [
        f"memory of a float32 step at batch {memory.batch}: about {bytes_text(memory.peak_bytes)} "
        f"({bytes_text(memory.fixed_bytes)} fixed, "
        f"{plain_number(memory.bytes_per_sample / 2**20, 2)} MiB per sample), "
        "plus the framework's own",
        f"largest float32 batch, roughly: {'; '.join(fits)}",
    ]


def _rounded(count: int) -> int:
    """Round a predicted count down to two significant digits."""
    unit = int(10 ** max(0, len(str(count)) - 2))
    return count // unit * unit
