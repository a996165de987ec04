"""Other processes on the processors are noticed, from /proc files that say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from factories import FakeClock

from autoprec.backends.protocol import DeviceMemory
from autoprec.workers import cpu_contention
from autoprec.workers.cpu_contention import ContentionMonitor, ProcessorShare, warn_of_other_users


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, FakeClock]:
    clock = FakeClock()
    monkeypatch.setattr(cpu_contention, "time", clock)
    monkeypatch.setattr(cpu_contention, "_processors", lambda: {0, 1})
    monkeypatch.setattr(cpu_contention, "_ticks", lambda: 100)
    return tmp_path, clock


def write(proc: Path, busy: tuple[int, int], own: dict[int, int]) -> None:
    """`busy` ticks of processors 0 and 1 (2 is not ours), and the ticks each process used."""
    lines = [f"cpu{n} {ticks} 0 0 1000 0 0 0 0 0 0" for n, ticks in enumerate((*busy, 9999))]
    (proc / "stat").write_text("cpu 1 1 1 1\n" + "\n".join(lines))
    for pid, ticks in own.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 10]
        (proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}")


def shares(machine: tuple[Path, FakeClock], used: int, own: int) -> float | None:
    proc, clock = machine
    watch = ProcessorShare(proc)
    write(proc, (0, 0), {os.getpid(): 0, 77: 0})
    watch.start([77])
    clock.now = 1.0
    write(proc, (used, used), {os.getpid(): 0, 77: own})
    return watch.share([77])


def test_alone_the_share_is_nothing(machine: tuple[Path, FakeClock]) -> None:
    assert shares(machine, used=100, own=200) == 0.0


def test_what_others_use_is_what_is_left_over(machine: tuple[Path, FakeClock]) -> None:
    assert shares(machine, used=100, own=100) == pytest.approx(0.5)


def test_a_process_that_starts_or_ends_meanwhile_is_no_other(
    machine: tuple[Path, FakeClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, clock = machine
    monkeypatch.setattr(cpu_contention, "ProcessorShare", lambda: ProcessorShare(proc))
    watch = ContentionMonitor(lambda said: None)
    pids = [77]
    write(proc, (0, 0), {os.getpid(): 0, 77: 500})
    with watch.over(lambda: pids):
        clock.now = 1.0
        write(proc, (100, 100), {os.getpid(): 0, 78: 80})
        fields = [
            "S",
            *["0"] * 12,
            str(500 + 120),
            *["0"] * 10,
        ]  # 77 ended; its parent's child time
        (proc / str(os.getpid()) / "stat").write_text(f"1 (me) {' '.join(fields)}")
        pids[:] = [78]
    assert watch.worst == 0.0


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    watch = ProcessorShare(tmp_path)
    watch.start([])
    assert watch.share([]) is None


def test_a_busy_neighbour_is_named_once_and_the_worst_remembered(
    machine: tuple[Path, FakeClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, clock = machine
    monkeypatch.setattr(cpu_contention, "ProcessorShare", lambda: ProcessorShare(proc))
    said: list[str] = []
    watch = ContentionMonitor(said.append)
    for used in (20, 80, 60):
        write(proc, (0, 0), {os.getpid(): 0})
        with watch.over(list):
            clock.now += 1.0
            write(proc, (used, used), {os.getpid(): 0})
    assert len(said) == 1
    assert "20%" in said[0]
    assert watch.worst == pytest.approx(0.8)


GIB = 2**30


@pytest.mark.parametrize("others", [0, GIB // 2, GIB])
def test_a_desktop_on_an_accelerator_is_nothing_to_speak_of(others: int) -> None:
    assert warn_of_other_users(DeviceMemory(free=20 * GIB, others=others)) == ""


def test_who_holds_an_accelerators_memory_is_told_with_what_is_left() -> None:
    said = warn_of_other_users(DeviceMemory(free=20 * GIB, others=60 * GIB))
    assert said.startswith("other processes hold 60.0 GiB of this device")
    assert "20.0 GiB that are free" in said
