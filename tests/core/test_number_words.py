"""What must hold of numbers in words: the same digits everywhere, and none that mean nothing."""

from __future__ import annotations

import math

import pytest

from autoprec.core.number_words import about_times, milliseconds, percent, rate_number, times
from autoprec.core.speed.noise import Ratio


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(66.187, "66.19x"), (1.0, "1.00x"), (0.1, "0.10x"), (0.0417, "0.042x"), (0.0, "0x")],
)
def test_a_measured_ratio_has_two_decimals_and_two_digits_at_least(ratio, text):
    assert times(ratio) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(2.17, "2.2x"), (768.4, "770x"), (0.0025, "0.0025x"), (12.0, "12x")]
)
def test_an_estimate_is_written_without_an_exponent(ratio, text):
    assert about_times(ratio) == text


@pytest.mark.parametrize(
    ("ratio", "digits", "text"),
    [
        (Ratio(1.84, 1.79, 1.88, 7), 2, "1.84x (1.79-1.88, 7 rounds)"),
        (Ratio(1.84, 1.79, 1.88, 0), 2, "1.84x (1.79-1.88)"),
        (Ratio(1.84, 1.84, 1.84, 1), 2, "1.84x (1 round)"),
        (Ratio(1.0, 1.0, 1.0, 0), 2, "1.00x"),
        (Ratio(1.0142, 1.0064, 1.0225, 0), 4, "1.0142x (1.0064-1.0225)"),
        (Ratio(0.0417, 0.0402, 0.12, 6), 2, "0.042x (0.04-0.12, 6 rounds)"),
    ],
)
def test_a_ratio_is_shown_with_what_is_known_of_its_interval(ratio, digits, text):
    assert ratio.in_words(digits) == text


def test_every_number_of_a_ratio_can_be_marked_up():
    marked = Ratio(1.84, 1.79, 1.88, 7).in_words(show=lambda value, text: f"<{value}|{text}>")
    assert marked == "<1.84|1.84x> (<1.79|1.79>-<1.88|1.88>, <7|7> rounds)"


def test_a_share_has_its_interval_in_per_cent():
    assert Ratio(0.21, 0.184, 0.25, 8).as_share() == "21% (18-25)"


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.0, "0 %"),
        (0.00031, "0.031 %"),
        (0.05, "5 %"),
        (0.1234, "12 %"),
        (0.9949, "99 %"),
        (0.995, "100 %"),
        (7.84, "784 %"),
        (99.9, "9990 %"),
        (100.0, "1e+04 %"),
        (math.inf, "infinitely far"),
    ],
)
def test_a_share_is_told_in_two_digits_or_in_whole_percents(share, said):
    assert percent(share) == said


def test_rates_have_three_digits_and_times_of_steps_two():
    assert (rate_number(1450.4), rate_number(9.876)) == ("1450", "9.88")
    said = [milliseconds(each) for each in (0.0031, 0.0994, 0.0996, 0.4123)]
    assert said == ["3.1 ms", "99 ms", "100 ms", "412 ms"]
