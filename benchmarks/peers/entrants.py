"""Recipes of several makers measured against each other, each in the process that its maker has.

A rival's process keeps its freed memory from its start, as the environment says; one of autoprec's
recipes asks for that itself, after the framework's import. Both may be the same recipe otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.job import TuningJob
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import Runner
from benchmarks.interleaving import alternate
from benchmarks.peers.searches import KEPT

Name = TypeVar("Name")

#: How long each way to set a rival's free settings is timed before one is taken.
BUDGET = TimingBudget(seconds=1.0, min_steps=3, max_steps=100_000, precision=0.0)

#: The knob that is part of the precision, and is no one's to add.
PRECISION_KNOB = "implicit_bfloat16"
FUSED = "fused_optimizer"


@dataclass(frozen=True)
class Entrant:
    """A recipe, and whether its process keeps freed memory from its start."""

    recipe: Recipe
    kept: bool

    @property
    def marked(self) -> Recipe:
        """The recipe with `forced` as the mark of who is `kept`: a worker does not read it."""
        return replace(self.recipe, forced=self.kept)


class KeptRunner(Runner):
    """Starts its workers with `KEPT` for recipes that bear the mark, and without it for others."""

    _kept = False

    def call(self, method: str, **arguments: Any) -> Any:
        """Call, in another worker where the recipe's process is another."""
        recipe = arguments.get("recipe")
        if isinstance(recipe, Recipe) and recipe.forced != self._kept:
            self.drop()
            self._kept = recipe.forced
            own = {n: v for n, v in self.settings.environment.items() if n not in KEPT}
            added = KEPT if self._kept else {}
            self.settings = replace(self.settings, environment={**own, **added})
        return super().call(method, **arguments)


class KeptJob(TuningJob):
    """A work order whose runners start each recipe's process as its mark says."""

    def runner(self) -> Runner:
        """A runner with a worker of its own."""
        return KeptRunner(self.settings(), self.on_progress, self.start)


def kept_job(job: TuningJob) -> KeptJob:
    """The same work order, for entrants."""
    return KeptJob(job.task, job.target, job.options, job.listener)


def ways(recipe: Recipe, space: Space, layout_chosen: bool) -> list[Recipe]:
    """The ways to set what a rival leaves open and autoprec may use: layout, fused optimizer."""
    formats = (recipe.memory_format,) if layout_chosen else space.memory_formats
    fused = space.knobs.get(FUSED, (False,))
    others = {name: value for name, value in recipe.knobs.items() if name != FUSED}
    return [
        replace(
            recipe,
            memory_format="channels_last" if layout == "channels_last" else "contiguous",
            knobs={**others, FUSED: True} if fuse else others,
        )
        for layout, fuse in product(formats, fused)
    ]


def helped(job: KeptJob, recipe: Recipe, space: Space, layout_chosen: bool) -> Recipe:
    """The fastest of the ways, each timed in a fresh process; the plain one where none runs."""
    found = ways(recipe, space, layout_chosen)
    if len(found) == 1:
        return found[0]
    return max(found, key=lambda way: _rate(job, way))


def _rate(job: KeptJob, recipe: Recipe) -> float:
    with job.runner() as runner:
        try:
            measured = runner.call(
                "measure", recipe=Entrant(recipe, True).marked, seed=0, budget=BUDGET
            )
        except WorkerFailure:
            return 0.0
    return float(measured.samples_per_second)


def with_knobs_of(recipe: Recipe, theirs: Recipe) -> Recipe:
    """A rival's policy and batch with all that our recipe sets besides: its knobs apart."""
    same = recipe.policy is theirs.policy
    knobs = {n: v for n, v in recipe.knobs.items() if same or n != PRECISION_KNOB}
    return replace(
        recipe,
        policy=theirs.policy,
        loss_scale=theirs.loss_scale,
        float32_modules=recipe.float32_modules if same else (),
        batch_size=theirs.batch_size,
        accumulation_steps=theirs.accumulation_steps,
        knobs=knobs,
    )


def at_batch(recipe: Recipe, batch: int) -> Recipe:
    """A rival's choice at another batch."""
    return replace(recipe, batch_size=batch, accumulation_steps=1)


def in_plain_float32(recipe: Recipe) -> Recipe:
    """The same recipe in plain float32: what is left when its precision is taken away."""
    knobs = {name: value for name, value in recipe.knobs.items() if name != PRECISION_KNOB}
    return replace(recipe.with_policy(Policy.FLOAT32), knobs=knobs)


def rates_of(
    job: KeptJob, entrants: Mapping[Name, Entrant], peaks: Mapping[Name, int], rounds: int
) -> tuple[dict[Name, Sequence[float]], dict[Name, str]]:
    """Everybody's rates in alternation by name, and why those are out that do not train.

    `peaks` are bytes by name; of equal recipes the largest counts.
    """
    left, out = dict(entrants), {}
    while left:
        known: dict[str, int] = {}
        for name, entrant in left.items():
            key = entrant.marked.key()
            known[key] = max(known.get(key, 0), peaks[name])
        try:
            rates = alternate(job, [e.marked for e in left.values()], known, rounds)
        except Exception as error:
            failed = getattr(error, "recipe", None)
            if failed is None:
                raise
            for name in [n for n, e in left.items() if e.marked.key() == failed.key()]:
                out[name] = f"does not train: {str(error)[:120]}"
                del left[name]
        else:
            return {name: rates[e.marked.key()] for name, e in left.items()}, out
    return {}, out
