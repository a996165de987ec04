"""The worker's own side: what is answered, what is limited, what is shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autoprec.backends.shared.process_memory import can_keep_freed_memory
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.errors import DataError, TaskError, UserCodeError
from autoprec.workers import server as worker_module
from autoprec.workers.channel import ChannelClosed
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.memory_limit import MemoryLimit

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")

MIB = 2**20


class Fails:
    """A service whose every method raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def close(self, *, name: str) -> None:
        raise self._error


def answer_of(service: Any) -> dict[str, Any]:
    request = {"call": "close", "arguments": {"name": "x"}}
    return worker_module._answer(service, request, MemoryLimit(None))


def failure_of(error: BaseException) -> dict[str, str]:
    answer = answer_of(Fails(error))
    found: dict[str, str] = answer["failure"]
    return found


def raised(error: BaseException, by: str = "exec") -> BaseException:
    """The exception with the traceback of a line that is not ours."""
    try:
        exec(compile("raise error", "/home/me/model.py", by), {"error": error})
    except BaseException as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out_of_memory"),
        (SystemExit(2), "user_error"),
        (KeyError("x"), "user_error"),
        (TaskError("wrong"), "user_error"),
        (UserCodeError("wrong", "frames"), "user_error"),
        (RuntimeError("CUDA error: unspecified launch failure"), "device_fault"),
    ],
)
def test_an_exception_becomes_its_kind(error: BaseException, kind: str) -> None:
    assert failure_of(raised(error))["kind"] == kind


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (ValueError("row 7 is damaged"), "data_error"),
        (RuntimeError("could not create a primitive"), "data_error"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "killed"),
        (RuntimeError("CUDA out of memory"), "out_of_memory"),
    ],
)
def test_what_the_data_raise_is_told_from_what_recipes_do(cause: Exception, kind: str) -> None:
    error = DataError("model.py: what build_data returned raised it")
    error.__cause__ = raised(cause)
    told = failure_of(error)
    assert (told["kind"], told["message"]) == (kind, str(error))
    assert "/home/me/model.py" in told["frames"]


def test_the_channels_end_is_no_answer() -> None:
    with pytest.raises(ChannelClosed):
        failure_of(ChannelClosed("gone"))


def test_a_fault_of_ours_is_not_called_the_users() -> None:
    def ours(**_: Any) -> None:
        raise LookupError("no such thing")

    code = ours.__code__.replace(co_filename=str(Path(worker_module.__file__)))
    ours.__code__ = code

    class Service:
        close = staticmethod(ours)

    answer = answer_of(Service())
    assert answer["failure"]["kind"] == "internal"
    assert "autoprec itself failed: LookupError" in answer["failure"]["message"]


def test_out_of_memory_while_a_task_is_imported_is_not_the_users_error() -> None:
    error = UserCodeError("model.py raised MemoryError while it was imported", "frames")
    error.__cause__ = MemoryError()
    assert failure_of(error)["kind"] == "out_of_memory"


def test_a_message_and_frames_of_any_length_are_cut() -> None:
    found = failure_of(raised(ValueError("x" * 10_000_000)))
    assert len(found["message"]) <= 4_000
    assert len(found["frames"]) <= 20_000


def test_an_argument_that_does_not_fit_is_our_fault_and_no_crash(simulated, start) -> None:
    worker = start(simulated())
    worker.load()
    with pytest.raises(WorkerFailure):
        worker.call("describe", batch_size="many", seed=0)
    assert worker.alive


def test_a_result_that_json_cannot_say_is_a_failure_and_no_crash(simulated, start) -> None:
    worker = start(simulated(overhead={"float32": float("nan")}).with_suffix(".py"))
    task = worker.settings.task.path
    task.write_text("nan = float('nan')\n" + task.read_text())
    worker.load()
    with pytest.raises(WorkerFailure) as info:
        worker.call("measure", recipe=Recipe(), seed=0, budget=TimingBudget(max_steps=5))
    assert info.value.kind == FailureKind.INTERNAL
    assert worker.alive


# Memory ------------------------------------------------------------------------------------------

HOLD = """
from simulated import SimulatedModel
held = []

def build_model():
    return SimulatedModel()

def build_data(batch_size):
    return []

def evaluate(model):
    return 0.0
"""


def taking(tmp_path: Path, code: str) -> Path:
    path = tmp_path / "taking.py"
    body = "\n".join(f"    {line}" for line in code.strip().splitlines())
    path.write_text(
        HOLD.replace("    return SimulatedModel()", f"{body}\n    return SimulatedModel()")
    )
    return path


#: Leaves no memory even for saying so.
TO_THE_LAST = """
for size in (1 << 20, 1 << 12, 64):
    try:
        while True:
            held.append(bytearray(size))
    except MemoryError:
        pass
raise MemoryError
"""


@linux
@pytest.mark.parametrize(
    "code",
    [
        "held.append(bytearray(600 << 20))",
        "for _ in range(600): held.append(bytearray(1 << 20))",
        "import mmap; m = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
        TO_THE_LAST,
    ],
    ids=["at once", "bit by bit", "mmap", "to the last byte"],
)
def test_too_much_memory_is_an_exception_in_the_worker(tmp_path: Path, start, code: str) -> None:
    # Not forked: what a worker's report imports must have its room, and a fork has imported it.
    alone = {"STARTED_AS_USERS_DO": "1"}
    worker = start(taking(tmp_path, code), memory_bytes=400 * MIB, environment=alone)
    with pytest.raises(WorkerFailure) as info:
        worker.load()
    assert info.value.kind == FailureKind.OUT_OF_MEMORY
    assert "taking.py" in info.value.frames
    assert worker.alive


#: Reserves address space once, which later steps do not touch.
RESERVING = """
import mmap
if not held:
    held.append(mmap.mmap(-1, 300 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
return SimulatedModel(base_bytes=200 << 20, allocate_memory=True)
"""
KEEPING = f"""
from autoprec.backends.shared.process_memory import keep_freed_memory
assert keep_freed_memory()
{RESERVING}
"""


glibc = pytest.mark.skipif(
    not can_keep_freed_memory(), reason="malloc is not glibc's here: it cannot be told to keep"
)


@linux
@pytest.mark.parametrize(
    ("code", "runs", "too_large"),
    [(RESERVING, [], 8), pytest.param(KEEPING, [8], 512, marks=glibc)],
)
def test_where_freed_memory_is_kept_only_what_is_resident_counts_against_the_limit(
    tmp_path: Path, start, code: str, runs: list[int], too_large: int
) -> None:
    """A heap keeps its address space when its pages were given back (malloc_trim)."""
    worker = start(taking(tmp_path, code), memory_bytes=400 * MIB)
    worker.load()
    few = TimingBudget(max_steps=5)
    for batch in runs:
        worker.call("measure", recipe=Recipe(batch_size=batch), seed=0, budget=few)
    with pytest.raises(WorkerFailure) as info:
        worker.call("measure", recipe=Recipe(batch_size=too_large), seed=0, budget=few)
    assert info.value.kind == FailureKind.OUT_OF_MEMORY


SHARED = """
import mmap, time
m = mmap.mmap(-1, 900 << 20)
for at in range(0, len(m), 4096):
    m[at] = 1
time.sleep(3600)
"""

FORKED = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        block = bytearray(300 << 20)
        for at in range(0, len(block), 4096):
            block[at] = 1
        time.sleep(3600)
time.sleep(3600)
"""


@linux
@pytest.mark.parametrize("code", [SHARED, FORKED], ids=["shared memory", "children together"])
def test_what_the_limit_does_not_count_is_watched(tmp_path: Path, start, code: str) -> None:
    worker = start(taking(tmp_path, code), memory_bytes=500 * MIB)
    with pytest.raises(WorkerFailure) as info:
        worker.load()
    assert info.value.kind == FailureKind.OUT_OF_MEMORY
    assert "before the kernel would" in info.value.message
    assert not worker.alive


COPIES = """
import os, time
block = bytearray(200 << 20)
for at in range(0, len(block), 4096):
    block[at] = 1
for _ in range(6):
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
time.sleep(2.5)
"""


@linux
def test_pages_that_children_share_are_counted_once(tmp_path: Path, start) -> None:
    """Six forked loaders over one data set hold it once, not seven times."""
    worker = start(taking(tmp_path, COPIES), memory_bytes=500 * MIB)
    assert worker.load()


@linux
def test_the_kernels_killer_would_take_the_worker_first(simulated, start) -> None:
    worker = start(simulated())
    worker.load()
    assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) > 0
    assert int(Path("/proc/self/oom_score_adj").read_text()) <= 0


@linux
def test_no_core_file_is_left(simulated, start) -> None:
    worker = start(simulated())
    worker.load()
    limits = Path(f"/proc/{worker.pid}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert line.split()[4] == "0"
