"""Keras on a pretended GPU: TensorFlow is told that there is one, and uses the CPU.

What it proves: the order in which TensorFlow is asked and told things, and what is decided by its
answers. Not that anything is placed on the GPU, which TensorFlow does not say here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoprec.core.dtypes import Policy
from rehearsal import Gpu
from rehearsal.jobs import Job

pytestmark = [pytest.mark.keras, pytest.mark.slow, pytest.mark.release]

L4 = Gpu("NVIDIA L4", "8.9", gib=8.0)
FEW = ("--trials", 2, "--rounds", 1, "--proof-steps", 10, "--no-extras")

CONV = Job("keras_conv", FEW, gpus=(L4,), forked="keras")
FLOAT16 = replace(CONV, words=("--policies", "mixed_float16", *FEW))
JOBS = {
    "float16": FLOAT16,
    "conv": CONV,
    "not driven": replace(FLOAT16, driven=False),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["float16", "conv"])
def test_a_task_is_tuned_and_its_processes_share_the_gpu(tuned: Any, name: str) -> None:
    profile = tuned(name).profile()
    assert profile.device.kind == "cuda"
    assert profile.evidence.parity.verdict == "equal", profile.evidence.parity
    assert "CUDA_ERROR_OUT_OF_MEMORY" not in tuned(name).shown


def test_a_policy_that_is_asked_for_is_chosen(tuned: Any) -> None:
    assert tuned("float16").profile().recipe.policy is Policy.MIXED_FLOAT16


def test_the_baseline_keeps_tensorflows_tf32_and_the_models_own_xla(tuned: Any) -> None:
    """On a GPU, `jit_compile="auto"` is XLA: no recipe is left that has it and another without."""
    shown = tuned("conv").shown
    assert "tf32 is not tried: the task's float32 products are TF32 already" in shown
    assert "at most 6 recipes to try" in shown, "three policies, each plain and padded to 64"
    assert not tuned("conv").profile().recipe.compile


def test_a_tensorflow_for_cpus_beside_a_gpu_is_told_before_anything_runs(tuned: Any) -> None:
    ended = tuned("not driven")
    assert ended.done.returncode == 2
    assert "tensorflow[and-cuda]" in ended.shown.splitlines()[-1]
    assert "trial" not in ended.shown
