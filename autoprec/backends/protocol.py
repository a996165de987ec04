"""The interface between autoprec and a framework: a task, and what a backend can do with it.

A backend is five small Protocols. A `Session` builds a model by a recipe and times its steps, a
`Tracer` records numerics (scalars and histograms; no tensor leaves it), a `Surgeon` applies a
recipe to the user's own model and returns a `Precision`, and `Backend` names the framework and
hands out the others. All of them speak core's dataclasses only. This module imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement, OperatorTime, TaskFacts
from autoprec.core.numerics.traces import (
    ExponentHistogram,
    NoisyStep,
    SettingsComparison,
    StepComparison,
    Trajectory,
    UnitTrace,
)
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.watch_settings import Action

Engine = Literal["ddp", "fsdp2"]
"""How ranks that we start share a step: DistributedDataParallel, or FSDP2's `fully_shard`."""

ProgressCallback = Callable[[str, int], None]
"""Called with the current phase ("build", "warmup", "steps", ...) and step number."""


@dataclass(frozen=True)
class RankPlace:
    """A process's place among the ranks that train one model together, one process a device.

    `address` and `port` are where rank 0 lets the others meet. `engine` is how float32's reference
    and baseline share a step, too.
    """

    rank: int
    local_rank: int
    world_size: int
    engine: Engine = "ddp"
    address: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class Task:
    """The user's task file, loaded: what to build, what to train it on, and how.

    Optional functions are None where the file does not define them. `count_samples(batch)` is for
    batches whose samples no dimension counts, such as graphs joined into one. `checkpoint` is a
    file with the weights that every model it builds begins with. `place` is this process's among
    the ranks that train together; None where it trains alone. `surveyed` is how many batches a
    description looked at: 0 where all had the same shape, None where there was none. `fixed_batch`
    says why `build_data` yields batches of one size only; empty where it does as it is asked.
    `weigh(micro_batches)` returns those of one update so that the mean of their losses is the whole
    update's; None where it is that already. With `copies_batches` every step is given a copy of its
    batch, which it writes to: where a batch is used more than once, it is as it was drawn. After
    `describing_seconds` a description leaves out what it can; None: however long it takes.
    """

    name: str
    build_model: Callable[[], Any]
    build_data: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], Any] | None = None
    training_step: Callable[[Any, Any], Any] | None = None
    build_optimizer: Callable[[Any], Any] | None = None
    evaluate: Callable[[Any], float] | None = None
    count_samples: Callable[[Any], int] | None = None
    batch_size: int | None = None
    clip_grad_norm: float | None = None
    checkpoint: Path | None = None
    place: RankPlace | None = None
    surveyed: int | None = None
    fixed_batch: str = ""
    weigh: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    copies_batches: bool = False
    describing_seconds: float | None = None


#: The share of an accelerator's free memory that a process may use: the framework's context, its
#: kernels, fragmentation and other processes need the rest.
USABLE_FREE_MEMORY_SHARE = 0.92


@dataclass(frozen=True)
class DeviceMemory:
    """An accelerator's memory as a process finds it, in bytes.

    `free` is what the process may use, including what it holds already; `others` is what other
    processes and the driver hold.
    """

    free: int
    others: int


@dataclass(frozen=True)
class Capabilities:
    """What autoprec has to know of a framework without importing it.

    Every backend's package has a module `capabilities` with one of these, called CAPABILITIES.
    What depends on the device, or on the installed build, is asked of the `Backend` instead.
    """

    title: str
    """The framework's name in messages, such as "PyTorch"."""

    model: str
    """What build_model should return, such as "a torch.nn.Module"; empty: not shown to users."""

    backend_class: str
    """The name of the `Backend` in the package's module `backend`."""

    model_modules: tuple[str, ...]
    """The packages whose classes are the framework's models."""

    required_modules: tuple[str, ...] = ()
    """The packages that must be installed, and autoprec's extra that installs them."""

    extra: str = ""

    import_advice: str = ""
    """What to try where the framework is installed and cannot be imported."""

    accelerator_builds: str = ""
    """Where builds for accelerators are found, for users of another build."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for worker processes, which start before the framework is known."""

    knobs: tuple[str, ...] = ()
    """The knobs that a recipe may set, by their names in `core.recipe.KNOBS`."""

    searched_knobs: tuple[str, ...] = ()
    """The knobs that the search tries by itself: a process can set them, and unset all but one."""

    rank_engines: tuple[Engine, ...] = ()
    """How several processes may train one model together; empty: one process uses all devices."""

    loss_in_task: bool = False
    """Whether the task file must define loss_fn or training_step: models carry no loss."""

    compiles_on: tuple[DeviceKind, ...] = ()
    """The devices on which compiled recipes are tried without being requested."""

    sessions_interfere: bool = True
    """Whether a session's step times on a CPU depend on other sessions in its process.

    Then recipes that give freed memory back are compared in processes of their own.
    """

    applies_without_model: bool = False
    """Whether a profile can be applied before the model is built, by a policy of the process."""


class Session(Protocol):
    """A model built by one recipe, warm and ready to train."""

    def time_steps(self, budget: TimingBudget) -> Measurement:
        """Time training steps until the budget says enough."""

    def close(self) -> None:
        """Free the memory."""


@runtime_checkable
class ProfiledSession(Protocol):
    """What a session does as well where its framework has a profiler."""

    def operator_times(self) -> tuple[OperatorTime, ...]:
        """Run one update, and say which operators took its time, the slowest first."""


@runtime_checkable
class RoundingBackend(Protocol):
    """What a backend does as well where it can build a model with another vocabulary."""

    def with_rounded_vocabulary(self, task: Task, size: int, rounded: int) -> Task:
        """Return the task whose model has `rounded` words where the user's has `size`."""


class Tracer(Protocol):
    """Records how a task trains numerically. Keeps the float32 snapshots it needs to itself.

    Everything is called with keyword arguments of plain values or core's dataclasses, so that a
    tracer may live in another process. `seconds` ends a run early, counted from the end of its
    first step, which builds, traces and compiles: the trajectory is then shorter.
    """

    def reference(
        self,
        *,
        batch_size: int,
        steps: int,
        checkpoints: tuple[int, ...],
        accumulation_steps: int = 1,
        seconds: float | None = None,
        stop_at_plateau: bool = False,
        compared_batch: int | None = None,
    ) -> Trajectory:
        """Train in float32 with seed 0, keeping weights and buffers at `checkpoints`.

        With `stop_at_plateau` it ends where the loss no longer falls: `proof_steps.has_ended`.
        Steps at the checkpoints are compared on batches of `compared_batch` samples; without it,
        on those that the run trained on.
        """

    def compare_steps(self, *, recipe: Recipe) -> tuple[StepComparison, ...]:
        """Compare loss and gradient under `recipe` with float32's at every kept checkpoint."""

    def compare_settings(self, *, recipe: Recipe) -> SettingsComparison:
        """Compare the recipe's settings in float32 with plain float32, at the initial weights.

        Plain float32 is contiguous and gets each batch unsplit; see `reference_recipe`.
        """

    def noise(self, *, draws: int) -> tuple[NoisyStep, ...]:
        """Do the same in float32 with +-2**-9 relative noise on the weights, `draws` times."""

    def trajectory(
        self,
        *,
        recipe: Recipe,
        seed: int,
        steps: int,
        noisy: bool = False,
        seconds: float | None = None,
    ) -> Trajectory:
        """Train under `recipe` from the initial weights; `noisy` perturbs them by +-2**-9."""

    def backward_exponents(self, *, recipe: Recipe, batches: int) -> ExponentHistogram:
        """Measure the backward pass's magnitudes under bfloat16 at loss scale 1."""

    def unit_magnitudes(self, *, recipe: Recipe) -> tuple[UnitTrace, ...]:
        """Measure each unit's largest magnitudes forward and backward."""


class Precision(Protocol):
    """A recipe applied to a model: what the objects of all frameworks have in common.

    Each framework's own class adds what its training loop needs.
    """

    @property
    def policy(self) -> Policy:
        """Return the policy that is applied."""

    @property
    def batch_size(self) -> int:
        """Return the samples that go through the model at once."""

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps that changed weights."""

    @property
    def skipped(self) -> int:
        """Return the number of optimizer steps skipped because a gradient was not finite."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save with a checkpoint, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict`'s values back."""

    def restore(self) -> None:
        """Undo what was applied to the model, its optimizers and the process."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Surgeon(Protocol):
    """Applies a recipe to the user's own model and optimizers, in place."""

    def apply(
        self,
        recipe: Recipe,
        *,
        model: Any,
        optimizers: Sequence[Any],
        device: str,
        facts: DeviceFacts | None = None,
    ) -> Precision:
        """Return the framework's Precision object, which the training loop uses.

        With the `facts` of the device it may also say what the device will not run fast.
        """

    def leave_unchanged(
        self, recipe: Recipe, *, model: Any, optimizers: Sequence[Any], device: str, undo: bool
    ) -> Precision:
        """Return the Precision object of a float32 recipe, which changes nothing.

        With `undo`, what was applied to the model before is undone. Without, it stays, and its
        autocast as well: a tuning has applied it.
        """


@runtime_checkable
class RankSurgeon(Protocol):
    """What a surgeon does as well where models are wrapped for the ranks that share them."""

    def distribute(self, recipe: Recipe, *, model: Any, device: str) -> Any:
        """Return the model shared over the ranks as the recipe says; the ranks have joined."""


@runtime_checkable
class WatchingSurgeon(Protocol):
    """What a surgeon does as well where trainings are checked while they go on."""

    def watch(self, precision: Any, *, model: Any, device: str, action: Action, every: int) -> None:
        """Check the training that `apply`'s result serves, at most `every` updates apart.

        What does not compute as float32 does is acted on as `action` says; a model that cannot be
        checked is not.
        """


class Backend(Protocol):
    """One framework. Built by `backends.registry`, which imports it only when asked to."""

    name: str
    capabilities: Capabilities

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the framework and of what it runs on, by name."""

    def devices(self) -> Iterable[str]:
        """List the devices the framework can train on here, best first, such as "cuda" or "cpu"."""

    def trains_on(self) -> Iterable[DeviceKind]:
        """List the kinds of device its models can be tuned on, whichever build is installed."""

    def built_for(self) -> Iterable[DeviceKind]:
        """List the kinds of accelerator this build of the framework supports, present or not."""

    def observe(self, device: str) -> Observation | None:
        """Return what the framework itself knows of an accelerator, for one that no probe sees."""

    def memory(self, device: str) -> DeviceMemory | None:
        """Read the device's memory now; None for the CPU, and where the framework cannot tell."""

    def missing_kernels(self, device: str) -> str:
        """Say why the device may lack kernels for reduced dtypes; empty where it does not."""

    def device_of(self, model: object) -> str:
        """Return the device `model` is on, such as "cuda:0"; for None, where it would be built."""

    def describe(
        self, task: Task, *, device: str, seed: int, batch_size: int, report: ProgressCallback
    ) -> TaskFacts:
        """Build the task, take one float32 step, and describe the model."""

    def open(
        self, task: Task, recipe: Recipe, *, device: str, seed: int, report: ProgressCallback
    ) -> Session:
        """Build the model by `recipe`, put full batches on the device, take the first step."""

    def tracer(self, task: Task, *, device: str, seed: int, report: ProgressCallback) -> Tracer:
        """Return a tracer of the task's numerics."""

    def surgeon(self) -> Surgeon:
        """Return the framework's surgeon."""
