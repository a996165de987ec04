"""The order of trials on three kinds of device: what is compared at which batch, and when."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.space import BATCH, Point, Space, powers_of_two
from autoprec.core.speed.trial_results import Outcome
from tests.core.speed.machines import LIMITS, measured

POLICIES = (Policy.FLOAT32, Policy.TF32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16)
SIZES = powers_of_two(8, 4096)
ATTENTION = {"attention": ("default", "flash", "cudnn", "efficient")}
GRAPHS = {"compile_mode": ("default", "reduce-overhead")}
BLOCKS = {"compile_scope": ("model", "blocks")}


def in_words(point: Point) -> str:
    """A point as a line of a table: policy, batch, and what is not at its default."""
    words = [str(point["policy"]), str(point[BATCH])]
    if point["compile"]:
        words.append(f"compiled {point.get('compile_scope', 'model')}")
    words += [
        f"{name} {point[name]}"
        for name in ("attention", "compile_mode", "keep_memory", "float8")
        if point.get(name, "default") not in ("default", False)
    ]
    return ", ".join(words)


def seconds_of_kernels(point: Point) -> float:
    """How long the device computes: policies and the compiler make it faster, attention too."""
    speeds = {"float32": 1.0, "tf32": 3.0, "mixed_bfloat16": 4.0, "mixed_float16": 4.0}
    speed = speeds[str(point["policy"])]
    speed *= 1.4 if point["compile"] else 1.0
    speed *= 1.04 if point.get("compile_scope") == "model" and point["compile"] else 1.0
    speed *= {"cudnn": 1.15, "efficient": 0.9}.get(str(point.get("attention")), 1.0)
    speed *= 1.3 if point.get("float8") else 1.0
    return 4e-5 * int(point[BATCH]) / speed


def large_gpu(point: Point) -> float:
    """Launches take 10 ms, whatever the batch: they bound the step below batch 256."""
    return max(0.01, seconds_of_kernels(point))


def small_gpu(point: Point) -> float:
    """A task that keeps its batch of 64, where launches bound every step: graphs take a fifth."""
    launches = 0.002 if point.get("compile_mode") == "reduce-overhead" else 0.01
    return max(launches, seconds_of_kernels(point))


def cpu(point: Point) -> float:
    """A CPU that batch 32 keeps busy, whose bfloat16 is no faster without kept memory."""
    return 20 * seconds_of_kernels(point) / (1.5 if point.get("keep_memory") else 1.0)


DEVICES: dict[str, tuple[Any, Space, list[str]]] = {
    "large GPU": (
        large_gpu,
        Space(
            POLICIES,
            SIZES,
            compile=(False, True),
            knobs={**ATTENTION, **BLOCKS, "float8": (0, 1)},
            float16_waits=True,
        ),
        [
            "float32, 32",
            "float32, 128",
            "float32, 1024",
            "float32, 4096",
            "tf32, 1024",
            "mixed_bfloat16, 1024",
            "mixed_bfloat16, 1024, compiled blocks",
            "tf32, 1024, compiled blocks",
        ],
    ),
    "small GPU": (
        small_gpu,
        Space(
            POLICIES,
            (32, 64),
            effective_batch=64,
            compile=(False, True),
            knobs={**GRAPHS},
            float16_waits=True,
        ),
        [
            "float32, 64",
            "tf32, 64",
            "mixed_bfloat16, 64",
            "mixed_float16, 64",
            "float32, 64, compiled model",
            "tf32, 64, compiled model",
        ],
    ),
    "CPU": (
        cpu,
        Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), SIZES, knobs={"keep_memory": (False, True)}),
        [
            "float32, 32",
            "float32, 32, keep_memory True",
            "float32, 128, keep_memory True",
            "mixed_bfloat16, 32, keep_memory True",
        ],
    ),
}


def trials(name: str) -> tuple[list[str], Outcome]:
    """All trials of a search on a device, and the fastest."""
    seconds, space, _ = DEVICES[name]
    batch = space.whole_micro_batch or 32
    plain = {factor: levels[0] for factor, levels in space.levels().items()}
    baseline = {**plain, "policy": "float32", BATCH: batch}
    history: list[Outcome] = []
    while isinstance(step := next_point(space, baseline, history, LIMITS), Next):
        assert step.point is not None
        history.append(measured(step.point, int(step.point[BATCH]) / seconds(step.point)))
    return [in_words(o.point) for o in history], max(history, key=lambda outcome: outcome.rate)


@pytest.mark.parametrize("name", DEVICES)
def test_the_batch_comes_first_then_policies_then_the_compiler_then_what_refines(name: str) -> None:
    expected = DEVICES[name][2]
    assert trials(name)[0][: len(expected)] == expected


def test_float16_is_tried_only_where_bfloat16_gains_nothing() -> None:
    tried = {name: any(t.startswith("mixed_float16") for t in trials(name)[0]) for name in DEVICES}
    assert tried == {"large GPU": False, "small GPU": True, "CPU": False}


def test_attention_float8_and_the_whole_model_come_one_by_one_after_what_they_refine() -> None:
    tried, best = trials("large GPU")
    later = tried[len(DEVICES["large GPU"][2]) :]
    assert in_words(best.point).startswith("mixed_bfloat16")
    assert best.point["compile"]
    assert best.point["attention"] == "cudnn"
    assert best.point["float8"]
    first = {
        each: next(i for i, t in enumerate(later) if each in t) for each in ("float8", "cudnn")
    }
    assert all("compiled" in later[index] for index in first.values())
    assert not any("float8" in t and "bfloat16" not in t for t in tried)


def test_graphs_are_tried_compiled_and_unsplit_alone_and_win_where_launches_bound_the_step() -> (
    None
):
    tried, best = trials("small GPU")
    graphs = [each for each in tried if "reduce-overhead" in each]
    assert graphs
    assert all("compiled" in each and ", 64, " in each for each in graphs)
    for each in graphs:
        assert tried.index(each) > tried.index(each.partition(", compile_mode")[0])
    assert best.point["compile_mode"] == "reduce-overhead"


def test_a_cpu_tries_none_of_these() -> None:
    tried, _ = trials("CPU")
    assert not any("compiled" in each or "attention" in each for each in tried)
