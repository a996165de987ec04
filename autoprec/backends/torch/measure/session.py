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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autoprec.backends.protocol import USABLE_FREE_MEMORY_SHARE, ProgressCallback, Task
from autoprec.backends.shared.process_memory import (
    peak_resident_bytes,
    reset_peak_resident,
    return_freed_memory,
)
from autoprec.backends.shared.ranks import ALONE
from autoprec.backends.shared.step_timing import in_rounds, time_steps
from autoprec.backends.shared.timing_batches import SessionBatches, fetch_representative_batches
from autoprec.backends.torch import devices
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.apply.process_settings import (
    process_settings_restored,
    read_process_settings,
)
from autoprec.backends.torch.apply.wrapping import distribute
from autoprec.backends.torch.distributed.communication import join
from autoprec.backends.torch.measure.exposed_communication import CastOnly, exposed_communication
from autoprec.backends.torch.measure.operator_times import operator_times
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.backends.torch.train.batch_dimension import find_samples
from autoprec.backends.torch.train.batch_views import marks_of, size_in_bytes, survey
from autoprec.backends.torch.train.compiling import check_compiled, compiled_throughout
from autoprec.backends.torch.train.task_runner import (
    batches,
    build_model,
    build_optimizer,
    compute_loss,
    materialize,
    move,
)
from autoprec.core.measurement import Measurement, OperatorTime
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget

_NO_ROOM = (
    "what a step waits for other ranks was not measured: there is no room for whole gradients, "
    "which it takes"
)


class TorchSession:
    """One model under one recipe, with a few full batches on the device.

    The recipe's process-wide settings hold while it builds and while it trains, so sessions with
    other settings may be open in the same process, unless both are compiled.
    Of several ranks that train together each has a session, and calls it as the others do; what
    they measure is the slowest one's.
    """

    def __init__(
        self, task: Task, recipe: Recipe, *, device: str, seed: int, report: ProgressCallback
    ) -> None:
        self._task = task
        self._communication = None if task.place is None else join(task.place)
        self._ranks = ALONE if self._communication is None else self._communication.ranks()
        self._recipe = self._ranks.shared(recipe)
        self._exposed: Ratio | None = None
        self._looks = self._wrote = False  # at whether a step writes to its batch
        self._device = devices.resolve_device(device)
        self._report = report
        self._notes: list[str] = []
        self._started = time.perf_counter()
        devices.limit_memory(self._device)
        self._reset_peak()
        self._settings: Mapping[str, Any] = {}
        self._compiled = contextlib.ExitStack()
        self._compiled.enter_context(compiled_throughout(recipe))
        try:
            with process_settings_restored():
                self._build(seed)
                self._settings = read_process_settings()
        except BaseException:
            self.close()
            raise

    def _build(self, seed: int) -> None:
        self._report("data", 0)
        self._fetched = self._fetch(seed)
        if self._fetched.mixed:  # finding them took more memory than training on them does
            return_freed_memory()
            self._reset_peak()
        self._report("build", 0)
        self._model = build_model(self._task, self._device, seed)
        materialize(self._task, self._model, self._fetched.batches[0], seed)
        if self._communication is not None:
            self._communication.require_same(self._recipe)
            self._model = distribute(self._recipe, self._model, self._device)
        self._optimizer = build_optimizer(self._task, unwrap(self._model))
        self._precision = TorchSurgeon().apply(
            self._recipe,
            model=self._model,
            optimizers=(self._optimizer,),
            device=str(self._device),
        )
        self._report("compile" if self._recipe.compile else "warmup", 0)
        try:
            self._warm_up()
        except Exception:
            if not self._wrote:  # to a batch, which may be another one when it is used again
                raise
        if self._ranks.agree(float(self._wrote)):
            self._task = replace(self._task, copies_batches=True)
            self._drop()
            self._reset_peak()
            self._build(seed)
        devices.synchronize(self._device)
        check_compiled(self._recipe)

    def _warm_up(self) -> None:
        """Take the first updates, and see whether a step writes to its batch."""
        self._cycle = self._largest_first()
        self._finite = torch.ones((), dtype=torch.bool, device=self._device)
        self._looks, self._wrote = not self._task.copies_batches, False
        for _ in range(self._first_updates):
            self._step()
        self._looks = False

    def _fetch(self, seed: int) -> SessionBatches:
        task, size = self._task, self._recipe.batch_size
        return fetch_representative_batches(
            lambda repeat: batches(task, size, seed, repeat=repeat),
            look=lambda limits: survey(task, size, seed, limits, compare_halves=False)[0],
            surveyed=task.surveyed,
            counter=lambda first: find_samples(task, first, size, seed).count,
            place=lambda batch: move(batch, self._device),
            size_in_bytes=size_in_bytes,
            agree=self._ranks.agree,
        )

    def _largest_first(self) -> Iterator[Any]:
        """Yield the largest batches once, then those that are timed, in turn."""
        fetched = self._fetched
        micro_batches = self._recipe.accumulation_steps
        self._first_updates = max(1, math.ceil(len(fetched.largest) / micro_batches))
        self._updates = math.lcm(fetched.round_length, micro_batches) // micro_batches
        largest = (move(batch, self._device) for batch in fetched.largest)
        return itertools.chain(largest, itertools.cycle(fetched.batches))

    def _round(self) -> None:
        """Run as many updates as take every batch equally often."""
        for _ in range(self._updates):
            self._step()

    def _step(self) -> None:
        """Run one optimizer update with all its micro-batches."""
        self._compute()
        self._update()

    def _compute(self) -> None:
        """Run the forward and backward passes of all micro-batches."""
        for _ in range(self._recipe.accumulation_steps):
            batch = next(self._cycle)
            before = marks_of(batch) if self._looks else None
            loss = compute_loss(self._task, self._model, batch, self._precision)
            self._precision.backward(loss)
            self._wrote |= before is not None and marks_of(batch) != before
            self._finite &= torch.isfinite(loss.detach())

    def _update(self) -> None:
        """Clip and update."""
        if self._task.clip_grad_norm is not None:
            self._precision.clip_grad_norm_(self._task.clip_grad_norm)
        self._precision.step()

    def time_steps(self, budget: TimingBudget) -> Measurement:
        """Time steps until the budget says enough; see `Session.time_steps`."""
        with process_settings_restored(self._settings):
            return self._time_steps(budget)

    def _time_steps(self, budget: TimingBudget) -> Measurement:
        agree = self._ranks.agree
        build_seconds = agree(time.perf_counter() - self._started)
        timed = time_steps(
            self._timer(),
            in_rounds(budget, self._updates),
            self._report,
            updates=self._updates,
            agree=agree,
        )
        peak = int(agree(self._peak()))
        if self._communication is not None and self._exposed is None:
            if self._have_room_for_whole_gradients(peak):
                self._exposed = self._exposed_communication(budget.seconds)
            elif _NO_ROOM not in self._notes:
                self._notes.append(_NO_ROOM)
        self._started = time.perf_counter()
        micro_batches = self._recipe.accumulation_steps
        measured = timed.measurement(
            samples_per_step=self._samples() * micro_batches,
            data_seconds=agree(self._fetched.loader_seconds) * micro_batches,
            peak_memory_bytes=peak,
            build_seconds=build_seconds,
            finite=not agree(not self._finite.item()),
            notes=self._notes,
            first_updates=self._first_updates,
        )
        return replace(measured, exposed_communication=self._exposed)

    def operator_times(self) -> tuple[OperatorTime, ...]:
        """See `ProfiledSession.operator_times`."""
        with process_settings_restored(self._settings):
            return operator_times(self._compute, self._update, self._device)

    def _samples(self) -> float:
        """Return the samples of a micro-batch, on all ranks together."""
        own = self._fetched.mean_samples
        if self._communication is None:
            return own
        return self._communication.mean(own) * self._communication.world_size

    def _exposed_communication(self, seconds: float) -> Ratio | None:
        """Measure what a step waits for other ranks; what that leaves behind is cleared."""

        def micro_batch() -> None:
            cast = CastOnly(self._precision)
            compute_loss(self._task, self._model, next(self._cycle), cast).backward()  # type: ignore[no-untyped-call]

        try:
            return exposed_communication(
                micro_batch,
                self._precision.no_sync,
                synchronize=lambda: devices.synchronize(self._device),
                slowest=self._slowest,
                micro_batches=self._recipe.accumulation_steps,
                seconds=seconds,
            )
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _have_room_for_whole_gradients(self, peak: int) -> bool:
        """Return whether every rank may hold unreduced gradients on top of `peak` bytes.

        `no_sync` makes FSDP2 hold them whole; DDP does so in any case, as does accumulation.
        """
        ranks, free = self._recipe.distributed, devices.free_bytes(self._device)
        if ranks is None or ranks.engine != "fsdp2" or free is None:
            return True
        if self._recipe.accumulation_steps > 1 and not ranks.sync_each_microbatch:
            return True
        whole = sum(p.numel() * p.element_size() for p in self._model.parameters())
        return not self._ranks.agree(peak + whole > USABLE_FREE_MEMORY_SHARE * free)

    def _slowest(self, times: list[float]) -> list[float]:
        """Return each of these times as the slowest rank measured it."""
        return times if self._communication is None else self._communication.largest_each(times)

    def _timer(self) -> Callable[[int], list[float]]:
        """Return a function that times rounds: by the device's events, else by the clock."""

        def synchronize() -> None:
            devices.synchronize(self._device)

        event = devices.event_maker(self._device)
        if event is None:
            return lambda count: self._slowest(_clock_times(self._round, synchronize, count))
        return lambda count: self._slowest(_event_times(self._round, synchronize, count, event))

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
        """Free the memory."""
        self._drop()
        self._compiled.close()
        gc.collect()
        devices.empty_cache(self._device)
        return_freed_memory()

    def _drop(self) -> None:
        """Hold no more of what was built."""
        for name in ("_model", "_optimizer", "_precision", "_fetched", "_cycle", "_finite"):
            self.__dict__.pop(name, None)


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
