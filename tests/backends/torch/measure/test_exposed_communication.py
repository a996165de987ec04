"""The share of an update that waits for other ranks, from micro-batches with and without."""

from __future__ import annotations

import contextlib

import pytest

from autoprec.backends.torch.measure.exposed_communication import (
    exposed_communication,
    exposed_share,
)


def test_one_micro_batch_waits_for_what_the_reduction_adds():
    share = exposed_share([3.0] * 6, [4.0] * 6, micro_batches=1)
    assert (share.ratio, share.low, share.high) == pytest.approx((0.25, 0.25, 0.25))


def test_an_update_of_several_micro_batches_waits_once():
    share = exposed_share([3.0] * 6, [4.0] * 6, micro_batches=3)
    assert share.ratio == pytest.approx(1.0 / 10.0)


def test_a_reduction_that_is_hidden_is_no_negative_share():
    share = exposed_share([4.1, 3.9, 4.2, 4.0], [4.0] * 4, micro_batches=1)
    assert share.low == 0.0 <= share.ratio <= share.high < 0.1


def test_the_interval_is_in_order():
    share = exposed_share([3.0, 2.0, 3.5, 2.5, 3.0, 2.8, 2.9], [4.0] * 7, micro_batches=2)
    assert 0.0 < share.low < share.ratio < share.high < 1.0


def test_it_alternates_ends_synchronised_and_makes_two_rounds_when_there_is_no_time():
    made: list[str] = []
    inside = [False]

    @contextlib.contextmanager
    def no_sync():
        inside[0] = True
        yield
        inside[0] = False

    found = exposed_communication(
        lambda: made.append("alone" if inside[0] else "reduced"),
        no_sync,
        synchronize=lambda: None,
        slowest=lambda times: [2.0, 4.0],
        micro_batches=1,
        seconds=0.0,
    )
    assert made == ["alone", "reduced"] * 3  # the first round warms up
    assert (found.ratio, found.rounds) == (0.5, 2)
