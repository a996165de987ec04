"""The rows of a model of real size: every way in mirrored order, each row as soon as it is known.

    float32, TF32, bfloat16, ... compiled | compiled, ... bfloat16, TF32, float32

So a device that grows slower while it is measured does so for all alike. A row that a check doubts
stays and says why in `doubts`. Rows that are there already are not measured again.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from autoprec.backends.protocol import Task
from autoprec.backends.shared.matmul_timing import ProductBudget, time_product
from autoprec.backends.torch import devices
from autoprec.backends.torch.apply.float8_linear import float8_obstacle
from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.backends.torch.measure import flops
from autoprec.backends.torch.measure.matmul_timing import TorchArithmetic, open_device
from autoprec.core.codec import to_plain
from autoprec.core.dtypes import DType
from autoprec.workers.task_file import load_task
from benchmarks.checkout import REAL_TASKS
from benchmarks.gpu.real_models import Model, Way, few_ways, ways
from benchmarks.gpu.real_steps import Budget, Seen, batches_of, clean, prepare, visit

VISITS = 2
BUDGET, DRY_BUDGET = Budget(), Budget(fewest=1, most=1, warm=1)
PEAK, DRY_PEAK = ProductBudget(dtype_seconds=0.5), ProductBudget(0.001, 0.02)
#: A dry run compiles with Dynamo alone, and one model: Inductor takes minutes on a CPU.
COMPILER, DRY_COMPILER, DRY_COMPILED = "inductor", "eager", "mlp8192"
DRY_BATCHES = (2, 4)
#: Samples from which a step's operations are counted: a mean over them.
COUNTED = 2

#: What a row is held against.
MOST_SHARE, MOST_APART, MOST_LOSS, LEAST_CLOCK = 1.02, 0.05, 0.02, 0.85

Row = Mapping[str, Any]


@dataclass
class Bench:
    """What is the same for all ways: tasks and batches by name and size, and the rows so far."""

    model: Model
    device: str
    quick: bool
    rows: list[Row]
    tasks: dict[str, Task] = field(default_factory=dict)
    batches: dict[int, list[Any]] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)

    def task(self, way: Way | None = None) -> Task:
        """The task that a way trains."""
        name = (way and way.task) or self.model.task
        if name not in self.tasks:
            self.tasks[name] = load_task(REAL_TASKS / f"{name}.py")
        return self.tasks[name]

    def batches_of(self, size: int) -> list[Any]:
        """Batches of a size on the device; those of another size are given up."""
        if size not in self.batches:
            self.batches.clear()
            where = devices.resolve_device(self.device)
            clean(where)
            self.batches[size] = batches_of(self.task(), size, where)
        return self.batches[size]

    def operations_of(self, way: Way) -> float:
        """The operations of a sample's training step, counted without a device."""
        task = self.task(way)
        if task.name not in self.operations:
            self.operations[task.name] = operations_of(task)
        return self.operations[task.name]

    def seen(self, way: Way, visited: int) -> Row | None:
        """The row of an earlier visit, if it has one."""
        found = (row for row in self.rows if row.get("way") == way.name)
        return next((row for row in found if row["visit"] == visited), None)

    def dtype_of(self, way: Way) -> str:
        """What most of its products are computed in, where the device has that.

        Without TF32 it is float32; float8 is emulated for bfloat16's results in a dry run.
        """
        dtype = way.multiplies_in(self.model)
        without = DType.BFLOAT16 if dtype is DType.FLOAT8 else DType.FLOAT32
        return (dtype if dtype.value in self.peaks else without).value

    @cached_property
    def peaks(self) -> Mapping[str, float]:
        """The measured peaks in operations a second, by dtype."""
        return next(row["peaks"] for row in self.rows if "peaks" in row)


def operations_of(task: Task) -> float:
    """The operations of a sample's training step; attention as dense, a multiply-add as two."""
    with torch.device("meta"):
        model = task.build_model()
    drawn = next(iter(task.build_data(COUNTED)))
    inputs, targets = (each.to("meta") for each in drawn)
    loss_fn: Any = task.loss_fn
    return flops.total(lambda: loss_fn(model(inputs), targets).backward()) / COUNTED


def real_rows(
    model: Model, device: str, quick: bool, has_tf32: bool, earlier: Sequence[Row]
) -> Generator[dict[str, Any], None, str]:
    """Yield what `earlier` lacks; return why nothing ran at all, where nothing did."""
    bench = Bench(model, device, quick, list(earlier))
    prepare(devices.resolve_device(device))
    if not any("peaks" in row for row in bench.rows):
        row: dict[str, Any] = {"peaks": dict(peaks(device, quick, has_tf32))}
        bench.rows.append(row)
        yield row
    for way, visited in visits(all_ways(bench, has_tf32)):
        if bench.seen(way, visited) is None:
            row = measured(bench, way, visited)
            bench.rows.append(row)
            yield row
    failures = [row["failed"] for row in bench.rows if "failed" in row]
    ran = any("step_seconds" in row for row in bench.rows)
    return "" if ran else f"no way of {model.task} ran: {failures[0]}"


def all_ways(bench: Bench, has_tf32: bool) -> list[Way]:
    """The ways at every batch, the one at which all are measured first."""
    model, size = bench.model, bench.task().batch_size
    batches = DRY_BATCHES if bench.quick else model.batches
    *smaller, largest = batches if size is None else (size,)
    found = ways(model, largest, has_tf32)
    found += [way for batch in reversed(smaller) for way in few_ways(model, batch)]
    if DType.FLOAT8.value not in bench.peaks and not bench.quick:
        found = [way for way in found if not way.recipe.uses_float8]
    dry = bench.quick and model.task != DRY_COMPILED
    return [way for way in found if not (dry and way.recipe.compile)]


def visits(every: Sequence[Way]) -> Iterator[tuple[Way, int]]:
    """All ways, then all of them the other way round."""
    for visited in range(VISITS):
        yield from ((way, visited) for way in every[:: -1 if visited % 2 else 1])


class Float8Arithmetic(TorchArithmetic):
    """Products of e4m3 with results in bfloat16, which torch.matmul does not have."""

    def prepare(self, dtype: DType, size: int) -> Any:
        """Make two operands, the second by columns, and a scale of one for both."""
        whole = (torch.randn(size, size, device=self._device) for _ in range(2))
        left, right = (each.to(torch.float8_e4m3fn) for each in whole)
        return left, right.t(), torch.ones((), device=self._device)

    def multiply(self, operands: Any) -> None:
        """Multiply, and wait for the device."""
        left, right, scale = operands
        torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)
        self._wait()


def peaks(device: str, quick: bool, has_tf32: bool) -> Iterator[tuple[str, float]]:
    """The best rate of matrix products by dtype, in operations a second."""
    with process_settings_restored():
        arithmetic = open_device(device)
        for dtype in (DType.FLOAT32, DType.TF32, DType.BFLOAT16, DType.FLOAT16):
            if dtype is not DType.TF32 or has_tf32:
                product = time_product(arithmetic, dtype, DRY_PEAK if quick else PEAK)
                if product.gflops:
                    yield dtype.value, product.gflops * 1e9
        where = devices.resolve_device(device)
        if where.type != "cpu" and not float8_obstacle(where):
            product = time_product(Float8Arithmetic(where), DType.FLOAT8, PEAK)
            if product.gflops:
                yield DType.FLOAT8.value, product.gflops * 1e9
    clean(devices.resolve_device(device))


def measured(bench: Bench, way: Way, visited: int) -> dict[str, Any]:
    """A visit's row; one that says why where the way does not run."""
    recipe = way.recipe
    row: dict[str, Any] = {
        "task": bench.model.task,
        "model": way.task or bench.model.task,
        "way": way.name,
        "visit": visited,
        "recipe": to_plain(recipe),
        "ieee": way.ieee,
        "by_hand": way.by_hand,
        "dtype": bench.dtype_of(way),
    }
    try:
        batches = bench.batches_of(recipe.batch_size)
        budget = DRY_BUDGET if bench.quick else BUDGET
        compiler = DRY_COMPILER if bench.quick else COMPILER
        seen = visit(bench.task(way), way, batches, bench.device, budget, compiler)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if "failed" in row:
        clean(devices.resolve_device(bench.device))  # the error held what had been made
        return row
    row |= numbers(bench, way, seen, tokens_of(batches[0][0]))
    return {**row, "doubts": list(doubts(bench, way, visited, row, seen))}


def tokens_of(inputs: torch.Tensor) -> int | None:
    """The words of a sample; None where it is no text."""
    text = inputs.dim() == 3 or (inputs.dim() == 2 and not inputs.is_floating_point())
    return inputs.shape[1] if text else None


def numbers(bench: Bench, way: Way, seen: Seen, tokens: int | None) -> dict[str, Any]:
    """What was seen, and what follows from it."""
    rate = way.recipe.batch_size / seen.step
    operations = rate * bench.operations_of(way)
    peak = bench.peaks.get(bench.dtype_of(way))
    return {
        "step_seconds": seen.step,
        "steps": seen.steps,
        "samples_per_second": rate,
        **({} if tokens is None else {"tokens_per_second": rate * tokens}),
        "tflops": operations / 1e12,
        "peak_share": operations / peak if peak else None,
        "peak_memory_bytes": seen.peak_memory_bytes,
        "first_step_seconds": seen.first_step,
        "losses": seen.losses,
        "clocks_mhz": seen.clocks,
        **({} if seen.loss_scale is None else {"loss_scale": seen.loss_scale}),
        **seen.changes,
    }


def doubts(bench: Bench, way: Way, visited: int, row: Row, seen: Seen) -> Iterator[str]:
    """What speaks against a row's number."""
    if (row["peak_share"] or 0) > MOST_SHARE:
        yield f"{row['peak_share']:.2f} of the measured peak, at most {MOST_SHARE} can be"
    for other in range(visited):
        before = (bench.seen(way, other) or {}).get("step_seconds")
        if before and abs(seen.step / before - 1) > MOST_APART:
            yield f"{100 * (seen.step / before - 1):+.0f} % from visit {other}"
    batch = way.recipe.batch_size
    plain = next(
        (
            each["losses"]
            for each in bench.rows
            if "losses" in each
            and not each["by_hand"]
            and (each["recipe"]["policy"], each["recipe"]["batch_size"]) == ("float32", batch)
        ),
        None,
    )
    for name, own, expected in zip(("first", "last"), seen.losses, plain or (), strict=False):
        if abs(own - expected) > MOST_LOSS * abs(expected):
            yield f"{name} loss {own:.4g}, {expected:.4g} in float32"
    if not all(math.isfinite(loss) for loss in seen.losses):
        yield "a loss is not finite"
    if seen.recompiled:
        yield "compiled again while it was timed"
    if seen.clocks and seen.clocks[1] < LEAST_CLOCK * seen.clocks[0]:
        yield f"the clock fell from {seen.clocks[0]} to {seen.clocks[1]} MHz"
