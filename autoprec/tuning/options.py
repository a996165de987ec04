"""The settings of a tuning, each said once and checked once, at the border.

A new one is a field here and nothing else: see settings.py for what follows from it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from autoprec.backends.protocol import Engine
from autoprec.core.codec import did_you_mean
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.loss_curves import MIN_STEPS
from autoprec.core.recipe import KnobValue, check_knob
from autoprec.core.speed.rounds import CONFIRMATION_ROUNDS
from autoprec.core.speed.space import BATCH_SIZES, LARGEST_BATCH, parse_batch_sizes
from autoprec.errors import UsageError
from autoprec.tuning.events import Listener
from autoprec.tuning.settings import Read, Setting, settings_of
from autoprec.workers.task_source import TaskSource, read_source

P = ParamSpec("P")
R = TypeVar("R")

BASELINE_BATCH = 32
SAMPLERS = ("cost", "tpe", "grid", "random")
"""What chooses the next recipe to try, by a short name."""


def _read_policies(given: str | Iterable[str | Policy]) -> tuple[Policy, ...]:
    """Read names; blank ones say nothing, and each counts once."""
    names = given.split(",") if isinstance(given, str) else map(str, given)
    return tuple(dict.fromkeys(Policy.parse(name) for name in names if name.strip()))


def _read_policy(given: str | Policy) -> Policy:
    if not isinstance(given, str):
        raise TypeError(given)
    return Policy.parse(given)


def _read_checkpoint(given: str | Path) -> Path:
    """Return the absolute path of a readable file; raise `UsageError` where there is none."""
    file = Path(given).expanduser()
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UsageError(f"`checkpoint` {given} {what}; expected a file with the model's weights")
    if not os.access(file, os.R_OK):
        raise UsageError(f"`checkpoint` {given} cannot be read: permission denied")
    return file.resolve()


Knobs = Mapping[str, tuple[KnobValue, ...]]
GivenKnobs = Mapping[str, Iterable[KnobValue]] | str | Iterable[str]
_KNOBS = (
    'NAME=VALUE,VALUE such as "threads=2,1", several of them, or a mapping such as '
    "{'threads': [2, 1]}"
)


def _read_knobs(given: GivenKnobs) -> Knobs:
    """Read a mapping, or texts such as "threads=2,1"; check names and levels."""
    if isinstance(given, str):
        given = (given,)
    pairs = given.items() if isinstance(given, Mapping) else map(_read_knob, map(str, given))
    knobs = {str(name): tuple(levels) for name, levels in pairs}
    for name, levels in knobs.items():
        for level in levels or ("",):
            check_knob(name, level)
    return knobs


def _read_knob(text: str) -> tuple[str, tuple[KnobValue, ...]]:
    name, separator, values = text.partition("=")
    if not separator or not values:
        raise UsageError(f"`knobs` {text!r} given, expected {_KNOBS}")
    return name.strip(), tuple(_read_level(value.strip()) for value in values.split(","))


def _read_level(text: str) -> KnobValue:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isascii() and text.isdigit() else text


def _read_sampler(given: str) -> str:
    if given not in SAMPLERS and "." not in given:
        raise ValueError(given)
    return given


_BATCH_RULES = ("knee", "max", "goodput")


def _read_batch(given: str | int) -> str:
    """Return a rule's name, or a batch in digits."""
    text = str(given).strip().lower()
    if text in _BATCH_RULES:
        return text
    if not 1 <= int(text) <= LARGEST_BATCH:
        raise ValueError(text)
    return str(int(text))


def _read_modules(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _read_words(given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError(given)
    return tuple(map(str, given))


_ranks = partial(Setting, group="several devices")
_search = partial(Setting, group="search")
_proof = partial(Setting, group="check")
_study = partial(Setting, group="study")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Every setting of a tuning, as it is kept; the fields say what each means.

    Times are in seconds; None means no limit. What is given is read and checked: policies may be
    names, paths texts, batch sizes a range. Raises `UsageError`.
    """

    output: Read[str | Path | None, Path | None] = Setting(None, "FILE", short="-o").says(
        "where to write the profile (default: next to the task file); for a cluster, the folder "
        "of its profiles"
    )
    nproc: int = _ranks(1, "N", above=0, new="study").says(
        "train on N devices of this kind, one process (rank) each; BATCH_SIZE is the batch of all "
        "together (default: {default}; under torchrun, as many as it started)"
    )
    engine: Engine = _ranks("ddp", "NAME", new="study").says(
        "how the ranks share a step: {choices} (default: {default})"
    )
    policies: Read[str | Iterable[str | Policy], tuple[Policy, ...]] = _search(
        (),
        "P,P",
        read_as=_read_policies,
        expected='names such as "bf16", "float32,bf16" or ["float32", "bf16"]',
        new="study",
    ).says(
        "exactly these policies, even those the rules refuse: float32, tf32, mixed_bfloat16, "
        "mixed_float16; short names such as bf16 and fp16 are accepted"
    )
    baseline: Read[str | Policy | None, Policy | None] = _search(
        None,
        "P",
        read_as=_read_policy,
        expected='the name of a policy such as "mixed_bfloat16"',
        new="result",
    ).says(
        "the policy you train with today, such as mixed_bfloat16: the result also says how much "
        "faster the recipe is than that, at your batch (default: the task file's BASELINE, else "
        "float32)"
    )
    batch: Read[str | int, str] = _search(
        "knee",
        "knee|max|goodput|N",
        read_as=_read_batch,
        expected='"knee", "max", "goodput" or a batch such as 256',
        new="study",
    ).says(
        "the batch, if the task file has no BATCH_SIZE: knee is the smallest within 2 % of the "
        "most samples/s that the loader feeds, max that with the most samples/s, goodput that "
        "which should reach a loss in the least time, by the gradient noise scale; N is yours, and "
        "everything runs at it (default: {default})"
    )
    batch_sizes: Read[str | Iterable[int] | None, tuple[int, ...] | None] = _search(
        None, "B,B|LOW-HIGH", read_as=parse_batch_sizes, expected=BATCH_SIZES, new="study"
    ).says(
        "micro-batches to try (default: 8 and its doubles, as far as memory and their gain allow)"
    )
    trials: int | None = _search(None, "N", above=0, new="result").says(
        "run at most this many trials (default: until no recipe is worth another)"
    )
    time_limit: float | None = _search(None, "SECONDS", above=0, new="result").says(
        "time for the whole tuning, shared by search, check and confirmation; what could not be "
        "covered is reported (default: no limit)"
    )
    search_limit: float | None = _search(None, "SECONDS", above=0, new="result").says(
        "time for the search alone (default: no limit)"
    )
    compile: bool | None = _search(None, new="study").says(
        "also try compiled recipes, or never (default: torch.compile on CUDA, ROCm and XPU, XLA "
        "under Keras everywhere)"
    )
    align: int | None = _search(None, "N", above=0, new="study").says(
        "try padding matrix dimensions to this multiple (default: what suits the device)"
    )
    knobs: Read[GivenKnobs, Knobs] = _search(
        (),
        "NAME=V,V",
        option="--knob",
        several=True,
        read_as=_read_knobs,
        expected=_KNOBS,
        new="study",
    ).says(
        "values to try for another setting besides its default, such as threads=2,1 (an unknown "
        "name lists all)"
    )
    extras: bool = _search(True, new="study").says(
        "try only policy, batch size, memory layout and XLA, no other settings"
    )
    memory_bytes: int | None = _search(None, "BYTES", above=0).says(
        "memory that a trial may take: main memory on a CPU, of all ranks together, else the "
        "device's (default: what is free, less a reserve)"
    )
    rounds: int = _search(CONFIRMATION_ROUNDS, "N", above=0).says(
        "rounds of the interleaved timing of the fastest recipes and float32 (default: {default})"
    )
    attribute: bool = _search(False, new="result").says(
        "time every part of the speed-up by itself (batch, precision, each setting), not only "
        "what fits into seconds"
    )
    sampler: str = _search(
        "cost",
        "NAME",
        read_as=_read_sampler,
        suggested=SAMPLERS,
        expected=f"one of {', '.join(SAMPLERS)}, or the import path of a sampler of Optuna",
        new="study",
    ).says(
        "what chooses the next recipe: {choices}, or the import path of a sampler of Optuna, such "
        "as optuna.samplers.GPSampler; cost goes by the expected gain under a cost model (default: "
        "{default})"
    )
    proof_steps: int | None = _proof(
        None,
        "N",
        above=MIN_STEPS - 1,
        expected=f"{MIN_STEPS} or more: fewer steps are no training that could be compared",
        new="result",
    ).says(
        "most steps of the check against float32 (default: 8, 30, 120 or 480, by the "
        "cost of a float32 step)"
    )
    proof_seconds: float | None = _proof(None, "S", above=0, new="result").says(
        "choose the steps of a check so that it takes about this many seconds at most (default: 60)"
    )
    checkpoint: Read[str | Path | None, Path | None] = _proof(
        None, "FILE", read_as=_read_checkpoint
    ).says(
        "start from the weights in this file (torch.save, .safetensors, .weights.h5 or .keras; "
        "the optimizer starts fresh), so that the check covers late training"
    )
    tolerance: float = _proof(1.0, "FACTOR", above=0, new="result").says(
        "widen (above 1) or narrow (below 1) the limits of what counts as equal"
    )
    accept_drift: bool = _proof(False, new="result").says(
        "accept a recipe that trains, but differently from float32"
    )
    explain: bool = _proof(False).says(
        "show how large each module's numbers are under a 16-bit policy, which modules stay in "
        "float32, and which operators take the time of the chosen recipe's step"
    )
    float32_modules: Read[str | Iterable[str], tuple[str, ...]] = _proof(
        (),
        "PATTERN",
        several=True,
        read_as=_read_modules,
        expected='a module\'s path such as "head", or several in a list',
        new="study",
    ).says("keep this module in float32: its path, or a pattern that matches exactly one module")
    seed: int = _study(0, "N", above=-1, expected="an integer of 0 or more", new="study").says(
        "seed for all randomness (default: {default})"
    )
    storage: Read[str | Path | None, str | None] = _study(None, "PLACE").says(
        "path of a journal file, or an Optuna storage URL (default: a journal in the user's "
        "cache directory; see autoprec studies)"
    )
    fresh: bool = _study(False).says("discard earlier trials of this study")
    wait: bool = _study(False).says("wait if another tuning is using the device")

    def __post_init__(self) -> None:
        for each in settings_of(type(self)):
            object.__setattr__(self, each.name, each.read(getattr(self, each.name)))
        if self.engine != type(self).engine and self.nproc == 1:
            raise UsageError(
                f"`engine={self.engine}` given, which shares a step among ranks: give `nproc`, too"
            )
        if self.fixed_batch and self.batch_sizes:
            raise UsageError(
                f"`batch={self.batch}` and `batch_sizes` given: give one or the other; with a "
                "BATCH_SIZE in the task file, `batch_sizes` are the parts it may be split into"
            )

    @property
    def fixed_batch(self) -> int | None:
        """Return the batch that was asked for by its number."""
        return int(self.batch) if self.batch.isdigit() else None

    @property
    def asked_batches(self) -> tuple[int, ...] | None:
        """Return the micro-batches that were asked for; None where they are free to choose."""
        return self.batch_sizes if self.fixed_batch is None else (self.fixed_batch,)

    def identity(self) -> Mapping[str, object]:
        """Return the settings that make two tunings of one task different studies."""
        return self._changed("study")

    def limits(self) -> Mapping[str, object]:
        """Return the settings which, when changed, make a finished study run again."""
        return self._changed("result")

    def _changed(self, new: str) -> Mapping[str, Any]:
        """Return those that are not the default: a setting that did not exist changes no study."""
        pairs = [(each, getattr(self, each.name)) for each in settings_of(type(self))]
        return {e.name: value for e, value in pairs if e.new == new and value != e.read(e.default)}


@dataclass(frozen=True, kw_only=True)
class Arguments(Options):
    """A task, how it is tuned (by single settings, or by `options`), where, and who listens."""

    task: Any = field(kw_only=False)
    script: bool = Setting(False).says(
        "run the file as a script, even if it defines build_model as a task file does"
    )
    at: int = Setting(1, "N", above=0).says(
        "of a script, tune its Nth call of fit or train (default: {default})"
    )
    arguments: Read[Iterable[str], tuple[str, ...]] = Setting(
        (), "ARG ...", option="--", read_as=_read_words, expected='texts such as ["--lr", "1e-3"]'
    ).says("a script's own arguments, after everything else")
    device: str | None = Setting(None, "KIND[:INDEX]").says(
        "cpu, cuda, rocm, xpu, mps or tpu (default: the best one here); with --plan also, by name, "
        "a device that need not be in this machine: v100, tpu v5e"
    )
    options: Options | None = None
    listener: Listener | None = None

    @property
    def source(self) -> TaskSource:
        """Return what is tuned, checked; see `read_source`."""
        return read_source(self.task, arguments=self.arguments, at=self.at, script=self.script)

    @property
    def chosen(self) -> Options:
        """Return the options, as given whole or setting by setting."""
        if self.options is None:
            return Options(**{each.name: getattr(self, each.name) for each in settings_of(Options)})
        return self.options


def takes(
    arguments: Callable[P, Arguments],
) -> Callable[[Callable[[Arguments], R]], Callable[P, R]]:
    """Have a function that is given `Arguments` take them one by one, as their class does.

    It raises `UsageError` for a keyword that is none, and where `options` and settings are given.
    """
    types = {each.name: each.given for each in settings_of(Arguments)}
    made = inspect.signature(arguments).parameters.values()
    signature = inspect.Signature(
        [each.replace(annotation=types.get(each.name, each.annotation)) for each in made]
    )

    def decorate(function: Callable[[Arguments], R]) -> Callable[P, R]:
        @wraps(function)
        def taking(*args: P.args, **given: P.kwargs) -> R:
            _check_names(given)
            signature.bind(*args, **given)
            return function(arguments(*args, **given))

        returned = inspect.signature(function).return_annotation
        vars(taking)["__signature__"] = signature.replace(return_annotation=returned)
        return taking

    return decorate


def _check_names(given: dict[str, object]) -> None:
    known, settings = ([each.name for each in fields(kind)] for kind in (Arguments, Options))
    for name in given:
        if name not in known:
            near = did_you_mean(name, known) or f" (known: {', '.join(known)})"
            raise UsageError(f"unknown setting {name!r}{near}")
    options, besides = given.get("options"), [f"`{name}`" for name in given if name in settings]
    if not isinstance(options, Options | None):
        raise UsageError(
            f"`options` of type {type(options).__name__} given, expected Options of "
            "autoprec.tuning.options; give single settings by their names"
        )
    if options is not None and besides:
        raise UsageError(
            f"`options` and {', '.join(besides)} given: give one or the other; "
            "dataclasses.replace(options, ...) changes single settings"
        )
