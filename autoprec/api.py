"""The public functions, and the only place where hardware, backends and tuning are wired together.

Nothing inside autoprec imports this module except the command line. The data flow reads from top to
bottom: probe -> tune -> profile -> apply.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from autoprec import cache
from autoprec.core.device.facts import DeviceFacts, Fingerprint
from autoprec.core.device.merging import merge, with_measurements
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import measured_choice, propose
from autoprec.core.dtypes import DType, Policy
from autoprec.core.probe_result import (
    DeviceReport,
    ProbeResult,
)
from autoprec.core.profile import Fit, Profile, check_fit
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import parse_batch_sizes
from autoprec.errors import AutoprecWarning, DeviceUnusable, UsageError
from autoprec.fitting import recipe_for, unusable_accelerators, with_remembered_measurements
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.lookup import hypothetical_observation, resolve_family, with_vendor_figures
from autoprec.hardware.observe import OnWait, is_device_kind, observe
from autoprec.hardware.observe import select as select_devices
from autoprec.profiles import default_path, load_profile, save_profile

if TYPE_CHECKING:
    from autoprec.backends.keras.apply.precision import Precision as KerasPrecision
    from autoprec.backends.protocol import Backend
    from autoprec.backends.torch.apply.precision import Precision as TorchPrecision
    from autoprec.core.speed.plan import Plan
    from autoprec.tuning.events import Listener
    from autoprec.tuning.options import Options

#: Instead of a profile, or in this environment variable: apply nothing.
OFF = "off"
SWITCH = "AUTOPREC"

_MODEL_ARGUMENT = "model= was given"

__all__ = ["apply_profile", "check_profile", "load_profile", "plan", "probe", "tune"]


# Probe -------------------------------------------------------------------------------------------


def probe(
    *,
    measure: bool = False,
    device: str | None = None,
    on_wait: OnWait = lambda text: None,
) -> ProbeResult:
    """Probe this machine: every device, which precisions it supports, and why.

    `measure` also times matrix products per dtype in a child process of the installed framework,
    and remembers the result in the user's cache directory; without it, a remembered result for this
    device and framework is shown with its date. `device` selects one kind ("cuda") or one device
    ("cuda:1"). Any other text names a device of the catalogue, which need not be present ("a100",
    "tpu v5e"). Raises `UsageError` where no device is left, or where no or several catalogue
    entries match. `on_wait` is called with a message when a driver takes longer than two seconds.
    """
    if device is None or is_device_kind(device):
        machine = _probe_here(measure=measure, device=device, on_wait=on_wait)
        return machine if measure else _with_remembered_measurements(machine)
    if measure:
        raise UsageError(
            f"{device!r} is no device here such as cpu or cuda:0, and only those are measured"
        )
    family = resolve_family(load_catalogue(), device)
    facts = merge(hypothetical_observation(family), family)
    return ProbeResult(devices=(DeviceReport(facts, propose(facts)),))


def _probe_here(
    *,
    measure: bool = False,
    device: str | None = None,
    on_wait: OnWait = lambda text: None,
) -> ProbeResult:
    """Probe the devices of this machine, without looking up names in the catalogue."""
    machine = observe(on_wait=on_wait)
    observations = select_devices(machine.devices, device, machine.unusable)
    catalogue = load_catalogue()
    facts = [merge(each, catalogue.family_of(each)) for each in observations]
    if measure:
        software = {framework.name: framework.version for framework in machine.frameworks}
        facts = [_measure_device(each, software) for each in facts]
    return ProbeResult(
        devices=tuple(DeviceReport(each, propose(each)) for each in facts),
        frameworks=machine.frameworks,
        notes=machine.notes,
        unusable=machine.unusable,
        system=machine.system,
        python=machine.python,
    )


def _measure_device(facts: DeviceFacts, software: Mapping[str, str]) -> DeviceFacts:
    """Time the device's matrix products with the first framework able to; remember the result."""
    if facts.observation.rehearsal:
        return facts  # times of a pretended device mean nothing
    from autoprec.backends.shared.matmul_timing import measure

    measured = measure(facts, list(software))
    float32 = measured.product(DType.FLOAT32)
    if float32 is not None and float32.gflops and not measured.disturbed:
        kept = replace(measured, date=f"{datetime.now(UTC):%Y-%m-%d}", notes=())
        name = measured.framework
        note = cache.remember(cache.TimedDevice(facts.fingerprint, name, software[name], kept))
        measured = replace(measured, notes=(*measured.notes, *filter(None, (note,))))
    return with_measurements(facts, measured)


def _with_remembered_measurements(machine: ProbeResult) -> ProbeResult:
    software = {framework.name: framework.version for framework in machine.frameworks}
    known = [with_remembered_measurements(report.facts, software) for report in machine.devices]
    return replace(machine, devices=tuple(DeviceReport(each, propose(each)) for each in known))


# Tune --------------------------------------------------------------------------------------------


def tune(
    task: str | Path,
    *,
    device: str | None = None,
    options: Options | None = None,
    listener: Listener | None = None,
    **settings: Any,
) -> Profile:
    """Measure, prove and choose the recipe for a task file; write its profile and return it.

    `settings` are the fields of `autoprec.tuning.options.Options` (`policies`, `batch_sizes`,
    `trials`, `time_limit`, `output`, ...). The profile is written to `output`, by default beside
    the task file. `listener` is told what goes on; without one a notebook shows a line of it, and
    anything else is silent (as a notebook is with `autoprec.tuning.events.silent`). Where the
    measurements contradict each other, float32 is kept and `evidence.inconclusive` says why. Raises
    `TaskError` for what is wrong with the task, `NoFeasibleRecipe` if nothing that was asked for
    passes, `UsageError` for wrong arguments.
    """
    from autoprec.reporting.notebook import Notebook, in_notebook
    from autoprec.tuning import tuner
    from autoprec.tuning.events import Note, silent
    from autoprec.tuning.job import Target, TuningJob
    from autoprec.tuning.study_storage import default_journal, discard_new_journal_on_task_error
    from autoprec.workers.task_file import check_task_path

    chosen = _options_from(options, settings)
    path = check_task_path(task)
    output = check_output(chosen.output or default_path(path), path)
    listen = listener or (Notebook() if in_notebook() else silent)
    machine = _probe_here(device=device, on_wait=lambda text: listen(Note(text)))
    for note in machine.notes:
        listen(Note(note))
    unusable = () if device else machine.unusable
    for each in unusable:
        listen(Note(each.text, warning=True))
    installed = {framework.name: framework.version for framework in machine.frameworks}

    def tune_on(facts: DeviceFacts) -> Profile:
        target = Target(
            facts=facts,
            software=installed | {"python": machine.python},
            measure=lambda known: _measure_device(known, installed),
            unusable=unusable,
        )
        return tuner.tune(TuningJob(path, target, chosen, listen))

    devices = [report.facts for report in machine.devices]
    with discard_new_journal_on_task_error(chosen.storage or default_journal(path)):
        profile = _tune_on_first_usable(devices[:1] if device else devices, tune_on, listen)
    save_profile(profile, output)
    return profile


def plan(
    task: str | Path,
    *,
    device: str | None = None,
    options: Options | None = None,
    listener: Listener | None = None,
    **settings: Any,
) -> Plan:
    """Say what `tune` would try for a task on a device, and what that can bring; measure nothing.

    The task takes one step on this machine's CPU. `device` names a device here ("cuda:0") or one
    that need not be here, of the catalogue ("v100"); without it the first device here is taken.
    Nothing is written. `settings` are those of `tune`. Raises as `tune` and `probe` do.
    """
    from autoprec.tuning import plan
    from autoprec.tuning.events import Note, silent
    from autoprec.tuning.job import Target, TuningJob
    from autoprec.workers.task_file import check_task_path

    path, chosen = check_task_path(task), _options_from(options, settings)
    listen = listener or silent
    family = (
        None
        if device is None or is_device_kind(device)
        else resolve_family(load_catalogue(), device)
    )
    machine = _probe_here(on_wait=lambda text: listen(Note(text)))
    known = [each.facts for each in machine.devices]
    cpu = next(each for each in known if each.kind is DeviceKind.CPU)
    if family is not None:
        known = [merge(hypothetical_observation(family), family)]
    elif device is not None:
        found = select_devices([each.observation for each in known], device, machine.unusable)
        known = [each for each in known if each.observation == found[0]]
    software = {f.name: f.version for f in machine.frameworks} | {"python": machine.python}
    unusable = () if device else machine.unusable
    job = TuningJob(path, Target(cpu, software, lambda known: known, unusable), chosen, listen)
    made = plan.plan(job, known, _reference_device)
    told = () if family is not None else (*machine.notes, *(each.text for each in unusable))
    return replace(made, notes=(*made.notes, *told))


def _reference_device(facts: DeviceFacts) -> DeviceFacts:
    """Return the device, or the product of its family whose peaks and bandwidth are published.

    A partition of a device does not have the whole device's figures.
    """
    if facts.observation.partition:
        return facts
    catalogue = load_catalogue()
    row = with_vendor_figures(catalogue, catalogue.family(facts.family))
    return facts if row.name == facts.family else merge(hypothetical_observation(row), row)


def _options_from(options: Options | None, settings: Mapping[str, Any]) -> Options:
    """Return the options as given, whole or one by one."""
    from autoprec.tuning.options import Options as TuneOptions

    if options is not None and settings:
        raise UsageError("give options or single settings, not both")
    try:
        return options or TuneOptions(**_parse_settings(settings))
    except TypeError as error:
        raise UsageError(f"tune: {error}") from error


def _tune_on_first_usable(
    devices: Sequence[DeviceFacts], tune_on: Callable[[DeviceFacts], Profile], listen: Listener
) -> Profile:
    """Tune on the best device that the task's framework, as it is installed, can drive."""
    from autoprec.tuning.events import Note

    for facts in devices[:-1]:
        try:
            return tune_on(facts)
        except DeviceUnusable as error:
            listen(Note(f"skipped: {error}", warning=True))
    return tune_on(devices[-1])


def _parse_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings as a caller writes them (names, lists) to the types of the options."""
    parsed = dict(settings)
    if "policies" in parsed:
        given = parsed["policies"]
        names = given.split(",") if isinstance(given, str) else given
        parsed["policies"] = tuple(Policy.parse(str(name)) for name in names)
    sizes = parsed.get("batch_sizes")
    if sizes is not None:
        parsed["batch_sizes"] = (
            parse_batch_sizes(sizes) if isinstance(sizes, str) else tuple(sorted(sizes))
        )
    for name in ("output", "checkpoint"):
        if parsed.get(name) is not None:
            parsed[name] = Path(parsed[name])
    if isinstance(parsed.get("float32_modules"), str):
        parsed["float32_modules"] = (parsed["float32_modules"],)
    return parsed


def check_output(path: Path, task: Path | None = None) -> Path:
    """Return where a profile will be written; raise `UsageError` before tuning, not after it."""
    folder = path.parent
    if not path.is_dir() and (path.suffix not in (".yaml", ".yml") or path.resolve() == task):
        raise UsageError(
            f"--output {path} given, expected a file ending in .yaml: a profile is YAML, and no "
            "other file is overwritten"
        )
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder; give the profile's file name")
    existing = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{existing} is not writable; choose another place {_alternatives(task)}")
    return path


def _alternatives(task: Path | None) -> str:
    """Name the options that choose another place: one is enough where the study can be written."""
    from autoprec.tuning.study_storage import default_journal, is_writable

    both = task is not None and not is_writable(default_journal(task))
    return f"with --output FILE.yaml{' and --storage FILE' if both else ''}"


# Check -------------------------------------------------------------------------------------------


def check_profile(
    profile: str | Path | Profile,
    *,
    device: str | None = None,
    on_wait: OnWait = lambda text: None,
) -> Fit:
    """Say whether a profile fits this device and the software installed here.

    Its own framework has to be installed. Where the profile does not fit, `instead` says what
    `apply_profile` would do with it. `on_wait` is called with a message when a driver takes longer
    than two seconds.
    """
    made = profile if isinstance(profile, Profile) else load_profile(profile)
    machine = _with_remembered_measurements(_probe_here(device=device, on_wait=on_wait))
    software = {f.name: f.version for f in machine.frameworks} | {"python": machine.python}
    wanted = made.device.fingerprint.kind
    known = [r.facts for r in machine.devices if r.facts.kind == wanted]
    known = known or [r.facts for r in machine.devices]
    fits = {facts.address: check_fit(made, facts.fingerprint, software) for facts in known}
    facts = min(known, key=lambda f: (len(fits[f.address].problems), len(fits[f.address].warnings)))
    best = fits[facts.address]
    if best.matches:
        return best
    best = replace(
        best, problems=(*best.problems, *unusable_accelerators(machine.unusable, [made]))
    )
    if made.task.framework not in software:
        return best
    choice = measured_choice(facts)
    instead = f"apply_profile would train in {choice.policy}: {choice.reasons[0]}"
    return replace(best, instead=instead)


def device_fingerprint(device: str | None = None) -> Fingerprint:
    """Return what profiles are matched by, for `device` or the first device here."""
    return _probe_here(device=device).devices[0].facts.fingerprint


# Apply -------------------------------------------------------------------------------------------


class KerasModel(Protocol):
    """Distinguishes a Keras model from a PyTorch one for type checkers, importing neither."""

    @property
    def trainable_variables(self) -> list[Any]:
        """Return the weights that are trained."""


@overload
def apply_profile(
    profile: str | Path | Profile | Recipe | None,
    *,
    model: KerasModel | None = None,
    optimizer: Any = None,
    device: str | None = None,
    strict: bool = False,
    fallback: Literal["measured", "rules"] = "measured",
) -> KerasPrecision: ...


@overload
def apply_profile(
    profile: str | Path | Profile | Recipe | None,
    *,
    model: Callable[..., Any],
    optimizer: Any = None,
    device: str | None = None,
    strict: bool = False,
    fallback: Literal["measured", "rules"] = "measured",
) -> TorchPrecision: ...


def apply_profile(
    profile: str | Path | Profile | Recipe | None,
    *,
    model: Any = None,
    optimizer: Any = None,
    device: str | None = None,
    strict: bool = False,
    fallback: Literal["measured", "rules"] = "measured",
) -> Any:
    """Apply a profile to a model and its optimizers; return the framework's Precision object.

    `profile` is a profile file, a folder of them (the one that fits this device is taken), a
    Profile, or a Recipe. `optimizer` may be one optimizer or several. Without a model the global
    Keras policy is set, for models built afterwards. Where no profile fits the device, an
    `AutoprecWarning` says so and training is in float32, unless an earlier `autoprec probe
    --measure` or `autoprec tune` of this device, or the catalogue's measurement of one of its
    family, found a policy's matrix products faster. With `fallback="rules"` the hardware's rules
    choose, as `autoprec probe` shows them; `strict=True` raises `ProfileMismatch`. Parameters,
    their names and their checkpoints stay as they are. What is done to the model, its optimizers
    and the process is undone by the result's `restore()`, or at the end of a `with` block (kept
    memory, and threads that TensorFlow was given, are not).

    "off" or None changes nothing: the result is that of a float32 recipe, its batch 32. With
    AUTOPREC=off in the environment every profile does so, at its own batch, so that a script runs
    as it would without autoprec and is not edited for it.
    """
    from autoprec.backends import registry

    if fallback not in ("measured", "rules"):
        raise UsageError(f"fallback={fallback!r} given, expected 'measured' or 'rules'")
    if _is_switched_off():
        return _leave_unchanged(profile, model, optimizer, device)
    if profile is None or profile == OFF:
        return _leave_unchanged(Recipe(), model, optimizer, device)
    name = (
        registry.owner(model, _MODEL_ARGUMENT)
        if model is not None
        else _framework_without_model(profile)
    )
    backend = registry.load(name)
    address = _address(device, model, backend)
    facts = None
    if isinstance(profile, Recipe):
        recipe = profile
    else:
        recipe, facts = recipe_for(profile, address, backend, strict=strict, fallback=fallback)
    return backend.surgeon().apply(
        recipe, model=model, optimizers=_as_sequence(optimizer), device=address, facts=facts
    )


def _address(device: str | None, model: Any, backend: Backend) -> str:
    """Return the device named; the model's own where only its kind, or no device, is named."""
    if device is not None and (model is None or ":" in device):
        return device
    own = backend.device_of(model)
    return own if device in (None, own.partition(":")[0]) else str(device)


def _is_switched_off() -> bool:
    """Say whether the environment switches profiles off."""
    said = os.environ.get(SWITCH, "").strip().lower()
    if said not in ("", "on", OFF):
        raise UsageError(f"{SWITCH}={said!r} is set, expected off, or on as if it were not set")
    return said == OFF


def _leave_unchanged(
    profile: str | Path | Profile | Recipe | None, model: Any, optimizer: Any, device: str | None
) -> Any:
    """Return a Precision that changes nothing, at the batch of the profile otherwise applied."""
    from autoprec.backends import registry

    name = (
        registry.owner(model, _MODEL_ARGUMENT)
        if model is not None
        else _framework_without_model(profile)
    )
    backend = registry.load(name)
    address = _address(device, model, backend)
    if profile is None or profile == OFF:
        profile = Recipe()
    elif not isinstance(profile, Recipe):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoprecWarning)  # of a policy that is not applied
            profile, _ = recipe_for(profile, address, backend)
    plain = Recipe(batch_size=profile.batch_size, accumulation_steps=profile.accumulation_steps)
    optimizers = _as_sequence(optimizer)
    return backend.surgeon().leave_unchanged(
        plain, model=model, optimizers=optimizers, device=address
    )


def _framework_without_model(profile: str | Path | Profile | Recipe | None) -> str:
    """Return the framework whose policy is set before a model is built, or raise `UsageError`."""
    from autoprec.backends import registry

    if isinstance(profile, str | Path) and Path(profile).is_file():
        profile = load_profile(profile)
    known = registry.all_capabilities()
    able = {name: each for name, each in known.items() if each.applies_without_model}
    default = next(name for name, each in able.items() if each.required_modules)
    framework = profile.task.framework if isinstance(profile, Profile) else default
    only = f"only {known[default].title} has a policy to set before a model is built"
    if framework not in able:
        tuned = registry.capabilities(framework)
        raise UsageError(
            f"this profile was tuned with {tuned.title}: apply_profile needs model=... "
            f"({tuned.model}) and optimizer=...; {only}"
        )
    in_use = [
        each.title
        for name, each in known.items()
        if name not in able and any(module in sys.modules for module in each.required_modules)
    ]
    needed = able[framework].required_modules
    if in_use and needed and not any(module in sys.modules for module in needed):
        raise UsageError(f"apply_profile needs model=... for {in_use[0]}; {only}")
    return framework


def _as_sequence(optimizer: Any) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    return tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
