"""Other processes on the processors are noticed, from /proc files that say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from factories import FakeClock

from autoprec.backends.protocol import DeviceMemory
from autoprec.core.speed.contention import Usage
from autoprec.workers import cpu_contention
from autoprec.workers.cpu_contention import (
    ContentionMonitor,
    ProcessorUsage,
    warn_of_other_users,
)


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


def usage_of(machine: tuple[Path, FakeClock], used: int, own: int) -> Usage | None:
    proc, clock = machine
    watch = ProcessorUsage(proc)
    write(proc, (0, 0), {os.getpid(): 0, 77: 0})
    watch.start([77])
    clock.now = 1.0
    write(proc, (used, used), {os.getpid(): 0, 77: own})
    return watch.usage([77])


@pytest.mark.parametrize(
    ("used", "own", "others", "idle"),
    [
        pytest.param(100, 200, 0.0, 0.0, id="alone"),
        pytest.param(100, 100, 0.5, 0.0, id="others use what is left over"),
        pytest.param(60, 100, 0.1, 0.4, id="nobody uses the rest"),
    ],
)
def test_what_others_use_is_what_is_left_over(
    machine: tuple[Path, FakeClock], used: int, own: int, others: float, idle: float
) -> None:
    found = usage_of(machine, used, own)
    assert found is not None
    assert (found.others, found.idle) == pytest.approx((others, idle))


def test_a_process_that_starts_or_ends_meanwhile_is_no_other(
    machine: tuple[Path, FakeClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, clock = machine
    monkeypatch.setattr(cpu_contention, "ProcessorUsage", lambda: ProcessorUsage(proc))
    watch = ContentionMonitor(lambda said: None)
    pids = [77]
    write(proc, (0, 0), {os.getpid(): 0, 77: 500})

    def measure() -> None:
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

    watch.undisturbed(measure, lambda: pids)
    assert watch.worst == 0.0


def test_what_a_worker_started_is_its_own(machine: tuple[Path, FakeClock]) -> None:
    proc, clock = machine
    watch = ProcessorUsage(proc)
    for pid, thread, children in ((77, 77, ""), (77, 79, "80 81 "), (80, 80, "82")):
        (proc / f"{pid}/task/{thread}").mkdir(parents=True)
        (proc / f"{pid}/task/{thread}/children").write_text(children)
    write(proc, (0, 0), {os.getpid(): 0, 77: 0, 80: 0, 81: 0, 82: 0, 90: 0})
    watch.start([77])
    clock.now = 1.0
    write(proc, (100, 100), {os.getpid(): 0, 77: 50, 80: 20, 81: 30, 82: 40, 90: 60})
    found = watch.usage([77])
    assert found is not None
    assert found.others == pytest.approx(60 / 200)


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    watch = ProcessorUsage(tmp_path)
    watch.start([])
    assert watch.usage([]) is None


class SharedMachine(FakeClock):
    """Two processors: one for us, and one that a neighbour keeps busy from `began` to `ended`."""

    def __init__(self, proc: Path, *busy: tuple[float, float]) -> None:
        super().__init__()
        self._proc, self._busy, self._own = proc, busy, 0.0
        self.measured: list[float] = []
        self.said: list[str] = []
        self.sleep(0.0)

    def sleep(self, seconds: float) -> None:
        """Let time pass, in which nothing but the neighbour runs."""
        self._pass(seconds, 0.0)

    def _pass(self, seconds: float, own: float) -> None:
        self.now += seconds
        self._own += own
        theirs = sum(max(0.0, min(self.now, end) - began) for began, end in self._busy)
        mine = round(100 * self._own)
        write(self._proc, (mine, round(100 * theirs)), {os.getpid(): mine})

    def measure(self, own: float = 1.0) -> float:
        """Take a second, and `own` seconds of processors; return when it began."""
        self.measured.append(self.now)
        self._pass(1.0, own)
        return self.measured[-1]


def shared_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *busy: tuple[float, float]
) -> SharedMachine:
    made = SharedMachine(folder, *busy)
    monkeypatch.setattr(cpu_contention, "time", made)
    monkeypatch.setattr(cpu_contention, "_processors", lambda: {0, 1})
    monkeypatch.setattr(cpu_contention, "_ticks", lambda: 100)
    monkeypatch.setattr(cpu_contention, "ProcessorUsage", lambda: ProcessorUsage(folder))
    return made


def test_what_a_neighbour_disturbed_is_measured_again_when_it_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shared_machine(tmp_path, monkeypatch, (0.2, 3.0))
    watch = ContentionMonitor(here.said.append)
    assert watch.undisturbed(here.measure, list) == pytest.approx(3.2, abs=0.21)
    assert len(here.measured) == 2
    assert watch.undisturbed(here.measure, list) == here.measured[2]
    assert watch.worst == 0.0
    (said,) = here.said
    assert "using 40% of these processors" in said
    assert "measured again when they pause" in said


def test_it_is_measured_until_no_neighbour_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shared_machine(tmp_path, monkeypatch, (0.2, 3.0), (3.3, 6.0), (6.3, 8.0))
    watch = ContentionMonitor(here.said.append)
    assert watch.undisturbed(here.measure, list) >= 8.0
    assert (len(here.said), watch.worst) == (1, 0.0)


def test_a_neighbour_that_never_pauses_is_waited_for_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shared_machine(tmp_path, monkeypatch, (0.0, 1e6))
    watch = ContentionMonitor(here.said.append, patience=40.0)
    for number in range(50):
        watch.undisturbed(here.measure, list)
        assert len(here.measured) == number + 1
    assert here.now - 50 < 20
    assert watch.worst == pytest.approx(0.5)
    waits, unreliable = here.said
    assert "measured again when they pause" in waits
    assert "unreliable" in unreliable


def test_who_has_room_enough_is_not_waited_for_but_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shared_machine(tmp_path, monkeypatch, (0.0, 0.5))
    watch = ContentionMonitor(here.said.append)
    assert watch.undisturbed(lambda: here.measure(own=0.6), list) == 0.0
    assert (len(here.measured), here.now) == (1, 1.0)
    assert watch.worst == pytest.approx(0.25)
    (said,) = here.said
    assert "unreliable" in said


@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_what_takes_longer_than_patience_lasts_counts_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    here = shared_machine(tmp_path, monkeypatch, (0.0, 0.9))
    watch = ContentionMonitor(here.said.append, patience=patience)
    assert watch.undisturbed(here.measure, list) == 0.0
    assert (len(here.measured), here.now) == (1, 1.0)
    assert watch.worst == pytest.approx(0.45)


def test_a_failure_counts_whatever_ran_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shared_machine(tmp_path, monkeypatch, (0.0, 2.0))
    watch = ContentionMonitor(here.said.append)
    assert watch.undisturbed(here.measure, list, lambda result: False) == 0.0
    assert len(here.measured) == 1


def test_a_busy_neighbour_is_named_once_and_the_worst_remembered(
    machine: tuple[Path, FakeClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, clock = machine
    monkeypatch.setattr(cpu_contention, "ProcessorUsage", lambda: ProcessorUsage(proc))
    said: list[str] = []
    watch = ContentionMonitor(said.append, patience=0.0)
    for used in (20, 80, 60):
        write(proc, (0, 0), {os.getpid(): 0})

        def measure(used: int = used) -> None:
            clock.now += 1.0
            write(proc, (used, used), {os.getpid(): 0})

        watch.undisturbed(measure, list)
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
