"""Builds a torch model by a recipe and times its training steps.

A step is what the user's loop does between two optimizer updates: forward, loss, backward and
clipping of every micro-batch, then the update. Batches are on the device beforehand; the loader's
own time is measured apart. On an accelerator steps are timed with events, so that measuring does
not make the device wait.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.process_memory import (
    MemoryGrowth,
    peak_resident_bytes,
    reset_peak_resident,
    return_freed_memory,
)
from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.backends.torch.apply.surgeon import TorchSurgeon
from autoprec.backends.torch.apply.tensors import tensors_in
from autoprec.backends.torch.measure import devices
from autoprec.backends.torch.train.batch_dimension import Samples, find_samples
from autoprec.backends.torch.train.compiling import check_compiled, compiled_throughout
from autoprec.backends.torch.train.task_runner import (
    batches,
    build_model,
    build_optimizer,
    compute_loss,
    materialize,
    move,
)
from autoprec.core.measurement import Measurement, TimingBudget
from autoprec.core.recipe import Recipe
from autoprec.core.statistics import summarize, timing_may_stop

_KEPT_BATCHES = 4
_KEPT_BYTES = 256 * 2**20
_MAX_STEPS_PER_CHUNK = 8

#: Steps in which memory still grows are warm-up, for at most this many times the budget's seconds.
_MAX_GROWTH_BUDGETS = 3.0


class TorchSession:
    """One model under one recipe, with a few full batches on the device."""

    def __init__(
        self, task: Task, recipe: Recipe, *, device: str, seed: int, report: ProgressCallback
    ) -> None:
        self._task, self._recipe = task, recipe
        self._device = devices.resolve_device(device)
        self._report = report
        self._notes: list[str] = []
        self._started = time.perf_counter()
        devices.limit_memory(self._device)
        self._reset_peak()
        self._globals = contextlib.ExitStack()
        self._globals.enter_context(process_settings_restored())
        self._globals.enter_context(compiled_throughout(recipe))
        try:
            self._build(seed)
        except BaseException:
            self.close()
            raise

    def _build(self, seed: int) -> None:
        self._report("data", 0)
        self._batches, self._data_seconds = self._fetch(seed)
        self._report("build", 0)
        self._model = build_model(self._task, self._device, seed)
        materialize(self._task, self._model, self._batches[0], seed)
        optimizer = build_optimizer(self._task, self._model)
        self._precision = TorchSurgeon().apply(
            self._recipe, model=self._model, optimizers=(optimizer,), device=str(self._device)
        )
        self._cycle: Iterator[Any] = itertools.cycle(self._batches)
        self._finite = torch.ones((), dtype=torch.bool, device=self._device)
        self._report("compile" if self._recipe.compile else "warmup", 0)
        self._step()
        devices.synchronize(self._device)
        check_compiled(self._recipe)

    def _fetch(self, seed: int) -> tuple[list[Any], float]:
        """Put a few full batches on the device; return them and the loader's seconds for one."""
        found: list[Any] = []
        seconds: list[float] = []
        samples = Samples()
        held = 0
        stream = batches(self._task, self._recipe.batch_size, seed, repeat=True)
        with contextlib.closing(stream):
            for _ in range(3 * _KEPT_BATCHES):
                start = time.perf_counter()
                batch = next(stream)
                seconds.append(time.perf_counter() - start)
                if not found:
                    samples = find_samples(self._task, batch, self._recipe.batch_size, seed)
                elif samples.count(batch) < samples.count(found[0]):
                    continue
                found.append(move(batch, self._device))
                size = sum(t.numel() * t.element_size() for t in tensors_in(batch))
                held += size
                if len(found) == _KEPT_BATCHES or held + size > _KEPT_BYTES:
                    break
        self._samples = [samples.count(batch) for batch in found]
        later = seconds[1:] or seconds
        return found, sum(later) / len(later)

    def _step(self) -> None:
        """Run one optimizer update with all its micro-batches."""
        for _ in range(self._recipe.accumulation_steps):
            loss = compute_loss(self._task, self._model, next(self._cycle), self._precision)
            self._precision.backward(loss)
            self._finite &= torch.isfinite(loss.detach())
        if self._task.clip_grad_norm is not None:
            self._precision.clip_grad_norm_(self._task.clip_grad_norm)
        self._precision.step()

    def time_steps(self, budget: TimingBudget) -> Measurement:
        """Time steps until the budget says enough; see `Session.time_steps`."""
        timer = self._timer()
        warmup_seconds = time.perf_counter() - self._started
        times: list[float] = []
        memory = MemoryGrowth()
        start, growing = time.perf_counter(), 0.0
        while not timing_may_stop(times, budget, time.perf_counter() - start - growing):
            chunk = timer(_chunk_size(times))
            self._report("steps", len(times))
            if memory.since_last_check() and growing < _MAX_GROWTH_BUDGETS * budget.seconds:
                growing += sum(chunk)
            else:
                times += chunk
        warmup_seconds += growing
        summary = summarize(times)
        peak = self._peak()
        self._started = time.perf_counter()
        return Measurement(
            step_seconds=summary.median,
            low=summary.low,
            high=summary.high,
            steps=summary.steps,
            samples_per_step=sum(self._samples)
            / len(self._samples)
            * self._recipe.accumulation_steps,
            peak_memory_bytes=peak,
            data_seconds=self._data_seconds * self._recipe.accumulation_steps,
            warmup_seconds=warmup_seconds + sum(times[: summary.warmup]),
            warmup_steps=1 + summary.warmup,
            finite=bool(self._finite.item()),
            notes=tuple(self._notes),
        )

    def _timer(self) -> Callable[[int], list[float]]:
        """Return a function that times `count` steps: by the device's events, else by the clock."""

        def synchronize() -> None:
            devices.synchronize(self._device)

        event = devices.event_maker(self._device)
        if event is None:
            return lambda count: _clock_times(self._step, synchronize, count)
        return lambda count: _event_times(self._step, synchronize, count, event)

    def _reset_peak(self) -> None:
        gc.collect()
        if self._device.type == "cpu":
            reset_peak_resident()
        else:
            devices.reset_peak(self._device)

    def _peak(self) -> int:
        if self._device.type == "cpu":
            return peak_resident_bytes()
        return devices.peak_bytes(self._device)

    def close(self) -> None:
        """Free the memory and restore the process-wide settings."""
        for name in ("_model", "_precision", "_batches", "_cycle", "_finite"):
            self.__dict__.pop(name, None)
        self._globals.close()
        gc.collect()
        devices.empty_cache(self._device)
        return_freed_memory()


def _chunk_size(times: Sequence[float]) -> int:
    """Return how many steps to time before the next check: one if they are slow, else more."""
    if not times or times[-1] > 0.05:
        return 1
    return min(_MAX_STEPS_PER_CHUNK, max(1, math.ceil(0.05 / max(times[-1], 1e-6))))


def _clock_times(
    step: Callable[[], None], synchronize: Callable[[], None], count: int
) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - start)
    return times


def _event_times(
    step: Callable[[], None],
    synchronize: Callable[[], None],
    count: int,
    event: Callable[[], Any],
) -> list[float]:
    """Time steps by events around each; wait for the device once, at the end."""
    marks = [event() for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
