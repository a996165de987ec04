"""Checks a profile against this machine: whether it fits, and whether its claims still hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoprec import probing
from autoprec.backends import registry
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.policies import measured_choice
from autoprec.core.device.probe_result import ProbeResult
from autoprec.core.profile import Profile
from autoprec.core.profile.fit import Fit, check_fit
from autoprec.errors import FrameworkMissing, ProfileMismatch, UsageError
from autoprec.hardware.probes.observe import OnWait
from autoprec.measurement_cache import with_remembered_measurements
from autoprec.profiles import load_profile
from autoprec.recipe_for_device import unusable_accelerators
from autoprec.tuning.flow.script_verification import ROUNDS, UPDATES
from autoprec.tuning.options import Options
from autoprec.workers.task_source import TaskSource, read_source

if TYPE_CHECKING:
    from autoprec.core.profile.claims import Verification
    from autoprec.tuning.events import Listener


def check_profile(
    profile: str | Path | Profile,
    *,
    device: str | None = None,
    on_wait: OnWait = lambda text: None,
) -> Fit:
    """Return whether a profile fits this device and the software installed here.

    Its own framework has to be installed. Where the profile does not fit, `instead` says what
    `apply_profile` would do with it. `on_wait` is called with a message when a driver takes longer
    than two seconds.
    """
    made = profile if isinstance(profile, Profile) else load_profile(profile)
    machine = probing.probe_here(device=device, on_wait=on_wait)
    software, unusable = _software(machine, made)
    facts, best = _best_fit(made, machine.facts, software)
    if best.matches:
        return best
    accelerators = unusable_accelerators(machine.unusable, [made])
    best = replace(best, problems=(*best.problems, *unusable, *accelerators))
    if made.device.fingerprint.rehearsal:
        return replace(best, instead="apply_profile refuses it")
    if made.task.framework not in software:
        return best
    own = {name: software[name] for name in made.software if name in software}
    choice = measured_choice(with_remembered_measurements(facts, own | software))
    instead = f"apply_profile would train in {choice.policy}: {choice.reasons[0]}"
    return replace(best, instead=instead)


def _software(machine: ProbeResult, made: Profile) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the versions of what is installed, and why the profile's framework is not usable.

    The probe knows the built-in frameworks; the backends of others say their versions themselves.
    """
    if made.task.framework in registry.BUILT_IN:
        return machine.software, ()
    try:
        return machine.software | dict(registry.load(made.task.framework).versions()), ()
    except FrameworkMissing as error:
        return machine.software, (str(error),)


def _best_fit(
    made: Profile, devices: Sequence[DeviceFacts], software: Mapping[str, str]
) -> tuple[DeviceFacts, Fit]:
    """Return the device that a profile fits best, of its own kind if there is one, and the fit."""
    known = [facts for facts in devices if facts.kind == made.device.fingerprint.kind] or devices
    fits = [(facts, check_fit(made, facts.fingerprint, software)) for facts in known]
    return min(fits, key=lambda pair: (len(pair[1].problems), len(pair[1].warnings)))


def verify(
    profile: str | Path | Profile,
    task: str | Path | TaskSource | None = None,
    *,
    device: str | None = None,
    rounds: int = Options.rounds,
    checkpoint: str | Path | None = None,
    arguments: Sequence[str] | None = None,
    at: int | None = None,
    wait: bool = False,
    listener: Listener | None = None,
) -> Verification:
    """Measure and check a profile's recipe again; say which of its claims still hold.

    `task` is the profile's task file, by default the one that it names, in its own folder. The
    recipe and float32 are timed in alternation for `rounds`, twice as many where that decides
    nothing, and its first 30 steps at most are checked: from the weights in `checkpoint`, such as
    those of a training whose checks failed, or from new ones. A script runs with the `arguments`
    and up to the call number `at` of its tuning, unless others are given. Nothing is written.
    `listener` is called with every event. Raises `ProfileMismatch` if the profile is for another
    device, and as `tune` does for what is wrong with the task.
    """
    from autoprec.tuning.events import Note, silent
    from autoprec.tuning.flow import verification
    from autoprec.tuning.job import Target, TuningJob
    from autoprec.tuning.ranks import check_device_choice, peers_of

    made = profile if isinstance(profile, Profile) else load_profile(profile)
    ranks = made.recipe.distributed
    engine = "ddp" if ranks is None or ranks.engine == "mirrored" else ranks.engine
    nproc = made.recipe.world_size
    options = Options(rounds=rounds, wait=wait, checkpoint=checkpoint, nproc=nproc, engine=engine)
    check_device_choice(device, options.nproc)
    if not isinstance(task, TaskSource):
        given = made.task.arguments if arguments is None else arguments
        script, at = task is None and made.task.at is not None, at or made.task.at or 1
        file = task or _task_of(made, profile)
        task = read_source(file, arguments=given, at=at, script=script)
    listen = listener or silent
    machine = probing.probe_here(device=device, on_wait=lambda text: listen(Note(text)))
    software, unusable = _software(machine, made)
    facts, fit = _best_fit(made, machine.facts, software)
    if not fit.matches:
        accelerators = unusable_accelerators(machine.unusable, [made])
        why = "; ".join((*fit.problems, *unusable, *accelerators))
        raise ProfileMismatch(f"nothing to verify here: {why}. Tune on this device")
    for warning in fit.warnings:
        listen(Note(warning, warning=True))
    target = Target(facts, software, lambda known, _: known, peers=peers_of(facts, machine.facts))
    return verification.verify(TuningJob(task, target, options, listen), made)


def verify_script(
    profile: str | Path | Profile,
    script: str | Path | None = None,
    *,
    arguments: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    updates: int = UPDATES,
    listener: Listener | None = None,
) -> Verification:
    """Run a whole script with its profile and without, in turns; say whether it gains as stated.

    The script applies the profile itself, and runs with these `arguments` (default: those of its
    tuning) for so many `updates`, `rounds` times each. It writes what it writes until then, but for
    experiment trackers. Raises `TaskError` where it fails, `UsageError` where it applies no
    profile.
    """
    from autoprec.tuning.events import silent
    from autoprec.tuning.flow.script_verification import ScriptJob
    from autoprec.tuning.flow.script_verification import verify_script as run_in_turns

    made = profile if isinstance(profile, Profile) else load_profile(profile)
    source = read_source(
        script or str(_task_of(made, profile)).partition(":")[0],
        arguments=made.task.arguments if arguments is None else arguments,
        script=True,
    )
    job = ScriptJob(
        source=source,
        profile=made,
        file=None if isinstance(profile, Profile) else Path(profile),
        listener=listener or silent,
        rounds=rounds,
        updates=updates,
    )
    return run_in_turns(job)


def _task_of(made: Profile, profile: str | Path | Profile) -> Path:
    """Return the task file that a profile names, in the profile's own folder."""
    if isinstance(profile, Profile):
        raise UsageError("`task` is missing: a Profile does not know the folder of its task file")
    folder = Path(profile).parent
    path, file = folder / made.task.file, made.task.file.partition(":")[0]
    if Path(file).name != file or not (folder / file).is_file():
        raise UsageError(
            f"there is no {made.task.file} next to the profile, in {folder}: give the task file"
        )
    return path
