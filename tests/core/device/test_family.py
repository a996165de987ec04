"""What must hold of a catalogue row: what cannot be matched is refused when it is read."""

import pytest

from autoprec.core.codec import DecodeError, from_plain
from autoprec.core.device.family import Match


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1-2-3", "1" * 10])
def test_a_range_that_is_none_is_refused_when_it_is_read(text):
    with pytest.raises(DecodeError, match="expected a number or a range"):
        from_plain(Match, {"cpu_model": [text]})


def test_a_pattern_that_is_no_regular_expression_is_refused_when_it_is_read():
    with pytest.raises(DecodeError, match=r"'\(' is no regular expression"):
        from_plain(Match, {"name": ["("]})
    with pytest.raises(DecodeError, match="is longer than 500 characters"):
        from_plain(Match, {"board": ["a" * 501]})


def test_numbers_and_ranges_of_numbers_are_read():
    assert from_plain(Match, {"cpu_model": ["1", "16-31"]}).cpu_model == ("1", "16-31")
