"""Whether float8 is in the space of a task, and what is told where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import device_of_family

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.policies import Refusal, propose
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Dimension, TaskFacts, Unit
from autoprec.core.speed.space import Space
from autoprec.tuning.events import Note
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.search.task_space import build_space, refusals_for_task
from autoprec.workers.task_source import TaskSource

LAYERS = ("in", "a", "b", "out")


def layers(width: int) -> dict[str, Any]:
    """Four linear layers, of which those in the middle have this width and all the work."""
    widths = {"in": (16, width), "out": (width, 4)}
    sizes = [(path, *widths.get(path, (width, width))) for path in LAYERS]
    wide = width >= 2048
    return {
        "dimensions": tuple(
            Dimension(path, "Linear", name, size)
            for path, *both in sizes
            for name, size in zip(("in_features", "out_features"), both, strict=True)
        ),
        "float8_layers": ("a", "b") if wide else (),
        "units": (Unit("a", "Linear", 0.5), Unit("b", "Linear", 0.5)),
    }


H100, A100 = device_of_family("nvidia-h100-sxm"), device_of_family("nvidia-ampere")
MI300, GPU = device_of_family("amd-mi300x"), Options(compile=True)


CPU = DeviceFacts(Observation(DeviceKind.CPU), "f", "a CPU", {})


def built(
    options: Options, facts: DeviceFacts, **task: Any
) -> tuple[Space, list[str], tuple[Refusal, ...]]:
    """The space of a task of torch's, what was noted about it, and what was refused."""
    said: list[str] = []
    target = cast(Target, SimpleNamespace(facts=facts))
    job = TuningJob(
        TaskSource(Path("task.py")),
        target,
        options,
        lambda event: said.append(cast(Note, event).text),
    )
    known = replace(TaskFacts("torch", {}, 32, 32, parameters=100), **task)
    space = build_space(job, known, facts, propose(facts, options.policies))
    return space, said, refusals_for_task(job, known, facts, space)


def float8(facts: DeviceFacts, options: Options = GPU, **task: Any) -> tuple[bool, str]:
    """Whether float8 is tried, and the refusal if there is one."""
    found, _, refused = built(options, facts, **task)
    why = "".join(each.reason for each in refused if each.candidate == "float8")
    tried = any(found.recipe(point).uses_float8 for point in found.points())
    return tried, why


def test_float8_is_tried_where_device_widths_and_compiler_allow_it() -> None:
    assert float8(H100, **layers(4096)) == (True, "")
    asked = replace(GPU, knobs={"float8": (True,)}, extras=False)
    assert float8(H100, asked, **layers(4096)) == (True, "")
    assert float8(H100, replace(GPU, extras=False), **layers(4096)) == (False, "")


@pytest.mark.parametrize(
    ("facts", "options", "width", "reason"),
    [
        (H100, GPU, 768, "2048 or more wide on both sides, in multiples of 16 (the widest is 768"),
        (H100, Options(compile=False), 4096, "it is tried in compiled recipes alone (--compile)"),
        (A100, GPU, 4096, "float8 is absent on this device: its Tensor Cores begin at compute cap"),
        (MI300, GPU, 4096, "float8 is built for CUDA alone: its products are of e4m3fnuz"),
        (H100, replace(GPU, policies=(Policy.FLOAT32,)), 4096, "refines mixed_bfloat16, which is"),
        (H100, replace(GPU, nproc=2, engine="fsdp2"), 4096, "FSDP2 shards the weights"),
    ],
)
def test_float8_is_refused_with_its_reason(
    facts: DeviceFacts, options: Options, width: int, reason: str
) -> None:
    tried, why = float8(facts, options, **layers(width))
    assert not tried
    assert reason in why


def test_float8_is_refused_where_the_wide_layers_do_little_of_the_work() -> None:
    few = {**layers(4096), "units": (Unit("a", "Linear", 0.09), Unit("conv", "Conv2d", 0.91))}
    tried, why = float8(H100, **few)
    assert not tried
    assert why.startswith("2 of 4 linear layers are wide enough, with 9 % of the model's products")


def test_on_a_cpu_float8_is_spoken_of_only_where_it_was_asked_for() -> None:
    assert float8(CPU, **layers(4096)) == (False, "")
    asked = Options(knobs={"float8": (False, True)}, compile=True)
    found, said, _ = built(asked, CPU, **layers(4096))
    assert found.knobs == {}
    assert said == ["setting float8 is left out: float8 is unknown on this device"]
