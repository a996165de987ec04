"""`autoprec tune` on the terminal: its progress and its result.

All of it goes to stderr: stdout is for data. On a terminal the last line is updated in place;
otherwise every important event is a line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.status import Status as LiveStatus
from rich.table import Table
from rich.text import Text

from autoprec.core.dtypes import Policy
from autoprec.core.number_words import rate_number, times
from autoprec.core.profile import REHEARSAL_NOTE
from autoprec.core.recipe_words import describe_point, describe_recipe
from autoprec.core.speed.space import BATCH
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.reporting.closing_sentence import closing_sentence, further_lines
from autoprec.reporting.explain import explain_table, in_float32, operators_table
from autoprec.reporting.flags import with_flags
from autoprec.reporting.status_line import StatusLine, time_left_text
from autoprec.reporting.tables import make_console, say, table
from autoprec.reporting.text import (
    bytes_text,
    note_text,
    printable,
    rate_text,
    seconds_text,
    stage_text,
    status_text,
)
from autoprec.tuning.events import (
    Described,
    Event,
    Explained,
    Finished,
    Judged,
    Note,
    Profiled,
    Stage,
    Started,
    TrialFinished,
)


class Terminal:
    """Shows a tuning on stderr.

    `closing` adds the closing lines, and a table of the trials if they were not told one by one
    or if `verbose`; `grid` adds the grid; `limit` is the tuning's time limit in seconds.
    """

    def __init__(
        self,
        *,
        closing: bool = True,
        grid: bool = False,
        verbose: bool = False,
        limit: float | None = None,
        console: Any = None,
    ) -> None:
        self._closing, self._grid = closing, grid
        self._verbose, self._told = verbose, 0
        self._console: Console = console or make_console(stderr=True)
        self._live: LiveStatus | None = None
        self._status_line = StatusLine(limit)
        self._refused: set[tuple[str, str]] = set()
        self._profiled: Profiled | None = None
        self._show_speeds = True
        self._weights_in = ""

    def __enter__(self) -> Terminal:
        if self._console.is_terminal:
            self._live = self._console.status("starting")
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: str, style: str = "") -> None:
        say(self._console, text, style)

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self._status_line(event)
        if self._live is not None:
            self._live.update(Text(printable(self._status_line.text)))
        match event:
            case Started():
                self._started(event)
            case Stage():
                if self._live is None or event.name == "islands":
                    self._say(stage_text(event.name, event.detail))
            case Described():
                self._described(event)
            case TrialFinished():
                self._told += 1
                self._say(_trial_line(event, self._show_speeds, self._weights_in))
                left = self._status_line.seconds_left()
                if self._told == 1 and left:
                    self._say(f"  {time_left_text(left)}", "dim")
            case Judged():
                style = "green" if event.verdict == "equal" else "yellow"
                name = event.recipe.policy.name_with(self._weights_in)
                self._say(f"  {name}: {event.verdict}: {with_flags(event.reason)}", style)
            case Explained():
                self._console.print(explain_table(event.units, event.recipe))
            case Profiled():
                self._profiled = event
            case Note():
                self._say(note_text(event), "yellow" if event.warning else "")
            case Finished():
                self._finished(event)

    def _started(self, event: Started) -> None:
        facts = event.facts
        self._say(f"{event.task} on {facts.name} ({facts.address}, {facts.family})", "bold")
        self._show_speeds = not facts.observation.rehearsal
        if not self._show_speeds:
            self._say(f"this is {REHEARSAL_NOTE}: no speed is shown", "yellow")
        for candidate in event.proposal.candidates:
            self._say(f"  {candidate.policy}: {'; '.join(candidate.reasons)}")
        for refusal in event.proposal.refusals:
            self._refused.add((refusal.candidate, refusal.reason))
            self._say(f"  {refusal.candidate} refused: {refusal.reason}", "dim")

    def _described(self, event: Described) -> None:
        facts = event.facts
        self._weights_in = facts.weights_in
        resumed = f"; resuming after {event.resumed} finished trials" if event.resumed else ""
        batch = "" if facts.batch_size is None else f", batch {facts.batch_size}"
        self._say(
            f"  {facts.framework} model of {facts.parameters:,} parameters{batch}; "
            f"at most {event.points} recipes to try{resumed}"
        )

    def _finished(self, event: Finished) -> None:
        self._stop()
        if not self._closing:
            return
        if event.from_study:
            how = ", inconclusively" if event.profile.evidence.inconclusive else ""
            self._say(f"already tuned{how}: from the study {event.storage} (--fresh tunes again)")
        self._show_speeds = not event.profile.device.fingerprint.rehearsal
        weights = event.profile.evidence.baseline.weights_in
        if self._verbose or self._told < len(event.outcomes):
            self._console.print(trials_table(event.outcomes, self._show_speeds, weights))
        if self._grid and self._show_speeds:
            self._console.print(grid_table(event.outcomes))
        for refusal in event.profile.evidence.refusals:
            if (refusal.candidate, refusal.reason) in self._refused:
                continue  # said at the start
            self._say(f"refused: {refusal.candidate}: {with_flags(refusal.reason)}", "dim")
        for warning in event.profile.evidence.warnings:
            self._say(f"warning: {with_flags(warning)}", "yellow")
        if not event.from_study:
            self._say(_costs(event), "dim")
        self._say(closing_sentence(event.profile), "bold")
        for line in further_lines(event.profile):
            self._say(line)
        if self._profiled is not None and self._show_speeds:
            operators, recipe = self._profiled.operators, self._profiled.recipe
            self._say(f"slowest operators of a step under {describe_recipe(recipe)}:")
            self._console.print(operators_table(operators))
            self._say(in_float32(operators, recipe))


def _trial_line(event: TrialFinished, speeds: bool, weights_in: str) -> str:
    outcome, measured = event.outcome, event.outcome.measurement
    head = f"  trial {event.number + 1:2d}  {describe_recipe(event.recipe, weights_in)}"
    if outcome.status is not Status.OK or measured is None:
        return f"{head}: {status_text(outcome.status)}: {outcome.reason}"
    memory = bytes_text(measured.peak_memory_bytes)
    if not speeds:
        return f"{head}: ran, {memory}"
    ratio = outcome.rate / event.baseline if event.baseline else 1.0
    return (
        f"{head}: {rate_text(outcome.rate)}, {times(ratio)}, step "
        f"{seconds_text(measured.step_seconds)}, {memory}"
    )


def trials_table(outcomes: tuple[Outcome, ...], speeds: bool, weights_in: str = "") -> Table:
    """Tabulate the trials, fastest first; without `speeds`, leave out all timings.

    `weights_in` is the 16-bit dtype that the model computes in by itself.
    """
    base = outcomes[0].rate if outcomes else 0.0
    order = sorted(outcomes, key=lambda o: -o.rate) if speeds else outcomes
    names = ["policy", ">batch", "settings", ">samples/s", ">vs baseline", ">step", ">memory", ""]
    rows = (_row(outcome, base, speeds, weights_in) for outcome in order)
    return table(names, rows, title="recipes tried, as measured during the search")


def _row(outcome: Outcome, base: float, speeds: bool, weights_in: str) -> list[str]:
    point, measured = outcome.point, outcome.measurement
    settings = describe_point(point)
    if outcome.status is not Status.OK or measured is None:
        numbers, note = ["", "", "", ""], status_text(outcome.status)
    else:
        timed = [
            rate_number(outcome.rate),
            times(outcome.rate / base) if base else "",
            seconds_text(measured.step_seconds),
        ]
        numbers = [*(timed if speeds else [""] * 3), bytes_text(measured.peak_memory_bytes)]
        note = "" if measured.finite else "the loss was not finite"
    batch = str(point[BATCH])
    parts = round(measured.samples_per_step / int(point[BATCH])) if measured is not None else 1
    batch = f"{int(batch) * parts} = {parts} x {batch}" if parts > 1 else batch
    return [Policy(str(point["policy"])).name_with(weights_in), batch, settings, *numbers, note]


def _costs(event: Finished) -> str:
    """Say what the tuning cost: its time, the time of proofs, and its peak memory."""
    evidence = event.profile.evidence
    trials = "1 trial" if evidence.trials == 1 else f"{evidence.trials} trials"
    text = f"{trials} in {evidence.tuning_seconds:.0f} s"
    if evidence.proof_seconds:
        text += f", of which {evidence.proof_seconds:.0f} s for checks"
    peaks = [o.measurement.peak_memory_bytes for o in event.outcomes if o.measurement is not None]
    if peaks and evidence.memory_budget_bytes:
        allowed = bytes_text(evidence.memory_budget_bytes)
        text += f"; peak memory {bytes_text(max(peaks))} of {allowed} allowed"
    return text


def grid_table(outcomes: Sequence[Outcome]) -> Table:
    """Tabulate the time of one step: a row per batch, a column per policy with its settings."""
    columns = list(dict.fromkeys(_column(outcome) for outcome in outcomes))
    batches = sorted({int(outcome.point[BATCH]) for outcome in outcomes})
    cells = {(_column(o), int(o.point[BATCH])): _cell(o) for o in outcomes}
    rows = (
        [str(batch), *(cells.get((column, batch), "not tried") for column in columns)]
        for batch in batches
    )
    names = [">batch", *(f">{column}" for column in columns)]
    return table(names, rows, title="time of one step")


def _column(outcome: Outcome) -> str:
    settings = describe_point(outcome.point)
    policy = str(outcome.point["policy"])
    return f"{policy}, {settings}" if settings else policy


def _cell(outcome: Outcome) -> str:
    if outcome.status is not Status.OK or outcome.measurement is None:
        return status_text(outcome.status)
    return seconds_text(outcome.measurement.step_seconds)
