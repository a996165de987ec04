"""What `autoprec tune` shows: events in words, tables, nothing that drives a terminal."""

from __future__ import annotations

import io

import pytest
from factories import steady
from rich.console import Console

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Point
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.reporting.text import (
    bytes_text,
    printable,
    rate_text,
    seconds_text,
)
from autoprec.reporting.tune import Terminal, grid_table, trials_table
from autoprec.tuning.events import (
    Described,
    Finished,
    Judged,
    Note,
    Progress,
    Round,
    Stage,
    TrialFinished,
    TrialStarted,
)
from tests.fuzz.example import FULL


def point(policy: str = "float32", batch: int = 32, **more: object) -> Point:
    settings = {"memory_format": "contiguous", "compile": False, **more}
    return {"policy": policy, **settings, "batch_size": batch}  # type: ignore[dict-item]


def measured(batch: int, seconds: float) -> Measurement:
    return steady(seconds, batch, peak_memory_bytes=300 * 2**20)


def outcome(policy: str, batch: int, seconds: float) -> Outcome:
    return Outcome(point(policy, batch), Status.OK, measured(batch, seconds))


def shown(*events: object, closing: bool = True, verbose: bool = False) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    terminal = Terminal(closing=closing, console=console, verbose=verbose)
    with terminal:
        for event in events:
            terminal(event)  # type: ignore[arg-type]
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_trial_is_a_line_with_its_throughput_ratio_step_and_memory() -> None:
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64)
    text = shown(TrialFinished(1, recipe, outcome("mixed_bfloat16", 64, 0.032), 2000.0, 1000.0))
    assert "trial  2  mixed_bfloat16, batch 64: 2000 samples/s, 2.00x, step 32 ms, 300 MiB" in text


def test_after_the_first_trial_the_rest_is_estimated_once() -> None:
    first, second = (
        TrialFinished(number, Recipe(), outcome("float32", 32, 0.032), 1000.0, 1000.0)
        for number in range(2)
    )
    text = shown(Stage("search", "9 recipes"), first, second)
    assert text.count(" left\n") == 1
    assert text.index("trial  1") < text.index(" left\n") < text.index("trial  2")


def test_a_failed_trial_says_how_it_failed() -> None:
    failed = Outcome(point(batch=512), Status.OUT_OF_MEMORY, reason="DefaultCPUAllocator")
    text = shown(TrialFinished(0, Recipe(batch_size=512), failed, 0.0, 0.0))
    assert "out of memory: DefaultCPUAllocator" in text


def test_nothing_is_called_float32_where_the_weights_are_16_bit() -> None:
    facts = TaskFacts("torch", {}, 32, 32, 1000, weights_in="bfloat16")
    plain = outcome("float32", 32, 0.032)
    text = shown(
        Described(facts, 0, 4),
        TrialFinished(0, Recipe(batch_size=32), plain, 1000.0, 1000.0),
        Judged(Recipe(batch_size=32), "equal", "it is the reference"),
    )
    assert "trial  1  own bfloat16, batch 32" in text
    assert "own bfloat16: equal: it is the reference" in text
    assert "float32" not in text
    console = Console(file=io.StringIO(), width=120)
    console.print(trials_table((plain,), True, "bfloat16"))
    assert "float32" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_trials_are_told_once_one_by_one_or_in_a_table() -> None:
    plain = outcome("float32", 32, 0.032)
    told, done = TrialFinished(0, Recipe(), plain, 1000.0, 1000.0), Finished(FULL, (plain,), "s")
    assert "recipes tried" not in shown(told, done)
    assert "recipes tried" in shown(done), "an earlier run told them"
    assert "recipes tried" in shown(told, done, verbose=True)


def test_verdicts_and_notes_are_said() -> None:
    text = shown(
        Judged(Recipe(policy=Policy.MIXED_FLOAT16), "rejected", "the loss is not finite"),
        Note("others are busy", warning=True),
        Stage("islands", "which modules"),
        Progress("steps", 3),
        TrialStarted(0, Recipe(), "the baseline"),
        Round(1, 9, (10.0, 20.0)),
    )
    assert "mixed_float16: rejected: the loss is not finite" in text
    assert "warning: others are busy" in text
    assert "float32 modules: which modules" in text


def test_text_from_elsewhere_cannot_drive_the_terminal() -> None:
    text = shown(Note("a\x1b[31mred\x07 [bold]not markup[/bold]"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]not markup[/bold]" in text
    assert printable("ok\nnext") == "ok\nnext"


def test_a_note_names_flags_where_the_library_names_settings() -> None:
    assert "tune again later with --fresh" in shown(Note("tune again later with `fresh`"))


def test_the_grid_has_policies_side_by_side_and_names_what_did_not_run() -> None:
    console = Console(file=io.StringIO(), width=120)
    outcomes = (
        outcome("float32", 32, 0.01),
        outcome("mixed_bfloat16", 32, 0.005),
        outcome("float32", 64, 0.02),
        Outcome(point("mixed_bfloat16", 64), Status.OUT_OF_MEMORY),
        Outcome(point("float32", 128, memory_format="channels_last"), Status.TIMEOUT),
    )
    console.print(grid_table(outcomes))
    lines = str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert lines[1].split() == ["batch", "float32", "mixed_bfloat16", "float32,", "channels_last"]
    assert lines[2].split()[:5] == ["32", "10", "ms", "5", "ms"]
    assert "out of memory" in lines[3]
    assert "not tried" in lines[3]
    assert "timeout" in lines[4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rate_text(1450.4), "1450 samples/s"),
        (rate_text(9.876), "9.88 samples/s"),
        (seconds_text(0.0031), "3.1 ms"),
        (seconds_text(1.239), "1.24 s"),
        (bytes_text(412 * 2**20), "412 MiB"),
        (bytes_text(int(3.2 * 2**30)), "3.2 GiB"),
    ],
)
def test_numbers_in_words(text: str, expected: str) -> None:
    assert text == expected
