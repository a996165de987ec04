"""How a batch job and the driver talk through files."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from factories import FakeClock
from fuzz.values import profiles, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.codec import DecodeError
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.policies import Candidate, Proposal, Refusal
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecError, UsageError, UserCodeError
from autoprec.fleet.job_files import (
    LEASE_LIMIT_SECONDS,
    LEASE_SECONDS,
    DriverGone,
    Lease,
    MessageReader,
    MessageWriter,
)
from autoprec.fleet.messages import Ended, Update, from_line, to_line
from autoprec.tuning.events import Event, Note, Started


def test_messages_arrive_once_and_in_order(tmp_path: Path) -> None:
    write, reader = MessageWriter(tmp_path / "m"), MessageReader(tmp_path / "m")
    assert reader.read() == []
    first, second = Update(Note("one"), b"line\n", 7), Update(Note("two"))
    write(first)
    write(second)
    assert reader.read() == [first, second]
    assert reader.read() == []
    write(Ended())
    assert reader.read() == [Ended()]


PROPOSALS = st.builds(
    Proposal,
    st.lists(values_of(Candidate), min_size=1, max_size=3).map(tuple),
    values_of(tuple[Refusal, ...]),
    st.text(max_size=9),
)
STARTED = st.builds(Started, st.just("a.py"), values_of(DeviceFacts), PROPOSALS, st.just("s"))
EVENTS = [STARTED if kind is Started else values_of(kind) for kind in get_args(Event)]


@settings(max_examples=100)
@given(st.one_of(EVENTS), st.binary(max_size=40))
def test_every_event_and_any_journal_read_back_as_they_were(event: Event, journal: bytes) -> None:
    assert from_line(to_line(Update(event, journal, 3))) == Update(event, journal, 3)


@given(profiles)
def test_a_profile_reads_back_as_it_was(profile: Profile) -> None:
    assert from_line(to_line(Ended(profile))) == Ended(profile)


@pytest.mark.parametrize(
    "error", [UsageError("given, expected"), UserCodeError("it raised", "line 3"), DriverGone("a")]
)
def test_an_error_keeps_its_kind_its_message_and_the_users_frames(error: AutoprecError) -> None:
    read = from_line(to_line(Ended(error=error)))
    assert isinstance(read, Ended)
    assert str(read.error) == str(error)
    assert type(read.error) is (AutoprecError if isinstance(error, DriverGone) else type(error))
    assert getattr(read.error, "frames", "") == getattr(error, "frames", "")


def test_a_line_of_another_kind_is_refused() -> None:
    line = to_line(Update(Note("one"))).replace(b'"Note"', b'"system"')
    with pytest.raises(DecodeError, match=r"event\.kind: 'system' given"):
        from_line(line)


def test_a_message_that_is_still_being_written_is_read_later(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    MessageWriter(whole)(Update(Note("one")))
    content = whole.read_bytes()
    reader = MessageReader(part)
    for end in range(len(content)):
        part.write_bytes(content[:end])
        assert reader.read() == []
    part.write_bytes(content + content[:5])
    assert reader.read() == [Update(Note("one"))]
    part.write_bytes(content * 2)
    assert reader.read() == [Update(Note("one"))]


def test_a_job_goes_on_while_the_lease_is_renewed_and_ends_when_it_is_not(tmp_path: Path) -> None:
    clock = FakeClock()
    ours, theirs = Lease(tmp_path / "lease", clock), Lease(tmp_path / "lease", clock)
    for _ in range(50):
        ours.renew()
        theirs.check()
        clock.now += LEASE_SECONDS
    clock.now += LEASE_LIMIT_SECONDS - LEASE_SECONDS
    theirs.check()
    clock.now += 1
    with pytest.raises(DriverGone):
        theirs.check()


def test_a_lease_that_was_never_given_or_is_removed_runs_out(tmp_path: Path) -> None:
    clock = FakeClock()
    lease = Lease(tmp_path / "lease", clock)
    lease.check()
    clock.now += LEASE_LIMIT_SECONDS + 1
    with pytest.raises(DriverGone):
        lease.check()
