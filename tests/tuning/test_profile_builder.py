"""What a profile and its notes say of what was measured."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from factories import steady

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Dimension, Measurement, TaskFacts
from autoprec.core.recipe import Alignment, Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.core.statistics import Ratio
from autoprec.tuning import profile_builder
from autoprec.tuning.profile_builder import REFERENCE, Findings, ProvenRecipe

PLAIN = {"policy": "float32", "alignment": 1}


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        ([{**PLAIN}], "was not worth a trial"),
        ([{**PLAIN}, {**PLAIN, "alignment": 8}], "was measured at 2.00x and not chosen"),
        ([{**PLAIN}, {"policy": "mixed_bfloat16", "alignment": 8}], "was tried and not chosen"),
    ],
)
def test_what_is_said_of_padding_is_what_was_tried(
    tried: list[dict[str, object]], said: str
) -> None:
    history = [
        Outcome(point, Status.OK, steady(step, peak_memory_bytes=1))
        for point, step in zip(tried, (1.0, 0.5), strict=False)
    ]
    facts = SimpleNamespace(observation=SimpleNamespace(rehearsal=False))
    task = TaskFacts("torch", {}, 32, 32, 1000)
    findings = Findings(facts, task, tuple(history), space=None)
    assert profile_builder._padding_seen(findings) == said


@pytest.mark.parametrize(
    ("alignment", "padded_to"),
    [(Alignment(), 56), (Alignment(8, ("head",)), 56), (Alignment(64, ("head",)), 64)],
)
def test_a_profile_says_to_what_size_its_own_recipe_pads(
    alignment: Alignment, padded_to: int
) -> None:
    task = TaskFacts(
        "torch", {}, 32, 32, 1000, dimensions=(Dimension("head", "Linear", "out_features", 50),)
    )
    findings = Findings(SimpleNamespace(), task, (), space=None, alignment=8)
    (row,) = profile_builder._padding(findings, Recipe(alignment=alignment))
    assert row["padded_to"] == padded_to


# Warnings ----------------------------------------------------------------------------------------

BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16)
SPACE = Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), (8, 16, 32, 64, 128), compile=(False, True))
TASK = TaskFacts("torch", {}, 32, 32, 1000)


def timed(step: float = 0.1, *, peak: int = 1000, **others: Any) -> Measurement:
    return steady(step, peak_memory_bytes=peak, **others)


def found(*history: Outcome, task: TaskFacts = TASK, rehearsal: bool = False) -> Findings:
    plain = Outcome(SPACE.point(Recipe()), Status.OK, timed())
    facts = SimpleNamespace(observation=SimpleNamespace(rehearsal=rehearsal))
    return Findings(facts, task, (plain, *history), space=SPACE)  # type: ignore[arg-type]


def warnings(
    findings: Findings, recipe: Recipe = BFLOAT16, measured: Measurement | None = None
) -> tuple[str, ...]:
    return profile_builder._warnings(findings, recipe, Recipe(), measured or timed())


def test_where_all_is_well_there_is_no_warning() -> None:
    assert warnings(found()) == ()


def test_what_the_task_and_the_stages_noted_is_said_first() -> None:
    findings = found(task=replace(TASK, warnings=("one",), low_precision="weights in bfloat16"))
    findings.notes.append("two")
    plain = "the task is not plain float32: weights in bfloat16"
    assert warnings(findings) == ("one", "two", plain)


@pytest.mark.parametrize(
    ("batch", "accumulation", "warned"), [(32, 1, False), (16, 2, False), (64, 1, True)]
)
def test_another_effective_batch_is_the_users_to_adapt_to(
    batch: int, accumulation: int, warned: bool
) -> None:
    said = warnings(found(), replace(BFLOAT16, batch_size=batch, accumulation_steps=accumulation))
    if warned:
        (text,) = said
        assert text.startswith(
            "the task names no BATCH_SIZE, so the batch was chosen too: 64 (the baseline ran with "
            "32). Adapt the learning rate"
        )
    else:
        assert said == ()


@pytest.mark.parametrize(
    ("recipe", "peak", "warned"),
    [
        (BFLOAT16, 700, True),
        (BFLOAT16, 701, False),
        (BFLOAT16, 0, False),  # its peak is not known
        (Recipe(compile=True), 500, False),
        (replace(BFLOAT16, batch_size=16, accumulation_steps=2), 500, False),
    ],
)
def test_a_larger_batch_is_advised_where_16_bits_freed_the_memory_for_it(
    recipe: Recipe, peak: int, warned: bool
) -> None:
    said = warnings(found(), recipe, timed(peak=peak))
    wanted = "mixed_bfloat16 needs 30% less memory than float32: a batch of twice the size is "
    assert said == ((f"{wanted}likely to fit; try BATCH_SIZE * 2",) if warned else ())


@pytest.mark.parametrize(
    ("sizes", "effective", "batch", "said"),
    [
        ((16, 32, 64), None, 64, "largest of those that were to be tried (16-64): a larger one"),
        (
            (32, 64, 128),
            None,
            32,
            "smallest of those that were to be tried (32-128): a smaller one",
        ),
        ((16, 32, 64), None, 32, ""),
        ((32,), None, 32, ""),  # nothing was to choose
        ((1, 32), None, 1, ""),  # there is no smaller one
        ((16, 32, 64), 64, 64, ""),  # the user's own batch
    ],
)
def test_a_batch_at_the_end_of_the_range_is_said_to_be_there(
    sizes: tuple[int, ...], effective: int | None, batch: int, said: str
) -> None:
    space = Space((Policy.FLOAT32,), sizes, effective)
    warned = " ".join(profile_builder._at_the_edge(space, Recipe(batch_size=batch)))
    assert said in warned
    assert bool(warned) == bool(said)


@pytest.mark.parametrize(("share", "warned"), [(0.15, False), (0.16, True)])
def test_neighbours_are_told_of_unless_nothing_that_was_timed_counts(
    share: float, warned: bool
) -> None:
    for rehearsal in (False, True):
        findings = found(rehearsal=rehearsal)
        findings.neighbours = share
        said = warnings(findings)
        text = (
            "other processes used up to 16% of the processors while this was measured: tune again "
            "on an idle machine"
        )
        assert said == ((text,) if warned and not rehearsal else ())


@pytest.mark.parametrize(("slow", "warned"), [(0.133, False), (0.134, True)])
def test_a_baseline_that_varies_by_more_than_a_quarter_is_told_of(
    slow: float, warned: bool
) -> None:
    findings = found()
    findings.finals[Recipe().key()] = [timed(0.1), timed(0.1), timed(slow)]
    findings.finals[BFLOAT16.key()] = [timed(0.1), timed(0.3)]
    said = [text for text in warnings(findings) if "vary by" in text]
    assert [text[:60] for text in said] == (
        ["this machine's step times vary by 25% between rounds: differ"] if warned else []
    )


@pytest.mark.parametrize(
    ("ratio", "proven", "warned"), [(0.5, True, True), (1.0, True, False), (0.5, False, False)]
)
def test_what_was_asked_for_and_is_slower_is_told_of(
    ratio: float, proven: bool, warned: bool
) -> None:
    findings = found()
    findings.speedup = Ratio(ratio, ratio, ratio, 6)
    if proven:
        findings.proven = ProvenRecipe(BFLOAT16, REFERENCE, 1.0, 1.0)
    text = (
        "mixed_bfloat16 is slower than float32 here (0.5x) and was taken because nothing else was "
        "asked for: add float32 to --policies, or leave --policies out"
    )
    assert warnings(findings) == ((text,) if warned else ())


@pytest.mark.parametrize(("seconds", "warned"), [(0.1, False), (0.101, True)])
def test_a_loader_that_is_slower_than_the_step_is_told_of(seconds: float, warned: bool) -> None:
    text = "the loader needs 101.0 ms for a step of 100.0 ms: use more loader workers"
    said = warnings(found(), measured=timed(data_seconds=seconds))
    assert said == ((text,) if warned else ())


def test_what_the_time_limit_left_out_is_told() -> None:
    findings = found()
    findings.not_covered += ["this", "that"]
    assert warnings(findings) == ("the time limit was reached; not covered: this; that",)


def test_dimensions_off_the_alignment_are_named_up_to_four() -> None:
    sizes = tuple(Dimension(f"layer{i}", "Linear", "out_features", 50 + i) for i in range(7))
    findings = found(task=replace(TASK, dimensions=sizes))
    findings.alignment = 8  # 56 is a multiple
    (text,) = warnings(findings)
    named = ", ".join(f"layer{i} out_features {50 + i}" for i in range(4))
    assert text == (
        f"this device wants dimensions in multiples of 8; these are not: {named} and 2 more. "
        "Padding them was not worth a trial; choosing other sizes may"
    )
    assert warnings(findings, replace(BFLOAT16, alignment=Alignment(8, ("layer0",)))) == ()


# When a compiler is worth it -------------------------------------------------------------------


def trial(recipe: Recipe, step: float, warmup: float) -> Outcome:
    return Outcome(SPACE.point(recipe), Status.OK, timed(step, warmup_seconds=warmup))


COMPILED = Recipe(compile=True)


@pytest.mark.parametrize(
    ("recipe", "history", "steps"),
    [
        # 30 s more of warm-up, and 20 ms won with every step of 0.08 s over one of 0.1 s
        (COMPILED, [trial(COMPILED, 0.08, 30.0)], 1500),
        # against the fastest uncompiled recipe, whatever its policy and batch: 0.09 s of 32
        (COMPILED, [trial(COMPILED, 0.08, 31.005), trial(BFLOAT16, 0.09, 1.0)], 3001),
        (COMPILED, [trial(COMPILED, 0.08, 0.5), trial(BFLOAT16, 0.09, 1.0)], 0),
        # no faster than without: never
        (COMPILED, [trial(COMPILED, 0.1, 30.0)], None),
        (COMPILED, [trial(COMPILED, 0.12, 30.0)], None),
        (BFLOAT16, [trial(COMPILED, 0.08, 30.0), trial(BFLOAT16, 0.09, 1.0)], None),
        (replace(COMPILED, batch_size=64), [trial(COMPILED, 0.08, 30.0)], None),
    ],
)
def test_a_compiler_is_worth_it_after_the_steps_that_win_its_seconds_back(
    recipe: Recipe, history: list[Outcome], steps: int | None
) -> None:
    assert profile_builder._break_even(found(*history), recipe) == steps


def test_what_failed_is_no_rival_of_a_compiler() -> None:
    findings = found(trial(COMPILED, 0.08, 30.0))
    only = replace(findings, history=findings.history[1:])
    assert profile_builder._break_even(only, COMPILED) is None
    failed = Outcome(SPACE.point(BFLOAT16), Status.SHORT_DATA, timed())
    assert (
        profile_builder._break_even(replace(only, history=(*only.history, failed)), COMPILED)
        is None
    )
