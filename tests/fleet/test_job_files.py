"""How a batch job and the driver talk through files."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import FakeClock

from autoprec.fleet.job_files import (
    LEASE_LIMIT_SECONDS,
    LEASE_SECONDS,
    DriverGone,
    Lease,
    MessageReader,
    MessageWriter,
)
from autoprec.fleet.messages import Ended, Update
from autoprec.tuning.events import Note


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
