"""The guard's own decisions: what is too much memory, and who belongs to the worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoprec.workers import supervisor
from autoprec.workers.supervisor import (
    available_bytes,
    children_of,
    descendants_of,
    proportional_bytes,
    resident_bytes,
)

linux = pytest.mark.skipif(not supervisor.LINUX, reason="/proc is Linux's")
GIB = 2**30
PLENTY = 64 * GIB


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, int]]:
    """Processes whose memory is written down here: resident, and their share of it."""
    known: dict[str, dict[int, int]] = {"resident": {}, "share": {}, "children": {}, "left": {}}
    known["left"][0] = PLENTY
    monkeypatch.setattr(supervisor, "resident_bytes", lambda pid: known["resident"].get(pid, 0))
    monkeypatch.setattr(supervisor, "proportional_bytes", lambda pid: known["share"].get(pid, 0))
    monkeypatch.setattr(supervisor, "descendants_of", lambda pid: list(known["children"]))
    monkeypatch.setattr(supervisor, "available_bytes", lambda: known["left"][0])
    return known


def watching(most_bytes: int | None) -> supervisor._Guard:
    return supervisor._Guard(worker=10, tuner=1, lifeline=-1, status=-1, most_bytes=most_bytes)


def test_without_a_budget_nothing_is_too_much(machine: dict[str, dict[int, int]]) -> None:
    machine["resident"][10] = PLENTY
    machine["left"][0] = 0
    assert watching(None)._over_budget() is None


@pytest.mark.parametrize(
    ("held", "said"),
    [(2 * GIB, None), (2 * GIB + 2**28, "2.25 GiB were resident of the 2.00 GiB there are")],
)
def test_a_worker_alone_may_hold_all_of_its_budget(
    machine: dict[str, dict[int, int]], held: int, said: str | None
) -> None:
    machine["resident"][10] = held
    assert watching(2 * GIB)._over_budget() == said


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((GIB // 2, GIB // 2), None),  # forked: most of what both hold is one
        ((GIB, 2 * GIB), "3.00 GiB were resident of the 2.00 GiB there are"),
    ],
)
def test_what_forked_children_share_counts_once(
    machine: dict[str, dict[int, int]], shares: tuple[int, int], said: str | None
) -> None:
    machine["children"][11] = 1
    machine["resident"].update({10: 2 * GIB, 11: 2 * GIB})
    machine["share"].update({10: shares[0], 11: shares[1]})
    assert watching(2 * GIB)._over_budget() == said


def test_a_child_that_came_since_is_seen_within_a_second(
    machine: dict[str, dict[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    watch = watching(2 * GIB)
    machine["resident"].update({10: GIB, 11: 2 * GIB})
    machine["share"].update({10: GIB, 11: 2 * GIB})
    assert watch._over_budget() is None
    machine["children"][11] = 1
    now[0] = 100.9
    assert watch._over_budget() is None
    now[0] = 101.0
    assert watch._over_budget() == "3.00 GiB were resident of the 2.00 GiB there are"


@pytest.mark.parametrize(
    ("left", "held", "said"),
    [
        (2**27, GIB, None),
        (2**27 - 1, GIB, "only 0.12 GiB of main memory were left"),
        (2**26, 2**26, None),  # it is not this worker that holds the memory
    ],
)
def test_main_memory_that_runs_out_ends_a_worker_that_holds_much_of_it(
    machine: dict[str, dict[int, int]], left: int, held: int, said: str | None
) -> None:
    machine["resident"][10] = held
    machine["left"][0] = left
    assert watching(2 * GIB)._over_budget() == said


# The processes themselves ------------------------------------------------------------------------

#: A child that has a child, tells its process id, and waits for the end of its input.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """The process ids of a child and of its child."""
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            yield child.pid, int(child.stdout.readline())
        finally:
            child.communicate()


def test_descendants_are_children_and_theirs(family: tuple[int, int]) -> None:
    child, grandchild = family
    assert child in children_of(os.getpid())
    assert grandchild not in children_of(os.getpid())
    assert {child, grandchild} <= set(descendants_of(os.getpid()))
    assert descendants_of(child) == [grandchild]
    assert descendants_of(grandchild) == []


@linux
def test_a_process_holds_memory_and_one_that_has_gone_none() -> None:
    own, gone = os.getpid(), 2**22 + 1  # beyond the largest process id there can be
    block = bytearray(32 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert 32 * 2**20 < proportional_bytes(own) <= resident_bytes(own)
    assert resident_bytes(gone) == proportional_bytes(gone) == 0
    left = available_bytes()
    assert left is not None
    assert 2**20 < left < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@linux
@pytest.mark.parametrize(
    ("code", "ended"),
    [("raise SystemExit(3)", {"code": 3}), ("import os; os.kill(os.getpid(), 9)", {"signal": 9})],
)
def test_how_a_worker_ended_is_told_from_what_it_may_have_exited_with(
    code: str, ended: dict[str, int]
) -> None:
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        watch = supervisor._Guard(
            child.pid, tuner=os.getppid(), lifeline=-1, status=-1, most_bytes=None
        )
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert watch._worker_has_ended()
        child.returncode = 0  # the guard has collected it
    assert watch._ended == ended


def test_the_tuner_lives_while_it_is_the_guards_parent() -> None:
    assert supervisor._Guard(10, os.getppid(), -1, -1, None)._tuner_is_alive()
    assert not supervisor._Guard(10, os.getpid(), -1, -1, None)._tuner_is_alive()


@pytest.mark.parametrize(("size", "left"), [(100, 100), (101, 0)])
def test_a_log_is_emptied_before_it_fills_the_disk(
    monkeypatch: pytest.MonkeyPatch, size: int, left: int
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_LOG_BYTES", 100)
    with tempfile.TemporaryFile() as log:
        log.write(b"x" * size)
        log.flush()
        kept = os.dup(1)
        os.dup2(log.fileno(), 1)
        try:
            watching(None)._truncate_large_log()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        assert os.fstat(log.fileno()).st_size == left


def test_a_report_is_one_line_of_json() -> None:
    read, write = os.pipe()
    supervisor._write_report(write, {"signal": int(signal.SIGKILL)})
    os.close(write)
    with Path(f"/dev/fd/{read}").open(encoding="utf-8") as report:
        assert report.read() == '{"signal": 9}\n'
    os.close(read)
