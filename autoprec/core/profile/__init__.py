"""The profile: the chosen recipe, what it holds for, and the evidence behind it.

These dataclasses are the file format: the field names are the keys people read and review. In
schema 3 `speedup` is over float32 at the recipe's own batch, and `throughput` what another batch
brings besides; in schema 1, and 2 with its section `recipe.distributed`, `speedup` was over the
baseline whatever its batch. Reading and writing files is `autoprec.profiles`' work; here are only
values.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal

from autoprec.core.codec import bounded
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import Refusal
from autoprec.core.dtypes import Policy
from autoprec.core.number_words import times
from autoprec.core.numerics.island_proposals import IslandsEvidence
from autoprec.core.numerics.loss_scale_choice import ScaleEvidence
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_batch_of, describe_recipe, describe_settings
from autoprec.core.speed.attribution import Part, baseline_at_batch_of, describe_parts
from autoprec.core.speed.trial_results import Status

_MOST = 2**31


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """Batches, each of a whole update: the baseline's and the chosen recipe's; what decided.

    `rule` is the setting `batch`. Of the trials of the recipe's policy, `knee` is the smallest
    batch within 2 % of the most samples a second that the loader feeds, `fits` the largest that ran
    (None: nothing but one batch was to be tried). `loader_feeds` is in samples a second, by the
    loader's own time at the chosen batch (None: it takes none). `noise_scale` is the
    gradient's, as the check's float32 training showed it.
    """

    yours: int = bounded(low=1, high=_MOST)
    chosen: int = bounded(low=1, high=_MOST)
    rule: str = "knee"
    knee: int | None = bounded(default=None, low=1, high=_MOST)
    fits: int | None = bounded(default=None, low=1, high=_MOST)
    loader_feeds: float | None = bounded(default=None, low=0.0, high=1e15)
    noise_scale: NoiseScale | None = None


SCHEMA: Literal[3] = 3
"""The format that is written."""

#: The ratio of what was not compared, because it is the baseline itself.
NOT_COMPARED = Ratio(1.0, 1.0, 1.0, 0)

# What a number read from a file may be at most: samples a second, seconds, bytes.
_MAX_RATE, _MAX_SECONDS, _MAX_BYTES = 1e15, 1e9, 2**60


@dataclass(frozen=True)
class TaskRecord:
    """Which task file the profile was tuned for; `sha256` covers the local modules it imports.

    A script or a function ran with `arguments`, and of a script the call number `at` was tuned
    (None: it is no script).
    """

    file: str
    sha256: str
    framework: str
    arguments: tuple[str, ...] = ()
    at: int | None = bounded(default=None, low=1, high=2**31)

    def tune_command(self, *options: str) -> str:
        """Return the command that tunes it: "autoprec tune train.py --at 2 -- --lr 1e-3"."""
        at = () if self.at in (None, 1) else ("--at", str(self.at))
        own = ("--", *self.arguments) if self.arguments else ()
        return shlex.join(["autoprec", "tune", self.file, *at, *options, *own])


@dataclass(frozen=True)
class CheckpointRecord:
    """Which file's weights a tuning began with; `sha256` is of the whole file."""

    file: str
    sha256: str


@dataclass(frozen=True)
class DeviceRecord:
    """Which device the profile was tuned on."""

    kind: DeviceKind
    name: str
    family: str
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Baseline:
    """Plain float32 as the user would run it.

    `weights_in` is the 16-bit dtype that the task computes in by itself: its weights are kept in
    it, or it opens an autocast, so that the baseline is no float32; else empty. `convolutions_in`
    is what its convolutions ran in where that is less than float32, as PyTorch does by default
    where a GPU has TF32; else empty.
    `exposed_communication` is the share of its step that waits for gradients of other ranks (None:
    one process trains, or that was not measured).
    """

    policy: Policy
    batch_size: int = bounded(low=1, high=2**31)
    samples_per_second: float = bounded(low=0.0, high=_MAX_RATE)
    step_seconds: float = bounded(low=0.0, high=_MAX_SECONDS)
    peak_memory_bytes: int = bounded(low=0, high=_MAX_BYTES)
    accumulation_steps: int = bounded(default=1, low=1, high=2**20)
    exposed_communication: Ratio | None = None
    weights_in: str = ""
    convolutions_in: str = ""

    @property
    def title(self) -> str:
        """Name what it computes in; a model in 16 bits is not called float32."""
        if self.weights_in:
            return f"the model as it is, in {self.weights_in}"
        if self.convolutions_in:
            return f"{self.policy.value} (convolutions in {self.convolutions_in})"
        return self.policy.value


@dataclass(frozen=True)
class Chosen:
    """The chosen recipe's own numbers.

    `peak_share` is the share of the device's measured matrix-product rate in the compute dtype that
    the step reaches, `memory_share` the share of its measured memory bandwidth that the least
    traffic of such a step needs (None: not known); `bound` is what limits it. `data_seconds` is the
    loader's own time for one step. `break_even_steps` is after how many steps a compiled recipe has
    recovered its compilation time (None: not compiled, or no uncompiled recipe was measured).
    `exposed_communication` is as the baseline's.
    """

    samples_per_second: float = bounded(low=0.0, high=_MAX_RATE)
    step_seconds: float = bounded(low=0.0, high=_MAX_SECONDS)
    peak_memory_bytes: int = bounded(low=0, high=_MAX_BYTES)
    peak_share: float | None = bounded(default=None, low=0.0, high=1e6)
    bound: str = ""
    data_seconds: float = bounded(default=0.0, low=0.0, high=_MAX_SECONDS)
    warmup_seconds: float = bounded(default=0.0, low=0.0, high=_MAX_SECONDS)
    break_even_steps: int | None = bounded(default=None, low=0, high=_MAX_BYTES)
    memory_share: float | None = bounded(default=None, low=0.0, high=1e6)
    exposed_communication: Ratio | None = None


@dataclass(frozen=True)
class TriedRecipe:
    """What became of one recipe in the search: its throughput there, or why it did not run.

    `settings` are those besides policy and batch, in words. The throughput is 0 where the recipe
    did not run; a single short timing, it is less sure than the evidence's ratios.
    """

    policy: Policy
    batch_size: int = bounded(low=1, high=2**31)
    settings: str = ""
    status: Status = Status.OK
    samples_per_second: float = bounded(default=0.0, low=0.0, high=_MAX_RATE)
    reason: str = ""


@dataclass(frozen=True)
class MisalignedDimension:
    """A dimension that is no multiple of what the device wants, and what padding it brings.

    `speed_with_over_without` is the best speed of recipes that pad over that without (None: not
    measured); it is that of all padded modules together.
    """

    module: str
    kind: str
    dimension: str
    size: int = bounded(low=0, high=_MAX_BYTES)
    padded_to: int = bounded(low=0, high=_MAX_BYTES)
    speed_with_over_without: float | None = bounded(default=None, low=0.0, high=1e9)


@dataclass(frozen=True)
class Present:
    """What the user trains with already (`--baseline`), and the recipe's speed-up over that.

    It is a policy at the baseline's batch. A ratio of no rounds: the recipe is the same.
    """

    policy: Policy
    speedup: Ratio = NOT_COMPARED


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Every number behind the recipe, as measured. What a file must have comes last in it.

    So a file that was cut off is never taken for a whole one.

    `speedup` is over float32 at the recipe's own batch (of no rounds: it was not compared, or the
    baseline itself was chosen), `throughput` the samples that train in a second over the
    baseline's, where its batch is another (None: it is not). `waterfall` is what they consist of,
    from the recipe to the baseline. `inconclusive` says why nothing could be concluded, so that
    float32 was kept (empty: it could), `not_covered` what a limit left out; `batch` what is
    known of the batch (None: in a profile of an earlier version, or a rehearsal's); `checkpoint`
    the weights that training began with, where they were not `build_model`'s own. `tried` has every
    recipe of the search, in its order.
    """

    baseline: Baseline
    chosen: Chosen
    speedup: Ratio = NOT_COMPARED
    throughput: Ratio | None = None
    present: Present | None = None
    batch: BatchChoice | None = None
    parity: Verdict
    reason: str
    waterfall: tuple[Part, ...] = ()
    inconclusive: str = ""
    not_covered: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    checkpoint: CheckpointRecord | None = None
    proof_seconds: float = bounded(default=0.0, low=0.0, high=_MAX_SECONDS)
    memory_budget_bytes: int | None = bounded(default=None, low=0, high=_MAX_BYTES)
    loss_scale: ScaleEvidence | None = None
    islands: IslandsEvidence | None = None
    padding: tuple[MisalignedDimension, ...] = ()
    warnings: tuple[str, ...] = ()
    tried: tuple[TriedRecipe, ...] = ()
    trials: int = bounded(low=0, high=10**9)
    tuning_seconds: float = bounded(low=0.0, high=_MAX_SECONDS)

    @property
    def over_baseline(self) -> Ratio:
        """Return what recipe and batch bring together, over the baseline as it is run."""
        return self.speedup if self.throughput is None else self.throughput


GainName = Literal["speed-up", "throughput", "over yours"]
"""What gains are called where they are judged again."""


@dataclass(frozen=True)
class Gain:
    """How much faster a profile's recipe is than another one; `over` says that in words."""

    name: GainName
    ratio: Ratio
    rival: Recipe
    over: str


@dataclass(frozen=True, repr=False)
class Profile:
    """A tuned recipe with what it holds for and why it is believed.

    Its `repr` is a line, and in a notebook a small table; `evidence` has every number.
    """

    schema: Literal[3]
    created: str
    autoprec: str
    task: TaskRecord
    device: DeviceRecord
    software: Mapping[str, str]
    recipe: Recipe
    evidence: Evidence

    @property
    def baseline(self) -> Recipe:
        """Return the plain float32 that the speed-up is over."""
        base = self.evidence.baseline
        return replace(
            self.recipe.in_float32(),
            policy=base.policy,
            batch_size=base.batch_size,
            accumulation_steps=base.accumulation_steps,
        )

    def describe_baseline(self) -> str:
        """Name the baseline in full: "float32, batch 32"; a model in 16 bits is not called that."""
        return f"{self.evidence.baseline.title}, {describe_batch_of(self.baseline)}"

    def gains(self) -> tuple[Gain, ...]:
        """Return how much faster the recipe is than float32; none where it was not compared.

        Float32 at the recipe's own batch comes first, as far as it was timed. What a larger batch
        brings is a ratio by itself: of the samples that train in a second. What the user trains
        with already is last.
        """
        if not self.evidence.over_baseline.rounds:
            return ()
        return (*self._gains_over_float32(), *self._gain_over_present())

    def _gains_over_float32(self) -> tuple[Gain, ...]:
        evidence, plain = self.evidence, self.baseline
        named = self.describe_baseline()
        if self.recipe.effective_batch == plain.effective_batch:
            return (Gain("speed-up", evidence.speedup, plain, f"over {named}"),)
        whole = evidence.over_baseline
        throughput = Gain("throughput", whole, plain, f"the samples/s of {named}")
        if not evidence.speedup.rounds:
            return (throughput,)
        alike = baseline_at_batch_of(self.recipe, plain)
        parts = (evidence.baseline.title, describe_batch_of(alike))
        named = ", ".join(filter(None, (*parts, describe_settings(alike.settings))))
        same = Gain("speed-up", evidence.speedup, alike, f"over {named}")
        return (same, throughput)

    def _gain_over_present(self) -> tuple[Gain, ...]:
        present = self.evidence.present
        if present is None or not present.speedup.rounds:
            return ()
        yours = replace(self.baseline, policy=present.policy)
        larger = self.recipe.effective_batch != yours.effective_batch
        over = f"{'the samples/s of' if larger else 'over'} what you train with"
        named = f"{present.policy.value}, {describe_batch_of(yours)}"
        return (Gain("over yours", present.speedup, yours, f"{over}, {named}"),)

    def describe_gains(self) -> str:
        """Say in one line how much faster the recipe is; empty where it was not compared.

        What a larger batch gains is said as the loader feeds it, too, where that is less.
        """
        said = [
            f"{gain.ratio.in_words()} {gain.over}"
            for gain in (self._gains_over_float32() if self.gains() else ())
        ]
        chosen, base = self.evidence.chosen, self.evidence.baseline
        larger = said and self.recipe.effective_batch != self.baseline.effective_batch
        if larger and chosen.data_seconds > chosen.step_seconds:
            feeds = chosen.samples_per_second * chosen.step_seconds / chosen.data_seconds
            fed = feeds / min(feeds, base.samples_per_second)
            said[-1] += f" ({times(fed)} as far as the loader feeds it)"
        present = self.evidence.present
        if present is not None and not present.speedup.rounds:
            said.append("it is what you train with already")
        yours = [f"{gain.ratio.in_words()} {gain.over}" for gain in self._gain_over_present()]
        return "; ".join((*yours, *said))

    def describe_recipe(self) -> str:
        """Describe the recipe completely; a model in 16 bits is not called float32."""
        return describe_recipe(self.recipe, self.evidence.baseline.weights_in)

    def __repr__(self) -> str:
        said = "; ".join(text for _, text in self._rows())
        return f"<Profile of {self.task.file}: {said}>"

    def _repr_html_(self) -> str:
        rows = [*self._rows(), *(("warning", text) for text in self.evidence.warnings)]
        cells = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
        return f"<table><caption>{escape(self.task.file)}</caption>{''.join(cells)}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        """Return what matters most, each with its name."""
        evidence = self.evidence
        rows = [("recipe", self.describe_recipe())]
        if evidence.inconclusive:
            rows.insert(0, ("inconclusive", f"inconclusive: {evidence.inconclusive}"))
        if evidence.over_baseline.rounds:
            rows.append(("speed", self.describe_gains()))
        if len(evidence.waterfall) > 1:
            rows.append(("due to", describe_parts(evidence.waterfall)))
        rows.append(("trains", f"{evidence.parity.verdict}: {evidence.parity.reason}"))
        return [*rows, ("device", self.device.name or self.device.family)]


def without_speeds(evidence: Evidence) -> Evidence:
    """Return the evidence of a rehearsal: the same verdicts and memory, without timings."""
    timeless: dict[str, Any] = {"samples_per_second": 0.0, "step_seconds": 0.0}
    return replace(
        evidence,
        baseline=replace(evidence.baseline, **timeless),
        chosen=Chosen(peak_memory_bytes=evidence.chosen.peak_memory_bytes, **timeless),
        speedup=NOT_COMPARED,
        throughput=None,
        present=None,
        batch=None,
        waterfall=(),
        tried=tuple(replace(each, samples_per_second=0.0) for each in evidence.tried),
        padding=tuple(replace(each, speed_with_over_without=None) for each in evidence.padding),
        reason=f"{REHEARSAL_NOTE}; numerics: {evidence.parity.verdict}: {evidence.parity.reason}",
    )


#: What a profile says of itself that was made where devices are pretended.
REHEARSAL_NOTE = "a rehearsal on a pretended device, in which nothing timed means anything"
