"""Trains a model of real size in one way for some seconds, and says what a step takes.

The model is changed as `apply_profile` changes it, by the surgeon that it calls. Batches are on the
device beforehand, so that no loader is measured. The optimizer's step and clipping are in the step.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.shared.process_memory import peak_resident_bytes, reset_peak_resident
from autoprec.backends.torch import devices
from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.backends.torch.dtypes import autocast_dtype
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.backends.torch.train import task_runner
from autoprec.backends.torch.train.compiling import check_compiled, compiled_throughout
from benchmarks.gpu.real_models import Way

#: Steps until float16's scale is halved often enough, at most.
MOST_WARM = 20
#: Batches that are trained on in turn.
BATCHES = 4


@dataclass(frozen=True)
class Budget:
    """How long steps are timed, in seconds, and how many: at least, at most, and before any is."""

    seconds: float = 1.0
    fewest: int = 3
    most: int = 200
    warm: int = 3


@dataclass(frozen=True)
class Seen:
    """What one visit saw; times in seconds. Clocks, in MHz, are of before and after timing."""

    step: float
    steps: int
    first_step: float
    losses: tuple[float, float]
    peak_memory_bytes: int
    clocks: tuple[int, int] | None
    recompiled: bool
    loss_scale: float | None
    changes: dict[str, Any]


def batches_of(task: Task, size: int, device: torch.device) -> list[Any]:
    """A few batches on the device, always the same."""
    drawn = task_runner.batches(task, size, seed=0)
    return [task_runner.move(batch, device) for batch in itertools.islice(drawn, BATCHES)]


def visit(
    task: Task, way: Way, batches: Sequence[Any], address: str, budget: Budget, compiler: str
) -> Seen:
    """Build the model from its seed, train it in this way, and leave nothing behind."""
    device = devices.resolve_device(address)
    with ExitStack() as settings:
        settings.enter_context(process_settings_restored())
        settings.enter_context(compiled_throughout(way.recipe))
        if way.ieee:
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
        try:
            return _train(task, way, batches, device, budget, compiler)
        finally:
            clean(device)


def _train(
    task: Task,
    way: Way,
    batches: Sequence[Any],
    device: torch.device,
    budget: Budget,
    compiler: str,
) -> Seen:
    _restart_peak(device)
    with device:  # weights are drawn there, which a CPU takes seconds for
        model = task_runner.build_model(task, device, seed=0)
    optimizer = task_runner.build_optimizer(task, model)
    make = _by_hand if way.by_hand else _by_profile
    step, scaler, changes = make(task, way, model, optimizer, device, compiler)
    losses: list[float] = []
    first = 0.0
    for _ in range(MOST_WARM):  # a step that float16's scale skips is taken again
        done = len(losses) if scaler is None else scaler.counts.steps
        if done >= budget.warm:
            break
        began = time.perf_counter()
        losses.append(step(batches[done % len(batches)]).item())
        first = first or time.perf_counter() - began
    check_compiled(way.recipe)
    cycle = itertools.cycle(batches)
    graphs, clock = _graphs(way), _clock(device)
    times = _timed(lambda: step(next(cycle)), device, budget)
    clocks = clock and (clock, _clock(device) or clock)
    return Seen(
        step=statistics.median(times),
        steps=len(times),
        first_step=first,
        losses=(losses[0], losses[-1]),
        peak_memory_bytes=_peak(device),
        clocks=clocks or None,
        recompiled=_graphs(way) != graphs,
        loss_scale=None if scaler is None else scaler.get_scale(),
        changes=changes,
    )


Step = Callable[[Any], torch.Tensor]
Made = tuple[Step, Any, dict[str, Any]]


def _by_profile(
    task: Task,
    way: Way,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    compiler: str,
) -> Made:
    """The step as docs/apply-pytorch.md has it, its loss scaler if any, and what was changed."""
    precision = TorchSurgeon(compile_backend=compiler).apply(
        way.recipe, model=model, optimizers=(optimizer,), device=str(device)
    )

    def step(batch: Any) -> torch.Tensor:
        loss = task_runner.compute_loss(task, model, batch, precision)
        precision.backward_and_step(loss, max_norm=task.clip_grad_norm)
        return loss.detach()

    report = precision.report
    changes = {
        "float8": list(report.float8),
        "padded": [module.path for module in report.padded],
        "skipped": [f"{each.path}: {each.reason}" for each in report.skipped],
    }
    scaler = precision.scaler if precision.scaler.is_enabled() else None
    return step, scaler, {key: value for key, value in changes.items() if value}


def _by_hand(
    task: Task,
    way: Way,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    compiler: str,
) -> Made:
    """The step without autoprec, for a policy without loss scale."""
    dtype = autocast_dtype(way.recipe.policy)
    loss_fn: Any = task.loss_fn

    def step(batch: Any) -> torch.Tensor:
        inputs, targets = batch
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            outputs = model(inputs)
        loss: torch.Tensor = loss_fn(outputs.float(), targets)
        loss.backward()
        if task.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, None, {}


def _timed(step: Callable[[], object], device: torch.device, budget: Budget) -> list[float]:
    """The seconds of each step: by the device's events where it has them, which waits once."""
    event = devices.event_maker(device)
    if budget.most > budget.fewest:
        (once,) = _times(step, device, event, 1)
        count = max(budget.fewest, min(budget.most, int(budget.seconds / max(once, 1e-6))))
    else:
        count = budget.fewest
    return _times(step, device, event, count)


def _times(
    step: Callable[[], object], device: torch.device, event: Callable[[], Any] | None, count: int
) -> list[float]:
    devices.synchronize(device)
    marks: list[Any] = []
    for done in range(count + 1):
        if done:
            step()
        if event is None:
            devices.synchronize(device)
            marks.append(time.perf_counter())
        else:
            marks.append(event())
            marks[-1].record()
    devices.synchronize(device)
    pairs = itertools.pairwise(marks)
    if event is None:
        return [after - before for before, after in pairs]
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def _graphs(way: Way) -> int:
    """How many graphs Dynamo has compiled."""
    if not way.recipe.compile:
        return 0
    import torch._dynamo

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _clock(device: torch.device) -> int | None:
    """The GPU's clock in MHz; None where nothing tells it."""
    try:
        return int(torch.cuda.clock_rate(device)) or None
    except Exception:  # no CUDA, no NVML, or none that may be asked
        return None


def _restart_peak(device: torch.device) -> None:
    if device.type == "cpu":
        reset_peak_resident()
    else:
        devices.reset_peak(device)


def _peak(device: torch.device) -> int:
    return peak_resident_bytes() if device.type == "cpu" else devices.peak_bytes(device)


def prepare(device: torch.device) -> None:
    """Load what the first optimizer would load, and keep it out of every later collection."""
    import torch._dynamo  # noqa: F401

    clean(device)
    gc.freeze()


def clean(device: torch.device) -> None:
    """Free what no way needs any more."""
    gc.collect()
    devices.empty_cache(device)
