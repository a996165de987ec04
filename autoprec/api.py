"""The public functions: probe -> tune -> profile -> apply.

`tune`, `plan` and a cluster's tuning are wired together here; what the others do is in `applying`,
`probing`, `verifying`, `reports` and `tracking`. Nothing inside autoprec imports this module except
the command line.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autoprec import probing
from autoprec.applying import apply_profile, distribute
from autoprec.backends.capture import check_objects, is_factory
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.merging import merge
from autoprec.core.device.observation import DeviceKind
from autoprec.core.profile import Profile
from autoprec.errors import AutoprecWarning, DeviceUnusable, UsageError
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.name_lookup import (
    hypothetical_observation,
    resolve_family,
    with_vendor_figures,
)
from autoprec.hardware.probes.observe import is_device_kind
from autoprec.hardware.probes.observe import select as select_devices
from autoprec.measurement_cache import cache_folder
from autoprec.probing import device_fingerprint, probe
from autoprec.profiles import default_path, kept_beside, load_folder, load_profile, save_result
from autoprec.reports import check_report_path, report
from autoprec.tracking import log_to
from autoprec.tuning.options import Arguments, Options, takes
from autoprec.verifying import check_profile, verify, verify_script
from autoprec.workers.sent_objects import sent
from autoprec.workers.task_source import TaskSource, read_source

if TYPE_CHECKING:
    from autoprec.core.fleet.node_types import FleetResult
    from autoprec.core.fleet.status import FleetStatus
    from autoprec.core.speed.step_bounds import Plan
    from autoprec.fleet.driver import FleetListener
    from autoprec.tuning.events import Listener
    from autoprec.tuning.job import TuningJob

T = TypeVar("T")

__all__ = [
    "answer_quickly",
    "apply_profile",
    "check_output",
    "check_profile",
    "check_report_path",
    "device_fingerprint",
    "distribute",
    "fleet_status",
    "load_profile",
    "log_to",
    "plan",
    "probe",
    "report",
    "tune",
    "tune_fleet",
    "verify",
    "verify_script",
]


@takes(Arguments)
def tune(given: Arguments) -> Profile:
    """Measure, check and choose the recipe for a task; write its profile and return it.

    The task is a file, or objects: a function without arguments, or what it would return (parts of
    a loop, a trainer, a compiled model; see docs/tune-what-exists.md), which travel to the workers.
    The settings are those of docs/reference.md (`autoprec tune --help` has them, too), given one by
    one or, instead, as `options`. The profile is written to `output`, by default next to the task
    file (of objects: in the working directory); an inconclusive one is written beside a conclusive
    one that is there. `listener` is called with every event; without one a notebook shows a status
    line, and anything else is silent (as a notebook is with `autoprec.tuning.events.silent`). Where
    the measurements contradict each other, float32 is kept and `evidence.inconclusive` says why.
    Raises `TaskError` for what is wrong with the task, `NoFeasibleRecipe` if nothing that was asked
    for passes, `UsageError` for wrong arguments.
    """
    if isinstance(given.task, str | Path | TaskSource):
        return _tune(given, default_path(given.source.path))
    if not is_factory(given.task):
        check_objects(given.task, name="autoprec.tune")
    with sent(given.task, cache_folder()) as path:
        found = replace(given, task=TaskSource(path))
        return _tune(found, default_path(Path.cwd() / path.name))


def _tune(given: Arguments, default_output: Path) -> Profile:
    """Tune a task, and write its profile where it is wanted."""
    from autoprec.reporting.notebook import Notebook, in_notebook
    from autoprec.tuning.events import Note, silent
    from autoprec.tuning.flow import tuner
    from autoprec.tuning.ranks import check_device_choice

    check_device_choice(given.device, given.chosen.nproc)
    source = given.source
    output = check_output(given.chosen.output or default_output, source.path)
    listen = given.listener or (Notebook() if in_notebook() else silent)
    profile = _run_here(tuner.tune, source, given, listen)
    try:
        place = save_result(profile, output)
    except OSError as error:
        raise UsageError(
            f"{output} could not be written: {error.strerror or error}. The trials are kept: free "
            "some space or choose another `output`, and run the command again"
        ) from error
    listen(Note(f"the profile is in {place}"))
    if place != output:
        listen(Note(kept_beside(output, place), warning=True))
        if listen is silent:
            warnings.warn(kept_beside(output, place), AutoprecWarning, stacklevel=4)
    return profile


@takes(Arguments)
def answer_quickly(given: Arguments) -> str:
    """Search for some seconds; say which recipe leads, and about how fast it is.

    Recipes were timed once each, and nothing has been checked. No profile is written; a later
    `tune` of the same settings, which it takes, goes on from the trials. Raises as `tune` does.
    """
    from autoprec.tuning.events import silent
    from autoprec.tuning.flow import tuner
    from autoprec.tuning.ranks import check_device_choice

    check_device_choice(given.device, given.chosen.nproc)
    return _run_here(tuner.answer_quickly, given.source, given, given.listener or silent)


def _run_here(
    work: Callable[[TuningJob], T], source: TaskSource, given: Arguments, listen: Listener
) -> T:
    """Work on the task with the best device here that its framework can drive."""
    from autoprec.tuning.events import Note
    from autoprec.tuning.job import Target, TuningJob
    from autoprec.tuning.ranks import peers_of
    from autoprec.tuning.study.kept_tunings import trials_kept
    from autoprec.tuning.study.storage import default_journal

    chosen, device = given.chosen, given.device
    machine = probing.probe_here(device=device, on_wait=lambda text: listen(Note(text)))
    for note in machine.notes:
        listen(Note(note))
    unusable = () if device else machine.unusable
    for each in unusable:
        listen(Note(each.text, warning=True))

    def work_on(facts: DeviceFacts) -> T:
        target = Target(
            facts=facts,
            software=machine.software,
            measure=probing.measure_device,
            unusable=unusable,
            peers=peers_of(facts, machine.facts),
        )
        return work(TuningJob(source, target, chosen, listen))

    journal = chosen.storage or default_journal(source.path)
    with trials_kept(journal, lambda text: listen(Note(text))):
        best = machine.facts[:1] if device else machine.facts
        return _on_first_usable(best, work_on, listen)


@takes(Arguments)
def plan(given: Arguments) -> Plan:
    """Say what `tune` would try for a task on a device, and what that can bring; measure nothing.

    The task takes one step on this machine's CPU. `device` names a device here ("cuda:0") or one
    that need not be here, of the catalogue ("v100"); without it the first device here is taken.
    Nothing is written. The settings are those of `tune`. Raises as `tune` and `probe` do.
    """
    from autoprec.tuning.events import Note, silent
    from autoprec.tuning.flow import plan
    from autoprec.tuning.job import Target, TuningJob

    source, device = given.source, given.device
    listen = given.listener or silent
    family = (
        None
        if device is None or is_device_kind(device)
        else resolve_family(load_catalogue(), device)
    )
    machine = probing.probe_here(on_wait=lambda text: listen(Note(text)))
    known = list(machine.facts)
    cpu = next(each for each in known if each.kind is DeviceKind.CPU)
    if family is not None:
        known = [merge(hypothetical_observation(family), family)]
    elif device is not None:
        found = select_devices([each.observation for each in known], device, machine.unusable)
        known = [each for each in known if each.observation == found[0]]
    unusable = () if device else machine.unusable
    target = Target(cpu, machine.software, lambda known, _: known, unusable)
    job = TuningJob(source, target, given.chosen, listen)
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


def _on_first_usable(
    devices: Sequence[DeviceFacts], work_on: Callable[[DeviceFacts], T], listen: Listener
) -> T:
    """Work on the best device that the task's framework, as it is installed, can drive."""
    from autoprec.tuning.events import Note

    for facts in devices[:-1]:
        try:
            return work_on(facts)
        except DeviceUnusable as error:
            listen(Note(f"skipped: {error}", warning=True))
    return work_on(devices[-1])


def tune_fleet(
    task: str | Path | TaskSource,
    *,
    ray: str | None = None,
    slurm: Sequence[str] = (),
    device: str | None = None,
    options: Options | None = None,
    listener: FleetListener | None = None,
    output: str | Path | None = None,
) -> FleetResult:
    """Tune one node of each device type of a cluster; write a folder of profiles, say how it ended.

    `ray` is the address of a Ray cluster ("auto": the one this machine belongs to), `slurm`
    names partitions; one of them is given. The profiles are written to the folder `output`,
    by default TASK.profiles next to the task file. `listener` is called with the name of a type and
    each event of its tuning. Raises as `tune` does if no type has a profile.
    """
    from autoprec.fleet.driver import FleetJob
    from autoprec.fleet.driver import tune_fleet as tune_with
    from autoprec.fleet.journals import default_output
    from autoprec.tuning.ranks import check_device_choice

    source = task if isinstance(task, TaskSource) else read_source(task)
    chosen = options or Options()
    check_device_choice(device, chosen.nproc)
    if (ray is None) == (not slurm):
        raise UsageError("give either `ray`, an address, or `slurm`, names of partitions")
    job = FleetJob(
        task=source,
        output=Path(output or chosen.output or default_output(source.path)).absolute(),
        options=chosen,
        listener=listener or (lambda name, event: None),
        device=device,
    )
    if ray is not None:
        from autoprec.fleet.ray_scheduler import RayScheduler

        with RayScheduler(ray, wait=chosen.wait) as cluster:
            return tune_with(job, cluster)
    from autoprec.fleet.slurm_scheduler import SlurmScheduler

    with SlurmScheduler(slurm, job.output, wait=chosen.wait) as partitions:
        return tune_with(job, partitions)


def fleet_status(folder: str | Path, *, prices: Mapping[str, float] | None = None) -> FleetStatus:
    """Say how the profiles of a folder, one for each device type, compare with each other and here.

    `prices` maps names to costs per hour; a name is matched against the words of a device's name
    and family. Raises `ProfileError` if the folder holds no profiles, `UsageError` for a name
    that matches none of them.
    """
    from autoprec.core.fleet.status import fleet_status
    from autoprec.hardware.machine import Machine
    from autoprec.hardware.probes.frameworks import find_frameworks
    from autoprec.version import __version__

    here = {each.name: each.version for each in find_frameworks(Machine())}
    return fleet_status(
        load_folder(Path(folder)),
        now=datetime.now(UTC),
        here={**here, "autoprec": __version__},
        prices=prices or {},
    )


def check_output(path: Path, task: Path | None = None) -> Path:
    """Return where a profile will be written; raise `UsageError` before tuning, not after it."""
    folder = path.parent
    if not path.is_dir() and (path.suffix not in (".yaml", ".yml") or path.resolve() == task):
        raise UsageError(
            f"`output` {path} given, expected a file ending in .yaml: a profile is YAML, and no "
            "other file is overwritten"
        )
    if path.is_dir():
        raise UsageError(f"`output` {path} is a folder; give the profile's file name")
    existing = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{existing} is not writable; choose another place {_alternatives(task)}")
    return path


def _alternatives(task: Path | None) -> str:
    """Name the options that choose another place: one is enough where the study can be written."""
    from autoprec.tuning.study.storage import default_journal, is_writable

    both = task is not None and not is_writable(default_journal(task))
    return f"with `output=FILE.yaml`{' and `storage=FILE`' if both else ''}"
