"""The knee is the smallest batch at which a policy trains nearly as many samples as at any."""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.speed.ladder import knee_of, largest_that_ran, outgrows_knee
from autoprec.core.speed.stopping import Limits
from autoprec.core.speed.trial_results import Outcome, Status
from tests.core.speed.machines import at, measured

CURVE = ((32, 100.0), (64, 150.0), (128, 196.5), (256, 200.0))


def fed(outcome: Outcome, loader: float) -> Outcome:
    assert outcome.measurement is not None
    seconds = outcome.measurement.samples_per_step / loader
    return replace(outcome, measurement=replace(outcome.measurement, data_seconds=seconds))


def test_the_knee_is_within_two_per_cent_of_the_most_samples_a_second() -> None:
    history = [measured(at(size, "mixed_bfloat16"), rate) for size, rate in CURVE]
    assert knee_of(history, "mixed_bfloat16") == 128
    slower = measured({**at(128, "mixed_bfloat16"), "memory_format": "channels_last"}, 100.0)
    assert knee_of([*history, slower], "mixed_bfloat16") == 128, "the fastest at a batch counts"
    assert knee_of([*history, measured(at(512), 900.0)], "mixed_bfloat16") == 128


def test_a_single_batch_has_no_knee() -> None:
    assert knee_of([measured(at(32), 100.0)], "float32") is None
    failed = Outcome(at(64), Status.OUT_OF_MEMORY)
    assert knee_of([measured(at(32), 100.0), failed], "float32") is None


def test_the_loader_moves_the_knee_to_the_smallest_batch_that_it_does_not_keep_up_with() -> None:
    history = [fed(measured(at(size), rate), 140.0) for size, rate in CURVE]
    assert knee_of(history, "float32") == 64


def test_the_largest_that_fits_is_of_those_that_ran() -> None:
    history = [measured(at(32), 1.0), measured(at(256), 1.0), Outcome(at(512), Status.KILLED)]
    assert largest_that_ran(history) == 256


def test_a_larger_batch_than_all_that_gained_nothing_is_tried_only_where_it_is_cheap() -> None:
    def curve(speed: float) -> list[Outcome]:
        return [
            measured(at(size), speed * rate)
            for size, rate in ((256, 150.0), (512, 196.5), (1024, 200.0))
        ]

    limits, slow, fast = Limits(), curve(1.0), curve(100.0)
    assert not outgrows_knee(at(1024), slow, limits)
    assert not outgrows_knee(at(2048, "mixed_bfloat16"), slow, limits), "it has not run there"
    assert outgrows_knee(at(2048), slow, limits), "four steps take more than three seconds"
    assert not outgrows_knee(at(2048), slow[:1], limits)
    assert not outgrows_knee(at(2048), [slow[0], slow[2]], limits), "it rises"
    assert not outgrows_knee(at(1024), slow[:2], limits), "grids that were checked go so far"
    assert not outgrows_knee(at(8192), fast, limits)
    assert outgrows_knee(at(16384), fast, limits)
