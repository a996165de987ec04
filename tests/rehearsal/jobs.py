"""Tunings on pretended accelerators, run two at a time, which several tests look at."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autoprec.core.profile import Profile
from autoprec.profiles import load_profile
from rehearsal import Gpu, Rehearsal
from rehearsal.build import library

TASKS = Path(__file__).with_name("tasks")
QUICK = ("--trials", 2, "--rounds", 1, "--proof-steps", 30, "--no-extras")


@dataclass(frozen=True)
class Job:
    """One tuning: a task, the command's words, and the machine it is tuned on.

    Its device is `named` on the command line; the framework there can drive it if it is `driven`.
    """

    task: str
    words: tuple[object, ...] = QUICK
    kind: str = "cuda"
    gpus: tuple[Gpu, ...] = ()
    faults: tuple[Mapping[str, Any], ...] = ()
    tasks: Path = TASKS
    driven: bool = True
    named: bool = True
    forked: str = "torch"

    def command(self, folder: Path) -> tuple[object, ...]:
        """The words of `autoprec` that tune it, with its files in `folder`."""
        files = ("--output", folder / "profile.yaml", "--storage", folder / "study.journal")
        device = ("--device", self.kind) if self.named else ()
        return ("tune", self.tasks / f"{self.task}.py", *device, *files, *self.words)


def forced(task: str, policy: str, kind: str = "cuda", *gpus: Gpu) -> Job:
    """A quick job that asks for one policy."""
    return Job(task, ("--policies", policy, *QUICK), kind, gpus)


@dataclass(frozen=True)
class Tuned:
    """How a job ended, on which machine."""

    job: Job
    machine: Rehearsal
    done: subprocess.CompletedProcess[str]

    @property
    def path(self) -> Path:
        """Where its profile is, if it made one."""
        return self.machine.folder / "profile.yaml"

    @property
    def shown(self) -> str:
        """What the command said."""
        return self.done.stderr

    def profile(self) -> Profile:
        """The profile of a tuning that must have ended well, with no measured speed shown."""
        assert self.done.returncode == 0, self.shown
        assert "Traceback" not in self.shown
        assert re.findall(r"\d samples/s|\d\.\d\dx", self.shown) == []
        profile = load_profile(self.path)
        assert profile.device.fingerprint.rehearsal
        return profile

    def again(self) -> subprocess.CompletedProcess[str]:
        """Run the same command once more."""
        return self.machine.autoprec(*self.job.command(self.machine.folder))


def tune(job: Job, folder: Path) -> Tuned:
    """Run a job; its files lie in `folder`."""
    more = {"driven": job.driven, "forked": job.forked}
    machine = Rehearsal(folder, job.kind, job.gpus, job.faults, **more)
    return Tuned(job, machine, machine.autoprec(*job.command(folder)))


@contextmanager
def running(
    jobs: Mapping[str, Job], folders: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Tuned]]]:
    """Run every job, two at a time, each with a core."""
    library()
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(tune, job, folders.mktemp(name)) for name, job in jobs.items()}
        pool.shutdown(cancel_futures=True)
