"""What several test files need: measurements, outcomes, profiles, devices, a clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from autoprec.core.device.facts import DeviceFacts, Fingerprint
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import merge
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import Measurement
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import (
    SCHEMA,
    Baseline,
    Chosen,
    DeviceRecord,
    Evidence,
    Profile,
    TaskRecord,
)
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import BATCH, Point
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.name_lookup import hypothetical_observation
from autoprec.measurement_cache import TimedDevice, remember
from autoprec.probing import probe_here


def steady(step_seconds: float, samples_per_step: float = 32.0, **fields: Any) -> Measurement:
    """Return a measurement whose steps all take equally long."""
    known = {"steps": 9, **fields}
    return Measurement(
        step_seconds, step_seconds, step_seconds, samples_per_step=samples_per_step, **known
    )


def ran_at(
    point: Point, samples_per_second: float, status: Status = Status.OK, **fields: Any
) -> Outcome:
    """Return the outcome of a trial that ran at this throughput."""
    batch = float(point[BATCH])
    return Outcome(point, status, steady(batch / samples_per_second, batch, **fields))


def profile_of(
    recipe: Recipe, framework: str, fingerprint: Fingerprint, **software: str
) -> Profile:
    """Return a profile of this recipe that is twice as fast as float32."""
    return Profile(
        schema=SCHEMA,
        created="2026-11-21T00:00:00Z",
        autoprec="0.1.0",
        task=TaskRecord("model.py", "0" * 64, framework),
        device=DeviceRecord(fingerprint.kind, fingerprint.name, fingerprint.family, fingerprint),
        software=software,
        recipe=recipe,
        evidence=Evidence(
            baseline=Baseline(Policy.FLOAT32, recipe.effective_batch, 100.0, 0.32, 1),
            chosen=Chosen(200.0, 0.16, 1),
            speedup=Ratio(2.0, 1.9, 2.1, 9),
            parity=Verdict("equal", "trains like float32"),
            trials=3,
            tuning_seconds=1.0,
            reason="an example",
        ),
    )


def device_of_family(name: str) -> DeviceFacts:
    """Return what the catalogue tells of a device of this family that is not here."""
    family = load_catalogue().family(name)
    return merge(hypothetical_observation(family), family)


def remember_products(framework: str) -> None:
    """Keep made-up products of this machine's CPU in the cache folder that is set."""
    machine = probe_here(device="cpu")
    products = (Product(DType.FLOAT32, gflops=100.0), Product(DType.BFLOAT16, gflops=300.0))
    measured = Measurements(framework, products, 20.0, date="2026-11-24")
    fingerprint = machine.devices[0].facts.fingerprint
    version = machine.frameworks_installed[framework]
    remember(TimedDevice(fingerprint, framework, version, measured))


def no_contention() -> Any:
    """Return what stands in for a `ContentionMonitor` where no other process runs."""
    return cast(Any, SimpleNamespace(undisturbed=lambda measure, pids, repeatable=None: measure()))


def measured_twice() -> Any:
    """Return what stands in for a `ContentionMonitor` where each first measurement is disturbed."""

    def undisturbed(measure: Any, pids: Any, repeatable: Any = None) -> Any:
        pids()
        first = measure()
        return measure() if repeatable is None or repeatable(first) else first

    return cast(Any, SimpleNamespace(undisturbed=undisturbed))


class FakeClock:
    """A clock that stands still until `now` is changed."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        """Stand in for `time.monotonic`, where a module's `time` is replaced."""
        return self.now
