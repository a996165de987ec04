"""Two profiles that load: one with everything in it, and one of plain float32."""

from __future__ import annotations

from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import Refusal
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.island_proposals import IslandsEvidence
from autoprec.core.numerics.loss_curves import LossCurves
from autoprec.core.numerics.loss_scale_choice import ScaleEvidence
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import (
    Baseline,
    BatchChoice,
    Chosen,
    DeviceRecord,
    Evidence,
    MisalignedDimension,
    Profile,
    TaskRecord,
    TriedRecipe,
)
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Alignment, LossScale, Recipe
from autoprec.core.speed.attribution import Part
from autoprec.core.speed.trial_results import Status

_HERE = Fingerprint(DeviceKind.CPU, "amd-zen4", "AMD EPYC", 64, 4.0)

FULL = Profile(
    schema=3,
    created="2026-11-20T12:00:00Z",
    autoprec="0.1.0",
    task=TaskRecord("model.py", "0" * 64, "torch"),
    device=DeviceRecord(DeviceKind.CPU, "AMD EPYC", "amd-zen4", _HERE),
    software={"python": "3.11.7", "torch": "2.13.0"},
    recipe=Recipe(
        policy=Policy.MIXED_FLOAT16,
        batch_size=256,
        accumulation_steps=2,
        float32_modules=("head", "body.3.norm"),
        alignment=Alignment(8, ("body.0",)),
        loss_scale=LossScale("fixed", 1024.0, 2000, 16.0),
        memory_format="channels_last",
        compile=True,
        knobs={"threads": 4, "compile_mode": "default", "fused_optimizer": True},
    ),
    evidence=Evidence(
        baseline=Baseline(Policy.FLOAT32, 512, 1000.0, 0.512, 2**30),
        chosen=Chosen(2000.0, 0.256, 2**29, 0.61, "arithmetic", 0.001, 1.5),
        speedup=Ratio(2.0, 1.9, 2.1, 9),
        parity=Verdict(
            verdict="equal",
            reason="trains like float32",
            loss_deviation=0.001,
            gradient_error=1e-05,
            metric=0.97,
            covered=("single steps at 0, 40",),
            not_covered=("dropout",),
            curves=LossCurves((14, 29), (2.1, 1.5), (2.2, None), (2.1,)),
        ),
        batch=BatchChoice(
            yours=512,
            chosen=512,
            rule="max",
            knee=256,
            fits=4096,
            loader_feeds=12345.6,
            noise_scale=NoiseScale(310.5, 150.25, None, 256, 0, 59),
        ),
        reason="mixed_float16 at batch 256 is 2.00x float32 as it was run",
        trials=14,
        tuning_seconds=74.0,
        refusals=(Refusal("mixed_bfloat16", "emulated on this device"),),
        proof_seconds=12.5,
        memory_budget_bytes=2**33,
        loss_scale=ScaleEvidence(10, 11, 4, -30, 0.002, 3, 100, 2, 8, "as measured", 16, 4, 4000),
        islands=IslandsEvidence("head overflows", 4, 0.125, 0.75),
        padding=(MisalignedDimension("body.0", "Linear", "out_features", 10, 16, 1.25),),
        warnings=("the loader is slow",),
        waterfall=(Part("precision", Ratio(1.8, 1.7, 1.9, 9), "float32, batch 256"),),
        inconclusive="the search saw 13.76x, the final rounds 0.44x",
        not_covered=("the check of tf32",),
        tried=(
            TriedRecipe(Policy.FLOAT32, 512, "channels_last", Status.OK, 1000.0),
            TriedRecipe(Policy.MIXED_FLOAT16, 1024, "", Status.OUT_OF_MEMORY, 0.0, "8 GiB needed"),
        ),
    ),
)

PLAIN_FLOAT32 = Profile(
    schema=3,
    created="2026-11-20T12:00:00Z",
    autoprec="0.1.0",
    task=TaskRecord("model.py", "0" * 64, "keras"),
    device=FULL.device,
    software={"python": "3.11.7", "keras": "3.12.0"},
    recipe=Recipe(),
    evidence=Evidence(
        baseline=Baseline(Policy.FLOAT32, 32, 100.0, 0.32, 2**30),
        chosen=Chosen(100.0, 0.32, 2**30),
        parity=Verdict("equal", "float32 is the reference itself"),
        reason="the baseline is the fastest recipe",
        trials=2,
        tuning_seconds=14.8,
    ),
)
