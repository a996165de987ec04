"""What a node and the driver say to each other reads back as it was said."""

from __future__ import annotations

from typing import get_args

import pytest
from fuzz.values import profiles, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.codec import DecodeError
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.policies import Candidate, Proposal, Refusal
from autoprec.errors import AutoprecError, TrialFailure, UsageError, UserCodeError
from autoprec.fleet.messages import Journal, Message, from_line, to_line
from autoprec.tuning.events import Event, Note, Started

PROPOSALS = st.builds(
    Proposal,
    st.lists(values_of(Candidate), min_size=1, max_size=3).map(tuple),
    values_of(tuple[Refusal, ...]),
    st.text(max_size=9),
)
STARTED = st.builds(Started, st.just("a.py"), values_of(DeviceFacts), PROPOSALS, st.just("s"))
EVENTS = [STARTED if kind is Started else values_of(kind) for kind in get_args(Event)]


@settings(max_examples=100)
@given(st.one_of([*EVENTS, profiles, st.builds(Journal, st.text(max_size=40))]))
def test_every_message_reads_back_as_it_was(message: Message) -> None:
    assert from_line(to_line(message)) == message


class OnlyHere(TrialFailure):
    """A kind of error that no reader knows."""


@pytest.mark.parametrize(
    "error", [UsageError("given, expected"), UserCodeError("it raised", "line 3"), OnlyHere("a")]
)
def test_an_error_keeps_its_kind_its_message_and_the_users_frames(error: AutoprecError) -> None:
    read = from_line(to_line(error))
    assert str(read) == str(error)
    assert type(read) is (TrialFailure if isinstance(error, OnlyHere) else type(error))
    assert getattr(read, "frames", "") == getattr(error, "frames", "")


def test_a_line_of_another_kind_is_refused() -> None:
    line = to_line(Note("one")).replace(b'"Note"', b'"system"')
    with pytest.raises(DecodeError, match=r"kind: 'system' given"):
        from_line(line)
