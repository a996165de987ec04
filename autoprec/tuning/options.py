"""The settings of a tuning, checked once at the border."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, get_args

from autoprec.backends.protocol import Engine
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.loss_curves import MIN_STEPS
from autoprec.core.recipe import KNOBS, KnobValue, check_knob
from autoprec.core.speed.space import parse_batch_sizes
from autoprec.errors import UsageError
from autoprec.tuning.study.study import SAMPLERS

BASELINE_BATCH = 32


@dataclass(frozen=True)
class Options:
    """Every setting of a tuning. Times are in seconds; None means no limit.

    Empty `policies` stand for those that the hardware's rules propose; `batch_sizes` None stands
    for the powers of two from 8 to 1024 (to 4096 on an accelerator), or BATCH_SIZE and its halves.
    `knobs` maps a knob's name to the levels to try, its default first; other knobs that are
    plausible on this device are tried too, unless `extras` is off. `align` overrides the device's
    padding multiple. `time_limit` bounds the whole tuning, `search_limit` the search alone.
    `proof_steps` is the maximum number of steps of a proof; None means as many as fit
    `proof_seconds` (None: 60) at the speed of a float32 step. `tolerance` widens (above 1) or
    narrows the proof's tolerances. `checkpoint` is a file of weights that the model is given
    wherever it is built, so that the proof starts from them.
    `attribute` times every part of the speed-up by itself, however long that takes.
    `nproc` processes (ranks) train together, each on a device of its own, and share a step by
    `engine`.
    """

    output: Path | None = None
    checkpoint: Path | None = None
    policies: tuple[Policy, ...] = ()
    batch_sizes: tuple[int, ...] | None = None
    trials: int | None = None
    time_limit: float | None = None
    search_limit: float | None = None
    proof_steps: int | None = None
    proof_seconds: float | None = None
    tolerance: float = 1.0
    accept_drift: bool = False
    attribute: bool = False
    explain: bool = False
    float32_modules: tuple[str, ...] = ()
    compile: bool = False
    align: int | None = None
    knobs: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    extras: bool = True
    sampler: str = "cost"
    seed: int = 0
    storage: str | None = None
    fresh: bool = False
    wait: bool = False
    rounds: int = 6
    memory_bytes: int | None = None
    nproc: int = 1
    engine: Engine = "ddp"

    def __post_init__(self) -> None:
        _positive("trials", self.trials)
        _positive("time_limit", self.time_limit)
        _positive("search_limit", self.search_limit)
        _positive("proof_seconds", self.proof_seconds)
        if self.proof_steps is not None and self.proof_steps < MIN_STEPS:
            raise UsageError(
                f"`proof_steps` {self.proof_steps} given, expected {MIN_STEPS} or more: fewer "
                "steps are no training that could be compared"
            )
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", _readable("checkpoint", self.checkpoint))
        _positive("tolerance", self.tolerance)
        _positive("align", self.align)
        _positive("rounds", self.rounds)
        _positive("nproc", self.nproc)
        _check_engine(self.engine, self.nproc)
        if self.sampler not in SAMPLERS:
            raise UsageError(
                f"`sampler` {self.sampler!r} given, expected one of {', '.join(SAMPLERS)}"
            )
        for name, levels in self.knobs.items():
            if name not in KNOBS:
                raise UsageError(f"unknown knob {name!r}: expected one of {', '.join(KNOBS)}")
            for level in levels:
                check_knob(name, level)

    def identity(self) -> tuple[object, ...]:
        """Return the settings that make two tunings of one task different studies."""
        return (
            self.policies,
            self.batch_sizes,
            self.compile,
            self.align,
            self.knobs,
            self.extras,
            self.sampler,
            self.seed,
            self.float32_modules,
            *((f"{self.nproc} ranks", self.engine) if self.nproc > 1 else ()),
        )

    def limits(self) -> tuple[object, ...]:
        """Return the settings which, when changed, make a finished study run again."""
        return (
            self.trials,
            self.time_limit,
            self.search_limit,
            self.proof_steps,
            self.proof_seconds,
            self.tolerance,
            self.accept_drift,
            *(("every part",) if self.attribute else ()),
        )


class Settings(TypedDict, total=False):
    """The settings of a tuning as a caller may write them; see `Options` for what they mean.

    Policies may be names, or one text with commas; batch sizes a range such as "16-512".
    """

    output: str | Path | None
    checkpoint: str | Path | None
    policies: str | Iterable[str | Policy]
    batch_sizes: str | Iterable[int] | None
    trials: int | None
    time_limit: float | None
    search_limit: float | None
    proof_steps: int | None
    proof_seconds: float | None
    tolerance: float
    accept_drift: bool
    attribute: bool
    explain: bool
    float32_modules: str | Iterable[str]
    compile: bool
    align: int | None
    knobs: Mapping[str, tuple[KnobValue, ...]]
    extras: bool
    sampler: str
    seed: int
    storage: str | None
    fresh: bool
    wait: bool
    rounds: int
    memory_bytes: int | None
    nproc: int
    engine: Engine


def options_from(options: Options | None, settings: Settings) -> Options:
    """Return the options as given, whole or setting by setting.

    Raises `UsageError` where both `options` and single settings are given.
    """
    try:
        parsed = Options(**_parse(settings))
    except TypeError as error:
        raise UsageError(f"tune: {error}") from error
    if options is None:
        return parsed
    if parsed != Options():
        raise UsageError("give options or single settings, not both")
    return options


def _parse(settings: Settings) -> dict[str, Any]:
    """Convert settings as a caller writes them to the types of the options."""
    parsed: dict[str, Any] = dict(settings)
    policies = settings.get("policies")
    if policies is not None:
        names = policies.split(",") if isinstance(policies, str) else policies
        parsed["policies"] = tuple(Policy.parse(str(name)) for name in names)
    sizes = settings.get("batch_sizes")
    if sizes is not None:
        parsed["batch_sizes"] = (
            parse_batch_sizes(sizes) if isinstance(sizes, str) else tuple(sorted(sizes))
        )
    for name in ("output", "checkpoint"):
        if parsed.get(name) is not None:
            parsed[name] = Path(parsed[name])
    modules = settings.get("float32_modules")
    if modules is not None:
        parsed["float32_modules"] = (modules,) if isinstance(modules, str) else tuple(modules)
    return parsed


def _readable(name: str, path: Path) -> Path:
    """Return the absolute path of a readable file; raise `UsageError` where there is none."""
    file = path.expanduser()
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UsageError(f"`{name}` {path} {what}; expected a file with the model's weights")
    if not os.access(file, os.R_OK):
        raise UsageError(f"`{name}` {path} cannot be read: permission denied")
    return file.resolve()


def _check_engine(engine: str, nproc: int) -> None:
    engines = get_args(Engine)
    if engine not in engines:
        raise UsageError(f"`engine` {engine!r} given, expected one of {', '.join(engines)}")
    if engine != engines[0] and nproc == 1:
        raise UsageError(
            f"`engine={engine}` given, which shares a step among ranks: give `nproc`, too"
        )


def _positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise UsageError(f"`{name}` {value!r} given, expected a number above 0")
