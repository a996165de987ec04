"""The closing lines of a tuning: what was gained, over what, by what, and whether it is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.device.policies import Refusal
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.verdict import NOTHING_LEARNED
from autoprec.core.profile import NOT_COMPARED, Baseline, BatchChoice, Profile, TriedRecipe
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import KEEP_MEMORY, Distributed, Recipe
from autoprec.core.speed.attribution import Part
from autoprec.reporting.closing_sentence import (
    batch_line,
    closing_sentence,
    communication_line,
    headline,
    part_lines,
)
from autoprec.reporting.page.sections import page_of
from autoprec.reporting.show import profile_lines
from autoprec.tuning.stage_results import REFERENCE
from tests.fuzz.example import FULL

KEPT = {KEEP_MEMORY: True}
WINNER = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64, knobs=KEPT)


def made(recipe: Recipe, whole: float, alike: float | None = None, **parts: float) -> Profile:
    waterfall = tuple(
        Part(
            what.replace("_", " "), Ratio(ratio, ratio - 0.01, ratio + 0.01, 6), "float32, batch 8"
        )
        for what, ratio in parts.items()
    )
    over_baseline = Ratio(whole, whole - 0.1, whole + 0.1, 6)
    at_its_batch = None if alike is None else Ratio(alike, alike - 0.1, alike + 0.1, 6)
    own_batch = recipe.effective_batch == 32
    evidence = replace(
        FULL.evidence,
        baseline=Baseline(Policy.FLOAT32, 32, 100.0, 0.32, 2**30),
        speedup=over_baseline if own_batch else at_its_batch or NOT_COMPARED,
        throughput=None if own_batch else over_baseline,
        waterfall=waterfall,
        inconclusive="",
        not_covered=(),
    )
    return replace(FULL, recipe=recipe, evidence=evidence)


def test_a_gain_names_both_sides_and_its_parts() -> None:
    profile = made(WINNER, 3.3, 1.5, precision=1.5, batch=2.0, kept_memory=1.1)
    assert headline(profile) == (
        "mixed_bfloat16, batch 64, memory kept: 1.50x (1.40-1.60, 6 rounds) over float32, "
        "batch 64, memory kept; 3.30x (3.20-3.40, 6 rounds) the samples/s of float32, batch 32 "
        "= precision 1.50x, batch 2.00x, kept memory 1.10x"
    )
    first, second, third = part_lines(profile)
    assert first == (
        "  precision: 1.50x (1.49-1.51, 6 rounds): mixed_bfloat16, batch 64, memory kept over "
        "float32, batch 8"
    )
    assert second.startswith("  batch: 2.00x")
    assert third.startswith("  kept memory: 1.10x")


def test_at_the_batch_of_the_baseline_one_ratio_says_it_all() -> None:
    said = headline(made(replace(WINNER, batch_size=16, accumulation_steps=2), 1.5))
    assert said.endswith(": 1.50x (1.40-1.60, 6 rounds) over float32, batch 32")


def test_what_a_larger_batch_brings_is_not_told_as_a_gain_over_float32() -> None:
    said = headline(made(WINNER, 66.2))
    assert said.endswith(": 66.20x (66.10-66.30, 6 rounds) the samples/s of float32, batch 32")


def test_a_loader_slower_than_the_step_is_told_first() -> None:
    profile = made(WINNER, 3.3, 1.5)
    chosen = replace(
        profile.evidence.chosen, samples_per_second=640.0, step_seconds=0.1, data_seconds=0.2
    )
    slow = replace(profile, evidence=replace(profile.evidence, chosen=chosen))
    assert headline(slow) == (
        "the loader feeds 320 samples/s and a step could train 640: more loader workers come "
        f"first; {headline(profile)} (3.20x as far as the loader feeds it)"
    )


def test_a_baseline_in_16_bits_is_not_called_float32() -> None:
    profile = made(WINNER, 1.06)
    base = replace(profile.evidence.baseline, weights_in="bfloat16")
    evidence = replace(profile.evidence, baseline=base)
    said = closing_sentence(replace(profile, evidence=evidence))
    assert (
        "1.06x (0.96-1.16, 6 rounds) the samples/s of the model as it is, in bfloat16, batch 32"
    ) in said
    assert "float32" not in said


def test_a_baseline_whose_convolutions_are_rounded_is_named_so() -> None:
    profile = made(WINNER, 3.06, 1.06)
    base = replace(profile.evidence.baseline, convolutions_in="TF32")
    said = closing_sentence(replace(profile, evidence=replace(profile.evidence, baseline=base)))
    assert "1.06x (0.96-1.16, 6 rounds) over float32 (convolutions in TF32), batch 64" in said


def test_settings_of_a_model_in_16_bits_are_not_called_float32_with_them() -> None:
    recipe = Recipe(batch_size=64, knobs=KEPT)
    profile = made(recipe, 1.3, batch=1.2, kept_memory=1.1)
    base = replace(profile.evidence.baseline, weights_in="bfloat16")
    chosen = replace(profile.evidence.chosen, peak_share=0.5)
    evidence = replace(profile.evidence, baseline=base, chosen=chosen)
    profile = replace(profile, evidence=evidence)
    said = closing_sentence(profile)
    assert "own bfloat16, batch 64, memory kept: 1.30x" in said
    assert "50% of this device's measured bfloat16 peak" in said
    assert "float32" not in said
    assert part_lines(profile)[0].startswith(
        "  batch: 1.20x (1.19-1.21, 6 rounds): own bfloat16, batch 64, memory kept over "
    )


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (made(WINNER, 6.8, precision=1.0, batch=6.2, kept_memory=1.1), True),
        (made(WINNER, 6.8, precision=1.005, batch=6.8), True),
        (made(WINNER, 6.8, precision=1.1, batch=6.2), False),
        (made(replace(WINNER, knobs={}), 1.5), False),
    ],
)
def test_that_precision_brings_nothing_is_said_first(profile: Profile, said: bool) -> None:
    assert headline(profile).startswith("lower precision brings no gain here; ") is said


def test_float8_is_precision_that_may_pay_alone() -> None:
    recipe = replace(WINNER, policy=Policy.MIXED_BFLOAT16, compile=True, knobs={"float8": True})
    assert headline(made(recipe, 1.2, float8=1.2, precision=1.0)).startswith("mixed_bfloat16")
    nothing = made(recipe, 1.2, float8=1.0, precision=1.0, batch=1.2)
    assert headline(nothing).startswith("lower precision brings no gain here; ")


def test_of_float32_no_more_is_said_than_that_nothing_else_was_faster_and_proven() -> None:
    float32 = made(replace(WINNER, policy=Policy.FLOAT32), 3.5, batch=3.2, kept_memory=1.1)
    assert headline(float32).startswith(
        "no lower precision was both faster and passed its check; float32, "
    )


def test_one_part_needs_no_lines_of_its_own() -> None:
    assert part_lines(made(WINNER, 1.5, precision=1.5)) == []
    assert "=" not in headline(made(replace(WINNER, knobs={}), 1.5, precision=1.5))


def test_parts_that_were_not_told_apart_are_said_to_be() -> None:
    said = headline(made(WINNER, 1.4, precision_and_kept_memory=1.4))
    end = "; precision and kept memory together (--attribute times each)"
    assert said.endswith(end)


def test_what_was_asked_for_and_is_slower_is_said_so_first() -> None:
    slow = made(replace(WINNER, forced=True), 0.81)
    assert closing_sentence(slow).startswith(
        "result: 0.81x (0.71-0.91, 6 rounds): slower than float32, batch 32; only mixed_"
    )
    slower = replace(slow.evidence, throughput=Ratio(0.012, 0.011, 0.013, 1))
    said = headline(replace(slow, evidence=slower))
    assert said.startswith("0.012x (0.011-0.013, 1 round): slower than float32")


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (0.0, "; loss within 0.021 % at the same weights;"),
        (999.5, "; loss within 0.021 % at the same weights, of what is above 1000;"),
    ],
)
def test_what_the_loss_was_within_is_said_with_what_it_is_a_share_of(
    origin: float, said: str
) -> None:
    profile = made(WINNER, 1.5, precision=1.5)
    parity = replace(profile.evidence.parity, loss_deviation=0.00021, loss_origin=origin)
    evidence = replace(profile.evidence, parity=parity)
    assert said in closing_sentence(replace(profile, evidence=evidence))


def test_that_nothing_was_learned_is_a_warning_of_its_own_with_what_to_do() -> None:
    profile = made(WINNER, 1.5, precision=1.5)
    assert "Warning" not in closing_sentence(profile)
    parity = replace(profile.evidence.parity, caveat=NOTHING_LEARNED)
    said = closing_sentence(replace(profile, evidence=replace(profile.evidence, parity=parity)))
    assert said.endswith(
        ". Warning: the loss did not fall in these steps, so they say little about later "
        "training; start from weights that have trained for a while (--checkpoint), or give the "
        "check more steps (--proof-steps)"
    )


def test_an_inconclusive_tuning_says_that_word_first_and_how_to_measure_again() -> None:
    why = "inconclusive: the search saw 13.76x, the final rounds 0.44x; float32 is kept"
    evidence = replace(FULL.evidence, inconclusive="the search saw 13.76x", reason=why)
    said = closing_sentence(replace(FULL, evidence=replace(evidence, not_covered=())))
    assert said.startswith("inconclusive: the search saw 13.76x")
    assert "--fresh" in said
    lacked = replace(evidence, not_covered=("the rest",), tried=(TriedRecipe(Policy.FLOAT32, 32),))
    limits = "with a longer --time-limit or more --trials: it goes on"
    assert limits in closing_sentence(replace(FULL, evidence=lacked))


def test_the_share_that_waits_for_other_ranks_is_told_where_it_was_measured() -> None:
    profile = made(WINNER, 1.3)
    assert communication_line(profile) == ""
    chosen = replace(profile.evidence.chosen, exposed_communication=Ratio(0.12, 0.1, 0.14, 6))
    evidence = replace(profile.evidence, chosen=chosen)
    ranks = replace(profile, evidence=evidence)
    assert communication_line(ranks) == "  waiting for other ranks: 12% (10-14) of a step"
    base = replace(evidence.baseline, exposed_communication=Ratio(0.3, 0.25, 0.35, 6))
    both = replace(profile, evidence=replace(evidence, baseline=base))
    assert communication_line(both).endswith("12% (10-14) of a step, 30% (25-35) in the baseline")


def test_the_batch_is_told_with_what_it_costs_and_how_to_move_the_learning_rate() -> None:
    known = BatchChoice(yours=32, chosen=256, knee=128, fits=512, rule="max", loader_feeds=310.4)
    profile = made(WINNER, 1.3)

    def line(batch: BatchChoice | None) -> str:
        return batch_line(replace(profile, evidence=replace(profile.evidence, batch=batch)))

    first = (
        "  the batch: 256 (--batch max) chosen, knee 128, 512 fits; the loader feeds 310 samples/s"
    )
    assert line(known) == first
    seen = NoiseScale(at=120.0, low=64.0, high=None, batch=32, first_step=0, last_step=59)
    noisy = "; gradient noise scale 120 samples in steps 0-59"
    assert line(replace(known, noise_scale=seen)) == (
        f"{first}{noisy}: 256 needs at most 3.33x the samples of 32 for the same loss, with the "
        "learning rate times 8 (SGD) or 2.83 (Adam)"
    )
    assert line(replace(known, chosen=32, noise_scale=seen)).endswith(noisy)
    assert line(None) == line(replace(known, knee=None)) == ""


def test_the_baseline_of_ranks_is_named_with_their_number() -> None:
    recipe = replace(WINNER, distributed=Distributed("ddp", 2))
    assert "of float32, batch 64 on 2 ranks" in headline(made(recipe, 3.3, precision=3.3))


@pytest.mark.parametrize(
    ("bound", "peak", "memory", "said"),
    [
        ("arithmetic", 0.6, 0.05, "a step is limited by arithmetic"),
        ("data pipeline", 0.6, 0.05, "a step is limited by the data pipeline"),
        ("launches", None, None, "a step is limited by the launching of its kernels"),
        ("memory", 0.17, 0.05, "neither explains the time of a step"),
        ("unknown", 0.17, None, "that does not explain the time of a step"),
        ("unknown", None, None, "what limits a step is not known"),
    ],
)
def test_what_limits_a_step_is_named_only_if_it_explains_it(
    bound: str, peak: float | None, memory: float | None, said: str
) -> None:
    profile = made(WINNER, 3.3, precision=3.3)
    chosen = replace(profile.evidence.chosen, bound=bound, peak_share=peak, memory_share=memory)
    sentence = closing_sentence(replace(profile, evidence=replace(profile.evidence, chosen=chosen)))
    assert said in sentence.split("; ")
    if peak and memory:
        shares = "of this device's measured bfloat16 peak; at least 5% of its memory bandwidth; "
        assert shares + said in sentence


def test_float32_for_want_of_time_says_what_was_left_out_and_what_to_do() -> None:
    reason = "the baseline is the fastest recipe that passed; mixed_bfloat16: give it more"
    evidence = replace(
        FULL.evidence,
        inconclusive="",
        reason=f"{reason} `time_limit`",
        not_covered=("the rest of the check of mixed_bfloat16",),
        refusals=(Refusal("mixed_bfloat16", "give it more `time_limit`"),),
        parity=REFERENCE,
        speedup=NOT_COMPARED,
        throughput=None,
    )
    profile = replace(FULL, recipe=Recipe(batch_size=32), evidence=evidence)
    left_out = (
        ". A limit left out: the rest of the check of mixed_bfloat16. Run the same command with a "
        "longer one (--time-limit, --trials): it goes on with the trials that ran"
    )
    assert closing_sentence(profile) == f"result: {reason} --time-limit{left_out}"
    assert "refused: mixed_bfloat16: give it more --time-limit" in profile_lines(profile)
    assert "<td>give it more --time-limit</td>" in page_of(profile, "")
    gains = made(Recipe(batch_size=32, knobs=KEPT), 1.4)
    gains = replace(gains, evidence=replace(gains.evidence, not_covered=evidence.not_covered))
    said = closing_sentence(gains)
    assert "no lower precision was both faster and passed its check in the time there was" in said
    assert said.endswith(left_out)
    lower = made(WINNER, 1.4)
    assert "A limit" not in closing_sentence(
        replace(lower, evidence=replace(lower.evidence, not_covered=evidence.not_covered))
    )
