"""What must hold of numbers in words: the same digits everywhere, and none that mean nothing."""

from __future__ import annotations

import math

import pytest

from autoprec.core.number_words import (
    about_times,
    milliseconds,
    percent,
    plain_number,
    rate_number,
    times,
)


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


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [(12.3, 1, "10"), (154_321.0, 3, "154000"), (0.00123, 2, "0.0012"), (2.0, 3, "2")],
)
def test_a_number_of_few_digits_has_no_exponent(number: float, digits: int, text: str) -> None:
    assert plain_number(number, digits) == text
