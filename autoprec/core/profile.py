"""The profile: the chosen recipe, what it holds for, and the evidence behind it.

These dataclasses are the file format (schema version 1): the field names are the keys people read
and review. Reading and writing files is `autoprec.profiles`' work; here are only values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Literal

from autoprec.core.codec import bounded
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import Refusal
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.recipe import Alignment, Recipe
from autoprec.core.speed.attribution import Part, describe_recipe
from autoprec.core.statistics import Ratio

SCHEMA = 1

#: The ratio of what was not compared, because it is the baseline itself.
NOT_COMPARED = Ratio(1.0, 1.0, 1.0, 0)

# What a number read from a file may be at most: samples a second, seconds, bytes.
_MAX_RATE, _MAX_SECONDS, _MAX_BYTES = 1e15, 1e9, 2**60


@dataclass(frozen=True)
class TaskRecord:
    """Which task file the profile was tuned for; `sha256` covers the local modules it imports."""

    file: str
    sha256: str
    framework: str


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
    """Plain float32 as the user would run it."""

    policy: Policy
    batch_size: int = bounded(low=1, high=2**31)
    samples_per_second: float = bounded(low=0.0, high=_MAX_RATE)
    step_seconds: float = bounded(low=0.0, high=_MAX_SECONDS)
    peak_memory_bytes: int = bounded(low=0, high=_MAX_BYTES)
    accumulation_steps: int = bounded(default=1, low=1, high=2**20)


@dataclass(frozen=True)
class Chosen:
    """The chosen recipe's own numbers.

    `peak_share` is the share of the device's measured matrix-product rate in the compute dtype that
    the step reaches, `memory_share` the share of its measured memory bandwidth that the least
    traffic of such a step needs (None: not known); `bound` is what limits it. `data_seconds` is the
    loader's own time for one step. `break_even_steps` is after how many steps a compiled recipe has
    recovered its compilation time (None: not compiled, or no uncompiled recipe was measured).
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


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Every number behind the recipe, as measured. What a file must have comes last in it.

    So a file that was cut off is never taken for a whole one. Without a speed-up (of no rounds),
    the baseline itself was chosen.

    `waterfall` is what the speed-up consists of, from the recipe to the baseline. `inconclusive`
    says why nothing could be concluded, so that float32 was kept (empty: it could), `not_covered`
    what a time limit left out; `checkpoint` the weights that training began with, where they were
    not `build_model`'s own.
    """

    baseline: Baseline
    chosen: Chosen
    speedup: Ratio = NOT_COMPARED
    speedup_same_batch: Ratio | None = None
    parity: Verdict
    reason: str
    waterfall: tuple[Part, ...] = ()
    inconclusive: str = ""
    not_covered: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    checkpoint: CheckpointRecord | None = None
    proof_seconds: float = bounded(default=0.0, low=0.0, high=_MAX_SECONDS)
    memory_budget_bytes: int | None = bounded(default=None, low=0, high=_MAX_BYTES)
    loss_scale: Mapping[str, Any] | None = None
    islands: Mapping[str, Any] | None = None
    padding: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    trials: int = bounded(low=0, high=10**9)
    tuning_seconds: float = bounded(low=0.0, high=_MAX_SECONDS)


@dataclass(frozen=True, repr=False)
class Profile:
    """A tuned recipe with what it holds for and why it is believed.

    Its `repr` is a line, and in a notebook a small table; `evidence` has every number.
    """

    schema: Literal[1]
    created: str
    autoprec: str
    task: TaskRecord
    device: DeviceRecord
    software: Mapping[str, str]
    recipe: Recipe
    evidence: Evidence

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
        rows = [("recipe", describe_recipe(self.recipe))]
        if evidence.inconclusive:
            rows.insert(0, ("inconclusive", f"inconclusive: {evidence.inconclusive}"))
        base, gain = evidence.baseline, evidence.speedup
        if gain.rounds:
            against = f"{base.policy}, batch {base.batch_size}"
            between = f"({gain.low:.2f}-{gain.high:.2f})"
            rows.append(("speed", f"{gain.ratio:.2f}x {between} over {against}"))
        parts = ", ".join(f"{part.what} {part.speedup.ratio:.2f}x" for part in evidence.waterfall)
        rows += [("due to", parts)] if len(evidence.waterfall) > 1 else []
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
        speedup_same_batch=None,
        waterfall=(),
        padding=tuple({**each, "speed_with_over_without": None} for each in evidence.padding),
        reason=f"{REHEARSAL_NOTE}; numerics: {evidence.parity.verdict}: {evidence.parity.reason}",
    )


#: What a profile says of itself that was made where devices are pretended.
REHEARSAL_NOTE = "a rehearsal on a pretended device, in which nothing timed means anything"


@dataclass(frozen=True)
class Fit:
    """Whether a profile holds here: `problems` rule it out, `warnings` weaken it.

    `instead` is what is done where it does not hold, if that is known.
    """

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    instead: str = ""

    @property
    def matches(self) -> bool:
        """Return whether nothing rules the profile out."""
        return not self.problems


def check_fit(
    profile: Profile, here: Fingerprint, software: Mapping[str, str], framework: str | None = None
) -> Fit:
    """Compare a profile with a device and the software on it.

    Another kind or family of device rules the profile out, and so does having been made in a
    rehearsal; another name, memory, partition, core quota or
    minor version of the framework is a warning. `software` maps names to versions; one that is not
    installed here is not compared, but without the profile's own framework it does not fit, unless
    it is applied to another `framework`.
    """
    problems, warnings = [], []
    made = profile.device.fingerprint
    if made.rehearsal and not here.rehearsal:
        problems.append("made in a rehearsal, on a device that was only pretended")
    elif made.kind != here.kind:
        problems.append(f"made on a {made.kind} device, this one is {here.kind}")
    elif made.family != here.family:
        problems.append(
            f"made on {made.name or made.family} ({made.family}), this device is "
            f"{here.name or here.family} ({here.family})"
        )
    else:
        warnings += _device_differences(made, here)
    if framework is not None and framework != profile.task.framework:
        warnings.append(
            f"tuned with {profile.task.framework}, applied to {framework}: policy and batch carry "
            "over, the measured speed may not"
        )
    own = profile.task.framework
    if framework in (None, own) and own in profile.software and own not in software:
        problems.append(f"made with {own} {profile.software[own]}, which is not installed here")
    warnings += _software_differences(profile, software)
    return Fit(tuple(problems), tuple(warnings))


def _device_differences(made: Fingerprint, here: Fingerprint) -> list[str]:
    found = []
    if made.name != here.name:
        found.append(f"made on {made.name!r}, this device calls itself {here.name!r}")
    known = made.memory_gib and here.memory_gib
    if known and abs(made.memory_gib - here.memory_gib) > max(1, 0.1 * made.memory_gib):
        found.append(f"made with {made.memory_gib} GiB of memory, here are {here.memory_gib} GiB")
    if made.partition != here.partition and None not in (made.partition, here.partition):
        found.append(
            f"made on {_describe_partition(made.partition)}, this device is "
            f"{_describe_partition(here.partition)}: it is as fast as its part"
        )
    if made.core_quota != here.core_quota:
        found.append(
            f"made with a core quota of {_describe_quota(made.core_quota)}, here it is "
            f"{_describe_quota(here.core_quota)}"
        )
    return found


def _describe_partition(partition: str | None) -> str:
    return f"a part of a device ({partition})" if partition else "a whole device"


def _describe_quota(quota: float | None) -> str:
    return "none" if quota is None else f"{quota:g}"


def _software_differences(profile: Profile, software: Mapping[str, str]) -> list[str]:
    found = []
    for name, version in profile.software.items():
        if name == "python":
            continue
        here = software.get(name)
        if here is not None and minor_version(here) != minor_version(version):
            found.append(f"made with {name} {version}, here is {here}")
    return found


def minor_version(version: str) -> str:
    """Return the part of a version that matters to a profile: "2.13.0+cpu" is "2.13"."""
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


@dataclass(frozen=True)
class Selection:
    """Which of several profiles fits best, and why the others do not."""

    name: str | None
    reasons: Mapping[str, str] = field(default_factory=dict)


def select_profile(fits: Mapping[str, Fit]) -> Selection:
    """Choose the matching profile with the fewest warnings; ties go to the first name."""
    matching = sorted((len(fit.warnings), name) for name, fit in fits.items() if fit.matches)
    reasons = {name: "; ".join(fit.problems) for name, fit in fits.items() if not fit.matches}
    return Selection(matching[0][1] if matching else None, reasons)


def carry_over(
    recipe: Recipe, made: str, used: str, knobs: Collection[str]
) -> tuple[Recipe, tuple[str, ...]]:
    """Return the part of a recipe tuned with one framework that holds in another, and notes.

    `knobs` are those that the framework `used` has. Policy, batch and loss scale carry over; module
    paths, compilation and the other framework's own knobs do not. The notes name each thing that
    was left out, for the user.
    """
    if made == used:
        return recipe, ()
    notes = [f"batch {recipe.batch_size} was the best with {made}; with {used} another may be"]
    for what, paths in (
        ("float32_modules", recipe.float32_modules),
        ("alignment", recipe.alignment.modules),
    ):
        if paths:
            notes.append(
                f"{what} ({', '.join(paths[:3])}) names modules of the {made} model and is left "
                f"out: without it {recipe.policy} is not proven"
            )
    if recipe.compile:
        notes.append(f"compile was measured with {made} and is left off")
    if recipe.memory_format != "contiguous":
        notes.append(f"memory_format {recipe.memory_format} is {made}'s and is left out")
    foreign = [name for name in recipe.knobs if name not in knobs]
    notes += [f"the knob {name} is {made}'s and is left out" for name in foreign]
    kept = replace(
        recipe,
        float32_modules=(),
        alignment=Alignment(),
        compile=False,
        memory_format="contiguous",
        knobs={name: value for name, value in recipe.knobs.items() if name not in foreign},
    )
    return kept, tuple(notes)
