"""Decides whether a profile fits a device and its software, which of several does, and what of it.

These are the rules of `autoprec check` and of `apply_profile`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autoprec.core.device.facts import Fingerprint
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Evidence, Profile
from autoprec.core.recipe import Alignment, Recipe
from autoprec.core.speed.trial_results import Status


@dataclass(frozen=True)
class Fit:
    """Whether a profile holds here: `problems` rule it out, `warnings` weaken it.

    `instead` is what is done where it does not hold, if that is known. `inconclusive` says why its
    tuning decided nothing (empty: it did), and is among the warnings with what to do.
    """

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    instead: str = ""
    inconclusive: str = ""

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
    inconclusive = profile.evidence.inconclusive
    if inconclusive:
        warnings.insert(0, _describe_inconclusive(profile))
    return Fit(tuple(problems), tuple(warnings), inconclusive=inconclusive)


def lacked_time(evidence: Evidence) -> bool:
    """Say whether a limit ended an inconclusive tuning before a second policy ran."""
    ran = {each.policy for each in evidence.tried if each.status is Status.OK}
    return bool(evidence.inconclusive and evidence.not_covered and len(ran) == 1)


def _describe_inconclusive(profile: Profile) -> str:
    policy = profile.recipe.policy
    kept = policy is Policy.FLOAT32 and not profile.recipe.forced
    what = "float32 was kept" if kept else f"what {policy} gains is not known"
    again = f"Tune again on an idle machine: `{profile.task.tune_command('--fresh')}`"
    if lacked_time(profile.evidence):
        again = f"Give it more time or trials: `{profile.task.tune_command()}`"
    return (
        f"this profile's tuning was inconclusive: {what}, because {profile.evidence.inconclusive}. "
        f"{again}"
    )


def _device_differences(made: Fingerprint, here: Fingerprint) -> list[str]:
    found = []
    if made.name != here.name:
        found.append(f"made on {made.name!r}, this device calls itself {here.name!r}")
    if memory_differs(made, here):
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


def memory_differs(made: Fingerprint, here: Fingerprint) -> bool:
    """Say whether two memories differ by more than a tenth; unknown ones do not."""
    known = made.memory_gib and here.memory_gib
    return bool(known) and abs(made.memory_gib - here.memory_gib) > max(1, 0.1 * made.memory_gib)


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


def select_profile(fits: Mapping[str, Fit]) -> str | None:
    """Return the name of the matching profile with the fewest warnings; ties go to the first name.

    One whose tuning was inconclusive is chosen only if no other matches.
    """
    matching = sorted(
        (bool(fit.inconclusive), len(fit.warnings), name)
        for name, fit in fits.items()
        if fit.matches
    )
    return matching[0][-1] if matching else None


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
                f"out: without it {recipe.policy} is not checked"
            )
    if recipe.compile:
        notes.append(f"compile was measured with {made} and is left off")
    if recipe.memory_format != "contiguous":
        notes.append(f"memory_format {recipe.memory_format} is {made}'s and is left out")
    foreign = [name for name in recipe.knobs if name not in knobs]
    notes += [f"the setting {name} is {made}'s and is left out" for name in foreign]
    kept = replace(
        recipe,
        float32_modules=(),
        alignment=Alignment(),
        compile=False,
        memory_format="contiguous",
        knobs={name: value for name, value in recipe.knobs.items() if name not in foreign},
    )
    return kept, tuple(notes)
