"""What a framework does for a trace: a model under a recipe, and what `ComparisonTracer` asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from autoprec.backends.shared.buffer_updates import HoldsBuffers, Values
from autoprec.backends.shared.gradient_exponents import ExponentCounts
from autoprec.backends.shared.repeatable_batches import BatchStream
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import Recipe

NOISE = 2.0**-9
"""Relative noise of the proof's null: bfloat16's unit roundoff, 2**-8, halved."""

EXACT_NOISE, TF32_NOISE = 2.0**-20, 2.0**-12
"""Relative noise that is a few times as large as the rounding of float32, and of its products where
a device may round their operands."""


@dataclass(frozen=True)
class Float16Magnitudes:
    """The largest float16 numbers of a step: `StepComparison` has the same fields."""

    forward: float | None = None
    overflowed: bool = False
    backward: float | None = None


@dataclass(frozen=True)
class Observed:
    """What a step computes before its update, in float32.

    `loss` is the mean over the parts, `gradient` that of their mean loss. `outputs` are the
    model's own; `drew` says whether random numbers were drawn.
    """

    loss: float
    gradient: Any
    outputs: Any
    drew: bool = False


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation gives: the loss of a batch, or the task's metric, and the model's outputs.

    `error` is what the task's code raised, and `value` None then; `outputs` are those until then.
    """

    value: float | None
    outputs: Any = ()
    error: Exception | None = None


@dataclass
class StepAnswer:
    """What the first micro-batch of a training step gives, before the update.

    A trainee whose step does not show it leaves `known` False.
    """

    known: bool = False
    loss: float = 0.0
    gradient: Any = None
    buffers: Values = field(default_factory=dict)


class Trainee(HoldsBuffers, Protocol):
    """A freshly built model with its optimizer under one recipe.

    `seed` is that of the random numbers of one batch, where the model's state does not hold them.
    """

    @property
    def scale(self) -> float:
        """Return the loss scale, 1 without one."""

    def take_state(self) -> Any:
        """Copy weights, statistics, and whatever else training changes, into main memory."""

    def put_back(self, state: Any) -> None:
        """Load a copied state."""

    def state_bytes(self) -> int:
        """Return the size of a copied state."""

    def add_noise(self, draw: int, size: float = NOISE) -> None:
        """Multiply every weight by 1 + uniform(-size, size), another factor for every `draw`."""

    @property
    def rounding(self) -> float:
        """Return the size of noise on the weights that float32's own rounding stays below.

        It is larger where the task itself rounds more: 16-bit weights, an autocast of its own.
        """

    def train_step(
        self, batches: Iterator[tuple[Any, int]], answer: StepAnswer | None = None
    ) -> tuple[float, bool]:
        """Train one update; return the mean loss before it, and whether it was skipped.

        `batches` are the micro-batches, each with its seed. `answer` takes what the first of them
        gives, where the step shows it.
        """

    def loss(self, batch: Any, seed: int) -> float:
        """Return the loss of one batch."""

    def loss_and_gradient(self, batch: Any, seed: int) -> tuple[float, Any]:
        """Return loss and unscaled gradient of one batch; weights stay as they are."""

    def observe(self, parts: Sequence[tuple[Any, int]]) -> Observed:
        """Return what the parts of one batch give, each with its seed; weights stay.

        The recipe accumulates nothing: the parts' gradients are averaged here.
        """

    def weight_changes(self, updates: Sequence[Sequence[tuple[Any, int]]]) -> Any:
        """Train the updates; return how far every weight moved, in the form of a gradient."""

    def without_dropout(self) -> AbstractContextManager[Any]:
        """Switch dropout off inside, so that a batch's parts compute what the batch does."""

    def loss_and_gradient_watched(
        self, batch: Any, seed: int
    ) -> tuple[float, Any, Float16Magnitudes]:
        """Do the same, and look at the step's float16 numbers where the recipe has any."""

    def evaluate(self) -> float:
        """Call the task's `evaluate`; training goes on as if it had not been called."""

    def evaluate_watched(self, seed: int) -> Evaluated:
        """Do so with random numbers drawn from `seed`, and give the outputs of its first calls."""

    def evaluate_batch(self, batch: Any, seed: int) -> Evaluated | None:
        """Compute a batch in evaluation mode, without an update; None where that is not known.

        Its state may change as the task's own code changes it.
        """


class TraceFramework(Protocol):
    """What a framework does for a trace of one task on one device."""

    has_evaluate: bool

    def on_device(self) -> AbstractContextManager[Any]:
        """Place what is built and run inside on the device."""

    def stream(self, batch_size: int, seed: int) -> BatchStream:
        """Return the task's batches."""

    def trainee(
        self, recipe: Recipe, seed: int, batch: Any, *, reference: bool
    ) -> AbstractContextManager[Any]:
        """Build a `Trainee`, and undo what the recipe set for the process at the end.

        A `reference` is the user's own float32 loop. All builds with one seed start alike.
        """

    def gradient_error(self, candidate: Any, reference: Any) -> float | None:
        """Return ||g - g32|| / ||g32|| over all weights, None where it is not finite."""

    def outputs_error(self, candidate: Any, reference: Any) -> float | None:
        """Return how far `Observed.outputs` are apart, relative to how they vary over the batch.

        None where that is not finite, or where they have other shapes.
        """

    def parts(self, batch: Any, batch_size: int, count: int) -> Sequence[Any] | None:
        """Cut a batch of `batch_size` samples into `count` equal parts; None: it has none."""

    def count_exponents(self, counts: ExponentCounts, trainee: Any, batch: Any, seed: int) -> None:
        """Add one batch's backward pass to `counts`; the trainee's state stays as it is."""

    def unit_magnitudes(
        self, trainee: Any, batch: Any, seed: int, scale: float
    ) -> tuple[UnitTrace, ...]:
        """Measure each unit's largest exponents, and its gradient's float16 underflow."""
