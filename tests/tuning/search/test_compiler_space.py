"""What of the compiler's modes and scopes is in the space of a task, and what is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.device.facts import DeviceFacts, DTypeFact
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType
from autoprec.core.measurement import Kernel, TaskFacts
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.search.task_space import build_space, refusals_for_task
from autoprec.workers.task_source import TaskSource
from tests.tuning.search.test_float8_space import CPU, H100, built

#: 300 kernels that compute for less than a millisecond at batch 32.
SHORT = (Kernel(1e6, 100.0, 0, 300),)
BLOCKS = tuple(f"blocks.{number}" for number in range(12))
GPU = DeviceFacts(
    Observation(DeviceKind.CUDA), "f", "a GPU", {DType.FLOAT32: DTypeFact(Support.NATIVE)}
)


def graphs(
    facts: DeviceFacts = H100, options: Options | None = None, **task: Any
) -> tuple[bool, str]:
    """Whether CUDA graphs are tried, and the refusal if there is one."""
    task = {"kernels": SHORT, "batch_size": 32, **task}
    found, _, refused = built(options or Options(), facts, **task)
    (why,) = [r.reason for r in refused if r.candidate == "compile_mode reduce-overhead"] or [""]
    recipes = [found.recipe(point) for point in found.points()]
    tried = [r for r in recipes if r.knobs.get("compile_mode") == "reduce-overhead"]
    assert all(r.compile and r.accumulation_steps == 1 for r in tried)
    return bool(tried), why


def test_graphs_are_tried_where_launches_bound_the_step() -> None:
    assert graphs() == (True, "")
    assert graphs(splittable=False, split_reason="BatchNorm") == (True, "")
    assert graphs(options=Options(extras=False)) == (False, "")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"batch_size": None}, "at batch 65536 the step's kernels compute for at least"),
        ({"surveyed": 3}, "batches differ in shape"),
        ({"keeps_outputs": True}, "keeps outputs of the model beyond the step"),
        ({"options": Options(compile=False)}, "a mode of the compiler, which is not tried"),
        ({"not_compilable": "it is scripted"}, "a mode of the compiler, which is not tried"),
    ],
)
def test_graphs_are_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    tried, why = graphs(**given)
    assert not tried
    assert reason in why


def test_a_cpu_is_told_nothing_of_graphs() -> None:
    assert graphs(CPU, Options(compile=True)) == (False, "")


@pytest.mark.parametrize(
    ("facts", "options", "blocks", "levels"),
    [
        (H100, Options(), BLOCKS, ("model", "blocks")),
        (CPU, Options(compile=True), BLOCKS, ("model", "blocks")),
        (H100, Options(), (), None),
        (H100, Options(compile=False), BLOCKS, None),
        (CPU, Options(), BLOCKS, None),
    ],
)
def test_equal_blocks_are_compiled_where_there_are_some_and_the_compiler_is_tried(
    facts: DeviceFacts, options: Options, blocks: tuple[str, ...], levels: tuple[str, ...] | None
) -> None:
    found, _, _ = built(options, facts, equal_blocks=blocks)
    assert found.knobs.get("compile_scope") == levels


def test_a_plan_for_a_device_without_figures_goes_by_those_of_its_family() -> None:
    target = cast(Target, SimpleNamespace(facts=GPU))
    job = TuningJob(TaskSource(Path("task.py")), target, Options(), lambda event: None)
    task = TaskFacts("torch", {}, 32, 32, 100, batch_size=32, kernels=SHORT)
    proposal = propose(GPU, ())
    assert "compile_mode" not in build_space(job, task, GPU, proposal).knobs
    space = build_space(job, task, GPU, proposal, H100)
    assert space.knobs["compile_mode"] == ("default", "reduce-overhead")
    said = [each.reason for each in refusals_for_task(job, task, GPU, space)]
    assert "what the step's kernels take here is not known" in said
    known = [each.candidate for each in refusals_for_task(job, task, GPU, space, H100)]
    assert "compile_mode reduce-overhead" not in known
