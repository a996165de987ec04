"""Each further knob is plausible where its condition holds, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autoprec.backends import registry
from autoprec.core.device.facts import DeviceFacts, DTypeFact
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.recipe import KnobValue, check_knob
from autoprec.core.speed.knobs import plausible_knobs, wanted_multiples
from tests.core.device.test_policies import fact
from tests.core.device.test_policies import facts as device

TORCH = TaskFacts("torch", {}, 32, 32, 1000, optimizer_share=0.2, threads=8, convolutions=True)
KERAS = TaskFacts("keras", {}, 32, 32, 1000, step_seconds=0.004, steps_per_execution=1)


def cpu(**observed: Any) -> DeviceFacts:
    plain = device(DeviceKind.CPU, bfloat16=fact(Support.NATIVE))
    return replace(plain, observation=replace(plain.observation, **observed))


def plausible(facts: DeviceFacts, task: TaskFacts) -> Mapping[str, tuple[KnobValue, ...]]:
    searched = registry.capabilities(task.framework).searched_knobs
    return plausible_knobs(facts, task, searched)


def test_the_first_level_is_what_holds_without_the_knob() -> None:
    assert plausible(cpu(cores=4), TORCH) == {
        "fused_optimizer": (False, True),
        "threads": (8, 4),
        "implicit_bfloat16": (False, True),
    }
    assert plausible(device(DeviceKind.CUDA), TORCH) == {
        "fused_optimizer": (False, True),
        "cudnn_benchmark": (False, True),
    }
    assert plausible(cpu(), KERAS) == {"steps_per_execution": (1, 8)}


@pytest.mark.parametrize(
    ("task", "facts", "absent"),
    [
        (replace(TORCH, optimizer_share=0.01), cpu(), "fused_optimizer"),
        (TORCH, cpu(cores=8, usable_cores=8), "threads"),
        (TORCH, device(DeviceKind.CPU, bfloat16=fact(Support.EMULATED)), "implicit_bfloat16"),
        (TORCH, device(DeviceKind.CUDA), "implicit_bfloat16"),
        (TORCH, cpu(), "keep_memory"),
        (replace(TORCH, keepable_memory=True), device(DeviceKind.CUDA), "keep_memory"),
        (replace(TORCH, convolutions=False), device(DeviceKind.CUDA), "cudnn_benchmark"),
        (TORCH, cpu(), "cudnn_benchmark"),
        (replace(KERAS, step_seconds=0.5), cpu(), "steps_per_execution"),
        (replace(KERAS, steps_per_execution=4), cpu(), "steps_per_execution"),
        (replace(KERAS, steps_per_execution=0), cpu(), "steps_per_execution"),
    ],
)
def test_what_is_not_plausible_is_not_tried(
    task: TaskFacts, facts: DeviceFacts, absent: str
) -> None:
    assert absent not in plausible(facts, task)


def test_memory_can_be_kept_where_the_c_library_lets_it() -> None:
    assert plausible(cpu(), replace(TORCH, keepable_memory=True))["keep_memory"] == (
        False,
        True,
    )


@pytest.mark.parametrize(
    ("kind", "length", "levels"),
    [
        (DeviceKind.CUDA, 1024, ("default", "flash", "cudnn", "efficient")),
        (DeviceKind.ROCM, 512, ("default", "flash", "efficient")),
        (DeviceKind.CUDA, 128, None),
        (DeviceKind.CUDA, 0, None),
        (DeviceKind.CPU, 1024, None),
    ],
)
def test_kernels_of_attention_are_compared_where_it_is_long_and_the_device_has_several(
    kind: DeviceKind, length: int, levels: tuple[str, ...] | None
) -> None:
    found = plausible(device(kind), replace(TORCH, attention_length=length))
    assert found.get("attention") == levels


@pytest.mark.parametrize(
    ("observed", "threads"),
    [
        ({"core_quota": 2.5, "cores": 8, "usable_cores": 8}, 2),
        ({"core_quota": 0.5, "cores": 8}, 1),
        ({"usable_cores": 3, "cores": 16}, 3),
        ({"cores": 4, "usable_cores": 8}, 4),
    ],
)
def test_threads_follow_what_the_process_really_has(observed: dict[str, Any], threads: int) -> None:
    assert plausible(cpu(**observed), TORCH)["threads"] == (8, threads)


def test_every_level_is_one_the_recipe_takes() -> None:
    attends = replace(TORCH, attention_length=1024)
    for facts, task in [(cpu(cores=4), TORCH), (device(DeviceKind.CUDA), attends), (cpu(), KERAS)]:
        for name, levels in plausible(facts, task).items():
            assert name in registry.capabilities(task.framework).knobs
            for level in levels:
                check_knob(name, level)


BOTH = (Policy.FLOAT32, Policy.TF32, Policy.MIXED_BFLOAT16)


def gpu(**dtypes: DTypeFact) -> DeviceFacts:
    known = {DType(name): fact for name, fact in dtypes.items()}
    known[DType.FLOAT32] = DTypeFact(Support.NATIVE)
    return DeviceFacts(Observation(DeviceKind.CUDA), "f", "a GPU", known)


@pytest.mark.parametrize(
    ("facts", "multiples"),
    [
        (gpu(bfloat16=DTypeFact(Support.NATIVE, alignment=8, best_alignment=64)), (8, 64)),
        (gpu(bfloat16=DTypeFact(Support.NATIVE, alignment=8, best_alignment=8)), (8,)),
        (
            gpu(
                tf32=DTypeFact(Support.NATIVE, alignment=4, best_alignment=32),
                bfloat16=DTypeFact(Support.NATIVE, alignment=8, best_alignment=64),
            ),
            (8, 64),
        ),
        (gpu(tf32=DTypeFact(Support.NATIVE, alignment=4, best_alignment=32)), (4, 32)),
        (gpu(bfloat16=DTypeFact(Support.EMULATED, alignment=8, best_alignment=64)), ()),
        (gpu(float16=DTypeFact(Support.NATIVE, alignment=8, best_alignment=64)), ()),
        (gpu(), ()),
    ],
)
def test_dimensions_are_padded_to_the_least_and_the_best_of_what_is_computed_in(
    facts: DeviceFacts, multiples: tuple[int, ...]
) -> None:
    assert wanted_multiples(facts, BOTH) == multiples
    assert wanted_multiples(replace(facts, padding=False), BOTH) == ()
