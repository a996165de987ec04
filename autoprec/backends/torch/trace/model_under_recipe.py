"""How a trace gets a model under a recipe: built, applied, and stepped like the user's loop."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.shared.trace_framework import (
    EXACT_NOISE,
    NOISE,
    TF32_NOISE,
    Evaluated,
    Float16Magnitudes,
    Observed,
    StepAnswer,
)
from autoprec.backends.torch.apply.nested_tensors import copy_deeply
from autoprec.backends.torch.distributed.communication import Communication
from autoprec.backends.torch.distributed.sharding import reshard, sharded_modules
from autoprec.backends.torch.dtypes import LOW_DTYPES
from autoprec.backends.torch.measure.batch_splitting import without_dropout
from autoprec.backends.torch.trace import magnitudes
from autoprec.backends.torch.trace.random_numbers import RandomNumbers
from autoprec.backends.torch.trace.recorded_outputs import RecordedOutputs
from autoprec.backends.torch.train.held_snapshot import around, held_generators
from autoprec.backends.torch.train.model_state import (
    Snapshot,
    add_noise,
    buffer_values,
    gradients,
    in_formats,
    low_held,
    restore_snapshot,
    scale_buffers,
    size_in_bytes,
    take_snapshot,
    weights,
)
from autoprec.backends.torch.train.rng import (
    generator_states,
    rng_preserved,
    seed_everything,
)
from autoprec.backends.torch.train.task_precision import (
    noted_autocasts,
    rounded_products,
)
from autoprec.backends.torch.train.task_runner import (
    compute_loss,
    move,
    training_modes_preserved,
    weighed,
)
from autoprec.core.dtypes import DType
from autoprec.core.recipe import Recipe

_NOISE_SEED = 7919

_MOST_CALLS = 8
"""Calls of the model in the task's `evaluate` whose outputs are looked at."""


class Applied(Protocol):
    """What a trace uses of a Precision object."""

    scaler: Any
    loop_check: Any

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the loss."""

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Clip on the accumulation boundary."""

    def step(self) -> bool:
        """Update on the boundary; return whether weights changed."""


@dataclass
class TorchTrainee:
    """A model with its optimizer under one recipe; see `Trainee`.

    Of a model that ranks share the losses are means over them, and gradients are taken after their
    reduction: every rank sees the same.
    """

    task: Task
    recipe: Recipe
    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Applied
    device: str
    communication: Communication | None = None
    random: RandomNumbers = field(default_factory=RandomNumbers)
    _autocasts: set[str] = field(default_factory=set)
    _low_held: dict[str, torch.dtype] = field(default_factory=dict)

    def _drawn_alike(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a step: its random numbers are those of all other runs."""
        return contextlib.nullcontext() if self.recipe.compile else self.random.alike()

    def _seed(self, seed: int) -> list[Any]:
        """Seed every generator; return those that the task's code holds itself."""
        held = held_generators(self.model, around(self.task))
        seed_everything(seed, held)
        self.random.note_seeding()
        return held

    def forward_loss(self, batch: Any, seed: int) -> torch.Tensor:
        """Compute the loss of one batch, with random numbers (dropout) drawn from `seed`."""
        batch = move(batch, self.device)
        self._seed(seed)
        return compute_loss(self.task, self.model, batch, self.precision)

    @property
    def scale(self) -> float:
        """Return the loss scale, 1 without one."""
        scaler = self.precision.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def take_state(self) -> Snapshot:
        """Copy parameters, buffers and other state to the CPU."""
        return take_snapshot(self.model, around(self.task))

    def put_back(self, state: Snapshot) -> None:
        """Load a copied state, rounded where this model's own steps keep theirs in 16 bits.

        A float32 run's average would lend it digits that it never has when it trains.
        """
        others = around(self.task)
        self._low_held |= low_held(self.model, others)
        restore_snapshot(self.model, in_formats(state, self._low_held), others)

    def state_bytes(self) -> int:
        """Return the size of a copied state."""
        return size_in_bytes(self.model, around(self.task))

    def buffers(
        self, state: Snapshot | None = None, *, exact: bool = False
    ) -> Mapping[str, torch.Tensor]:
        """Return the buffers of a copied state, or as they are."""
        return buffer_values(self.model, state, around(self.task), exact=exact)

    def scale_buffers(self, state: Snapshot, names: Collection[str], factor: float) -> Snapshot:
        """Return a copied state with these buffers multiplied by a factor."""
        return scale_buffers(state, names, factor)

    def add_noise(self, draw: int, size: float = NOISE) -> None:
        """Multiply every weight by 1 + uniform(-size, size), another factor for every `draw`."""
        add_noise(self.model, _NOISE_SEED + draw, size)

    @property
    def rounding(self) -> float:
        """Return the size of noise on the weights that the task's own rounding stays below.

        Accelerators may round the operands of convolutions to TF32 unless they are told not to.
        """
        kind = torch.device(self.device).type
        low = any(parameter.dtype in LOW_DTYPES for parameter in self.model.parameters())
        if low or self._autocasts or rounded_products(kind) == "bfloat16":
            return NOISE
        return TF32_NOISE if kind != "cpu" else EXACT_NOISE

    def train_step(
        self, batches: Iterator[tuple[Any, int]], answer: StepAnswer | None = None
    ) -> tuple[float, bool]:
        """Train one update, clipped as the task says; return the mean loss, and if skipped."""
        losses = []
        shows_first = self.task.weigh is None or self.recipe.accumulation_steps == 1
        if answer is not None:
            self.model.zero_grad(set_to_none=True)  # what no optimizer clears adds up
        for batch, seed in self._weighed(batches):
            with self._drawn_alike():
                loss = self.forward_loss(batch, seed)
                self.precision.backward(loss)
            if answer is not None and shows_first and not answer.known:
                answer.known, answer.loss = True, self._mean_over_ranks(float(loss.detach()))
                divisor = self.scale / self.recipe.accumulation_steps
                answer.gradient, answer.buffers = gradients(self.model, divisor), self.buffers()
            losses.append(float(loss.detach()))
        mean = self._mean_over_ranks(sum(losses) / len(losses))
        if self.task.clip_grad_norm is not None:
            self.precision.clip_grad_norm_(self.task.clip_grad_norm)
        changed = self.precision.step()
        return mean, not changed

    def _weighed(self, batches: Iterable[tuple[Any, int]]) -> Iterable[tuple[Any, int]]:
        """Return one update's micro-batches as the task's step takes them; see `Task.weigh`."""
        if self.task.weigh is None:
            return batches
        given, seeds = zip(*batches, strict=True)
        return zip(weighed(self.task, given), seeds, strict=True)

    def loss(self, batch: Any, seed: int) -> float:
        """Return the loss of one batch."""
        with self._drawn_alike():
            loss = float(self.forward_loss(batch, seed).detach())
        reshard(self.model)
        return self._mean_over_ranks(loss)

    def _mean_over_ranks(self, value: float) -> float:
        return value if self.communication is None else self.communication.mean(value)

    def loss_and_gradient(self, batch: Any, seed: int) -> tuple[float, Mapping[str, torch.Tensor]]:
        """Return loss and unscaled gradient of one batch; weights stay as they are."""
        return self._loss_and_gradient(batch, seed, None, None)

    def loss_and_gradient_watched(
        self, batch: Any, seed: int
    ) -> tuple[float, Mapping[str, torch.Tensor], Float16Magnitudes]:
        """Do the same, and look at float16 numbers.

        Compiled code cannot be looked into, nor parameters while they are gathered.
        """
        unseen = self.recipe.compile or sharded_modules(self.model)
        if self.recipe.policy.compute_dtype is not DType.FLOAT16 or unseen:
            return *self.loss_and_gradient(batch, seed), Float16Magnitudes()
        forward, backward = (magnitudes.LargestMagnitudes(torch.float16) for _ in range(2))
        loss, gradient = self._loss_and_gradient(batch, seed, forward, backward)
        largest, overflowed = forward.summary()
        scaled = backward.summary()[0]
        unscaled = None if scaled is None else scaled / self.scale
        return loss, gradient, Float16Magnitudes(largest, overflowed, unscaled)

    def _loss_and_gradient(
        self,
        batch: Any,
        seed: int,
        forward: magnitudes.LargestMagnitudes | None,
        backward: magnitudes.LargestMagnitudes | None,
    ) -> tuple[float, Mapping[str, torch.Tensor]]:
        self.model.zero_grad(set_to_none=True)
        with self._drawn_alike():
            with contextlib.nullcontext() if forward is None else forward:
                loss = self.forward_loss(batch, seed)
            with contextlib.nullcontext() if backward is None else backward:
                self.precision.backward(loss)
        found = gradients(self.model, self.scale)
        self.model.zero_grad(set_to_none=True)
        return self._mean_over_ranks(float(loss.detach())), found

    def observe(self, parts: Sequence[tuple[Any, int]]) -> Observed:
        """Return what the parts of one batch give; see `Trainee`."""
        self.model.zero_grad(set_to_none=True)
        losses, drew, outputs = [], False, RecordedOutputs()
        kind = torch.device(self.device).type
        with outputs.of(self.model), noted_autocasts(self.model, kind) as autocasts:
            for batch, seed in self._weighed(parts):
                outputs.next_part()
                held = self._seed(seed)
                before = generator_states(held)
                with self._drawn_alike():
                    loss = self.forward_loss(batch, seed)
                    self.precision.backward(loss)
                drew |= not all(map(torch.equal, before, generator_states(held)))
                losses.append(float(loss.detach()))
        self._autocasts.update(autocasts)
        found = gradients(self.model, self.scale * len(parts))
        self.model.zero_grad(set_to_none=True)
        mean = self._mean_over_ranks(sum(losses) / len(losses))
        return Observed(mean, found, outputs.found, drew)

    def weight_changes(
        self, updates: Sequence[Sequence[tuple[Any, int]]]
    ) -> Mapping[str, torch.Tensor]:
        """Train the updates; return how far every weight moved."""
        before = weights(self.model)
        for update in updates:
            self.train_step(iter(update))
        after = weights(self.model)
        return {name: after[name] - value for name, value in before.items()}

    def without_dropout(self) -> contextlib.AbstractContextManager[None]:
        """Switch dropout off inside."""
        return without_dropout(self.model)

    def evaluate(self) -> float:
        """Call the task's `evaluate`; random numbers and modes go on as before."""
        assert self.task.evaluate is not None
        alike = self._drawn_alike() if self.random.drawn else contextlib.nullcontext()
        with rng_preserved(), training_modes_preserved(self.model), alike:
            metric = float(self.task.evaluate(self.model))
        reshard(self.model)
        return self._mean_over_ranks(metric)

    def evaluate_watched(self, seed: int) -> Evaluated:
        """See `Trainee`."""
        outputs = RecordedOutputs(_MOST_CALLS)
        outputs.next_part()
        with rng_preserved(), outputs.of(self.model):
            self._seed(seed)
            metric = self.evaluate()
        return Evaluated(metric, outputs.found)

    def evaluate_batch(self, batch: Any, seed: int) -> Evaluated:
        """Compute the loss with the model in evaluation mode.

        Gradients are off, and on where the step itself needs them (forces, penalties), on all ranks
        where it does on one.
        """
        with training_modes_preserved(self.model):
            self.model.eval()
            with torch.no_grad():
                found = self._evaluated(batch, seed)
            if not (well := self._went_well(found)):
                again = self._evaluated(batch, seed)
                if well := self._went_well(again):
                    found = again
        reshard(self.model)
        if not well or found.value is None:
            return replace(found, value=None)
        return replace(found, value=self._mean_over_ranks(found.value))

    def _went_well(self, found: Evaluated) -> bool:
        """Return whether an evaluation raised nothing on any rank."""
        failed = float(found.error is not None)
        if self.communication is not None:
            failed = self.communication.largest(failed)
        return not failed

    def _evaluated(self, batch: Any, seed: int) -> Evaluated:
        outputs = RecordedOutputs()
        outputs.next_part()
        try:
            with outputs.of(self.model), self._drawn_alike():
                loss = float(self.forward_loss(copy_deeply(batch), seed).detach())
        except Exception as error:
            return Evaluated(None, outputs.found, error)
        return Evaluated(loss, outputs.found)


class PlainFloat32:
    """The user's own float32 loop: no autocast, no scaler; gradients averaged over parts."""

    scaler: Any = None

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: int):
        self._optimizer = optimizer
        self._accumulation, self._seen = accumulation, 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return an empty context."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the loss, divided by the accumulation steps."""
        (loss / self._accumulation).backward()  # type: ignore[no-untyped-call]
        self._seen += 1

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Clip the norm of the optimizer's gradients, as a recipe does, on the boundary."""
        if self._seen % self._accumulation == 0:
            groups = self._optimizer.param_groups
            return nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], max_norm)
        return None

    def step(self) -> bool:
        """Step and clear the gradients on the accumulation boundary."""
        if self._seen % self._accumulation:
            return False
        self._optimizer.step()
        self._optimizer.zero_grad()
        return True


def apply_recipe(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, device: str, task: Task
) -> Applied:
    """Apply `recipe` to a model as `apply_profile` would in a loop that has the task at hand."""
    from autoprec.backends.torch.surgeon import TorchSurgeon

    applied: Applied = TorchSurgeon().apply(
        recipe, model=model, optimizers=(optimizer,), device=device
    )
    if applied.loop_check is not None:  # of people's loops: a run here is put at other weights
        applied.loop_check.end()
    buffers = applied.scaler.buffers
    for _, each in around(task) if buffers is not None else ():
        buffers.note_loss(each)
    return applied
