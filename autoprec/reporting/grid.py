"""The grid of a study: step times by batch and policy, with failures named."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from autoprec.core.recipe_words import describe_point
from autoprec.core.speed.space import BATCH
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.reporting.text import printable, seconds_text, status_text


def grid_table(outcomes: Sequence[Outcome]) -> Table:
    """Tabulate the time of one step: a row per batch, a column per policy with its settings."""
    columns = list(dict.fromkeys(_column(outcome) for outcome in outcomes))
    batches = sorted({int(outcome.point[BATCH]) for outcome in outcomes})
    cells = {(_column(o), int(o.point[BATCH])): _cell(o) for o in outcomes}
    table = Table(title="time of one step", title_justify="left", box=None, pad_edge=False)
    table.add_column("batch", justify="right")
    for column in columns:
        table.add_column(Text(printable(column)), justify="right")
    for batch in batches:
        row = [str(batch), *(cells.get((column, batch), "not tried") for column in columns)]
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _column(outcome: Outcome) -> str:
    settings = describe_point(outcome.point)
    policy = str(outcome.point["policy"])
    return f"{policy}, {settings}" if settings else policy


def _cell(outcome: Outcome) -> str:
    if outcome.status is not Status.OK or outcome.measurement is None:
        return status_text(outcome.status)
    return seconds_text(outcome.measurement.step_seconds)
