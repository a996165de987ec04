"""What of the compiler's modes and scopes is in the space of a task, and what is told."""

from __future__ import annotations

from typing import Any

import pytest
from factories import device_of_family

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.measurement import Kernel
from autoprec.tuning.options import Options
from tests.tuning.search.test_float8_space import CPU, H100, built

#: 300 kernels that compute for less than a millisecond at batch 32.
SHORT = (Kernel(1e6, 100.0, 0, 300),)
BLOCKS = tuple(f"blocks.{number}" for number in range(12))
V100 = device_of_family("nvidia-volta")


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
