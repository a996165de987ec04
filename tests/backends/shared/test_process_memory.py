"""Growth of this process's memory is noticed, and only glibc is told to keep what is freed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoprec.backends.shared.process_memory import (
    MemoryGrowth,
    can_keep_freed_memory,
    peak_resident_bytes,
    reset_peak_resident,
)

MIB = 2**20


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = "7f00-7f10 r-xp 00000000 00:00 0 /usr/lib/libjemalloc.so.2\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *args, **kwargs: maps)
    assert not can_keep_freed_memory()


def test_a_system_without_glibc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.confstr", lambda name: None)
    assert not can_keep_freed_memory()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak cannot be read often")
def test_growing_memory_is_noticed_and_memory_that_stays_is_not() -> None:
    reset_peak_resident()  # what other tests of this process held is not its peak
    growth = MemoryGrowth()
    held = [bytearray(b"1") * (128 * MIB)]
    assert growth.since_last_check()
    assert not growth.since_last_check()
    held.append(bytearray(b"1") * (128 * MIB))
    assert growth.since_last_check()
    assert peak_resident_bytes() >= 256 * MIB
