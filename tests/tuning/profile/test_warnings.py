"""What a profile warns of."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Dimension, Measurement
from autoprec.core.numerics.verdict import NOTHING_LEARNED
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Alignment, Recipe
from autoprec.core.speed.space import Space
from autoprec.tuning.profile.warnings import _batch_range_warning, warnings_for
from autoprec.tuning.stage_results import (
    REFERENCE,
    ProvenRecipe,
    TuningResult,
)
from tests.tuning.fake_results import BFLOAT16, TASK, found, timed, with_confirmation


def warnings(
    result: TuningResult, recipe: Recipe = BFLOAT16, measured: Measurement | None = None
) -> tuple[str, ...]:
    return warnings_for(result, recipe, Recipe(), measured or timed())


def test_where_all_is_well_there_is_no_warning() -> None:
    assert warnings(found()) == ()


def test_what_the_task_and_the_stages_noted_is_said_first() -> None:
    task = replace(TASK, warnings=("one",), low_precision="weights in bfloat16")
    result = found(task=task, notes=("two",))
    plain = "the task is not plain float32: weights in bfloat16"
    assert warnings(result) == ("one", "two", plain)


def test_a_proof_over_steps_without_learning_is_warned_of() -> None:
    result = found()
    flat = ProvenRecipe(BFLOAT16, replace(REFERENCE, caveat=NOTHING_LEARNED), 1.0, 1.0)
    confirmation = replace(result.confirmation, proven=flat)
    (text,) = warnings(replace(result, confirmation=confirmation))
    assert text == (
        "the check says little: the loss did not fall in these steps, so they say little about "
        "later training; start from weights that have trained for a while (`checkpoint`), or give "
        "the check more steps (`proof_steps`)"
    )
    verdict = replace(REFERENCE, buffers="the buffer sums adds up rounded numbers")
    rounding = replace(confirmation, proven=replace(flat, verdict=verdict))
    assert warnings(replace(result, confirmation=rounding)) == (
        "the buffer sums adds up rounded numbers. If evaluation needs more digits, name the "
        "modules that compute them in the recipe's float32_modules",
    )
    learned = replace(confirmation, proven=replace(flat, verdict=REFERENCE))
    assert warnings(replace(result, confirmation=learned)) == ()


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
            "the task names no batch, so that was chosen too: 64 (the baseline ran with 32). Adapt "
            "the learning rate"
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
    assert said == ((f"{wanted}likely to fit; try it",) if warned else ())


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
    warned = " ".join(_batch_range_warning(space, Recipe(batch_size=batch)))
    assert said in warned
    assert bool(warned) == bool(said)


@pytest.mark.parametrize(("share", "warned"), [(0.15, False), (0.16, True)])
def test_neighbours_are_told_of_unless_nothing_that_was_timed_counts(
    share: float, warned: bool
) -> None:
    for rehearsal in (False, True):
        said = warnings(replace(found(rehearsal=rehearsal), cpu_contention=share))
        text = (
            "other processes used up to 16% of the processors while this was measured: tune again "
            "on an idle machine"
        )
        assert said == ((text,) if warned and not rehearsal else ())


@pytest.mark.parametrize(("slow", "warned"), [(0.133, False), (0.134, True)])
def test_a_baseline_that_varies_by_more_than_a_quarter_is_told_of(
    slow: float, warned: bool
) -> None:
    measured = {
        Recipe().key(): (timed(0.1), timed(0.1), timed(slow)),
        BFLOAT16.key(): (timed(0.1), timed(0.3)),
    }
    result = with_confirmation(found(), measured=measured)
    said = [text for text in warnings(result) if "vary by" in text]
    assert [text[:60] for text in said] == (
        ["this machine's step times vary by 25% between rounds: differ"] if warned else []
    )


@pytest.mark.parametrize(
    ("ratio", "proven", "warned"), [(0.5, True, True), (1.0, True, False), (0.5, False, False)]
)
def test_what_was_asked_for_and_is_slower_is_told_of(
    ratio: float, proven: bool, warned: bool
) -> None:
    chosen = ProvenRecipe(BFLOAT16, REFERENCE, 1.0, 1.0) if proven else None
    result = with_confirmation(found(), over_baseline=Ratio(ratio, ratio, ratio, 6), proven=chosen)
    text = (
        "mixed_bfloat16 is slower than float32 here, 0.50x (6 rounds), and was taken because "
        "nothing else was asked for: add float32 to `policies`, or leave `policies` out"
    )
    assert warnings(result) == ((text,) if warned else ())


def test_what_computes_in_16_bits_by_itself_is_called_no_float32() -> None:
    slower = Ratio(0.5, 0.5, 0.5, 6)
    proven = ProvenRecipe(BFLOAT16, REFERENCE, 1.0, 1.0)
    own = found(task=replace(TASK, weights_in="bfloat16"))
    said = warnings(with_confirmation(own, over_baseline=slower, proven=proven))
    assert said[0].startswith("mixed_bfloat16 is slower than own bfloat16 here, 0.50x")
    (said_of_memory,) = warnings(own, measured=timed(peak=500))
    assert "50% less memory than own bfloat16" in said_of_memory


@pytest.mark.parametrize(("seconds", "warned"), [(0.1, False), (0.101, True)])
def test_a_loader_that_is_slower_than_the_step_is_told_of(seconds: float, warned: bool) -> None:
    text = "the loader needs 101.0 ms for a step of 100.0 ms: use more loader workers"
    said = warnings(found(), measured=timed(data_seconds=seconds))
    assert said == ((text,) if warned else ())


def test_what_a_limit_left_out_is_told_be_it_of_time_or_of_trials() -> None:
    result = with_confirmation(found(not_covered=("this",)), not_covered=("that",))
    told = "a limit of this tuning, its time or its trials, left out: this; that"
    assert warnings(result) == (told,)


@pytest.mark.parametrize(
    ("kind", "task", "compilation", "advised"),
    [
        (DeviceKind.CUDA, {}, (False,), True),
        (DeviceKind.CUDA, {}, (False, True), False),
        (DeviceKind.CPU, {}, (False,), False),
        (DeviceKind.CUDA, {"compiled": True}, (False,), False),
        (DeviceKind.CUDA, {"not_compilable": "it branches on its data"}, (False,), False),
    ],
)
def test_the_compiler_is_advised_where_it_was_left_out_on_a_gpu(
    kind: DeviceKind, task: dict[str, Any], compilation: tuple[bool, ...], advised: bool
) -> None:
    result = found(task=replace(TASK, **task))
    observed = SimpleNamespace(kind=kind, observation=SimpleNamespace(rehearsal=False))
    space = replace(result.preflight.space, compile=compilation)
    preflight = replace(result.preflight, facts=cast(Any, observed), space=space)
    said = warnings(replace(result, preflight=preflight))
    assert [text.startswith("the compiler was not tried") for text in said] == [True] * advised


def test_dimensions_off_the_alignment_are_named_up_to_four() -> None:
    sizes = tuple(Dimension(f"layer{i}", "Linear", "out_features", 50 + i) for i in range(7))
    result = found(task=replace(TASK, dimensions=sizes), alignment=8)  # 56 is a multiple
    (text,) = warnings(result)
    named = ", ".join(f"layer{i} out_features {50 + i}" for i in range(4))
    assert text == (
        f"this device wants dimensions in multiples of 8; these are not: {named} and 2 more. "
        "Padding them was not worth a trial; choosing other sizes may"
    )
    assert warnings(result, replace(BFLOAT16, alignment=Alignment(8, ("layer0",)))) == ()
