"""A second seed is trained unless the first one has settled that a candidate is rejected."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from autoprec.core.numerics.loss_curves import SeedRun, check_trajectory
from autoprec.core.numerics.needed_seeds import is_lost
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.traces import Trajectory
from autoprec.core.numerics.verdict import ProofEvidence

STRICT = Tolerance()
STEPS = 30


def run(end: float = 0.2, away: float = 0.0) -> Trajectory:
    return Trajectory(
        tuple((end + 1.8 * 0.5**step) * (1 + away * step / STEPS) for step in range(STEPS))
    )


def evidence(away: float, noise: float = 0.0) -> ProofEvidence:
    pair = SeedRun(run(), run(away=away), run(away=noise))
    return ProofEvidence(runs=(pair,), float32_losses=run().losses)


def test_a_training_twice_as_far_away_as_is_allowed_is_lost_beside_a_perfect_one() -> None:
    assert is_lost(evidence(0.2), run(), STRICT)
    assert not is_lost(evidence(0.08), run(), STRICT)


def test_where_float32s_own_second_seed_is_not_known_only_what_no_spread_excuses_is_lost() -> None:
    assert not is_lost(evidence(0.5), None, STRICT)
    assert is_lost(evidence(8.0), None, STRICT)


def test_noise_and_float32s_own_seeds_excuse_what_they_do_with_both() -> None:
    assert not is_lost(evidence(0.2, noise=0.2), run(), STRICT)
    assert not is_lost(evidence(0.2), run(end=0.5), STRICT)


def test_a_run_that_is_not_finite_or_skips_is_lost() -> None:
    broken = replace(run(), losses=(*run().losses[:-1], None))
    assert is_lost(ProofEvidence(runs=(SeedRun(run(), broken),)), None, STRICT)
    skipping = replace(run(), skipped=tuple(range(STRICT.skipped + 1)))
    assert is_lost(ProofEvidence(runs=(SeedRun(run(), skipping),)), None, STRICT)


@given(
    away=st.floats(0.0, 20.0),
    noise=st.floats(0.0, 1.0),
    other=st.floats(0.0, 20.0),
    end=st.floats(0.05, 1.0),
    known=st.booleans(),
)
def test_what_is_lost_is_rejected_whatever_the_second_seed_does(
    away: float, noise: float, other: float, end: float, known: bool
) -> None:
    first = evidence(away, noise)
    assume(is_lost(first, run(end) if known else None, STRICT))
    second = SeedRun(run(end), run(end, other))
    assert not check_trajectory((*first.runs, second), STRICT).passed
