"""One profile, made by hand, for the tests of profiles."""

from __future__ import annotations

from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import (
    Baseline,
    Chosen,
    DeviceRecord,
    Evidence,
    Profile,
    TaskRecord,
)
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe

HERE = Fingerprint(DeviceKind.CPU, "amd-zen4", "AMD EPYC", 64, 4.0)


PROFILE = Profile(
    schema=3,
    created="2026-11-20T12:00:00Z",
    autoprec="0.1.0",
    task=TaskRecord("model.py", "0" * 64, "torch"),
    device=DeviceRecord(DeviceKind.CPU, "AMD EPYC", "amd-zen4", HERE),
    software={"python": "3.11.7", "torch": "2.13.0+cpu"},
    recipe=Recipe(Policy.MIXED_BFLOAT16, 512),
    evidence=Evidence(
        baseline=Baseline(Policy.FLOAT32, 32, 100.0, 0.32, 2**30),
        chosen=Chosen(200.0, 2.56, 2**31),
        throughput=Ratio(2.0, 1.9, 2.1, 9),
        parity=Verdict("equal", "trains like float32"),
        reason="it is fast",
        trials=9,
        tuning_seconds=70.0,
    ),
)


SOFTWARE = dict(PROFILE.software)
