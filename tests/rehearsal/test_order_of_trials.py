"""In which order whole tunings on pretended accelerators try recipes, and what they leave out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autoprec.core.dtypes import Policy
from rehearsal import T4, Rehearsal
from rehearsal.jobs import TASKS, Job

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]

PLAIN = ("--no-extras", "--no-compile", "--rounds", 1, "--proof-steps", 30)
WHOLE = (*PLAIN, "--batch-sizes", 256)
GRAPHS = ("--batch-sizes", 8, "--knob", "compile_mode=reduce-overhead", "--policies", "float32")
JOBS = {
    "bound by launches": Job(
        "bound_by_launches", (*PLAIN, "--batch-sizes", "32-512", "--trials", 7)
    ),
    "refused": Job("broken_bfloat16", WHOLE),
    "slow": Job("slow_bfloat16", WHOLE),
    "named": Job("slow_bfloat16", (*WHOLE, "--policies", "float32,bf16,fp16")),
    "xpu": Job("broken_bfloat16", WHOLE, "xpu"),
    "graphs": Job("mlp", (*GRAPHS, "--trials", 1, "--rounds", 1), gpus=(T4,)),
}
SPARED = "not tried: it is not known to be faster here than mixed_bfloat16, which was tried"


def trials(shown: str) -> list[tuple[str, int]]:
    """Policy and batch of every trial, in their order."""
    found = re.findall(r"^  trial +\d+  (\w+), batch (\d+)", shown, re.MULTILINE)
    return [(policy, int(batch)) for policy, batch in found]


def test_the_batch_grows_until_the_device_is_busy_before_policies_are_compared(tuned: Any) -> None:
    profile = tuned("bound by launches").profile()
    tried = trials(tuned("bound by launches").shown)
    ladder = [batch for policy, batch in tried if policy == "float32"]
    assert tried[: len(ladder)] == [("float32", batch) for batch in ladder]
    assert ladder[:2] == [32, 128]
    assert ladder == sorted(ladder)
    compared = dict(reversed(tried[len(ladder) :]))
    assert set(compared) == {"tf32", "mixed_bfloat16"}
    assert all(256 <= batch <= max(ladder) for batch in compared.values()), tried
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16


def test_float16_is_left_out_where_bfloat16_passes_and_it_is_said(tuned: Any) -> None:
    profile, shown = tuned("bound by launches").profile(), tuned("bound by launches").shown
    refused = {each.candidate: each.reason for each in profile.evidence.refusals}
    assert refused["mixed_float16"].startswith(SPARED)
    assert f"refused: mixed_float16: {SPARED}" in shown
    assert "--policies float32,mixed_bfloat16,mixed_float16 tries both" in shown


@pytest.mark.parametrize("name", ["refused", "xpu"])
def test_float16_is_tried_after_the_proof_refused_bfloat16(tuned: Any, name: str) -> None:
    profile, shown = tuned(name).profile(), tuned(name).shown
    said = "no recipe of mixed_bfloat16 passes and gains: mixed_float16 is tried"
    assert said in shown, shown
    assert shown.index("mixed_bfloat16: rejected") < shown.index(said)
    before, after = (
        [policy for policy, _ in trials(part)] for part in shown.split(said, maxsplit=1)
    )
    assert "mixed_bfloat16" in before
    assert "mixed_float16" not in before
    assert "mixed_float16" in after
    assert profile.recipe.policy is Policy.MIXED_FLOAT16
    assert profile.evidence.loss_scale is not None


@pytest.mark.parametrize("name", ["slow", "named"])
def test_float16_is_tried_in_the_search_where_bfloat16_is_slow_or_it_is_named(
    tuned: Any, name: str
) -> None:
    profile, shown = tuned(name).profile(), tuned(name).shown
    tried = [policy for policy, _ in trials(shown)]
    assert tried.index("mixed_bfloat16") < tried.index("mixed_float16")
    assert "mixed_float16 is tried" not in shown
    assert profile.recipe.policy is Policy.MIXED_FLOAT16
    refused = {each.candidate: each.reason for each in profile.evidence.refusals}
    assert refused["mixed_bfloat16"] == "measured slower than the best float32 recipe"


def test_a_plan_says_that_float16_waits_and_not_where_it_is_named(rehearse: Any) -> None:
    machine: Rehearsal = rehearse("cuda")
    words = ("tune", TASKS / "mlp.py", "--plan", "--device", "cuda")
    waits = "not known to be faster than mixed_bfloat16: tried only where that fails or is slower"
    plan = machine.autoprec(*words)
    (line,) = [each for each in plan.stdout.splitlines() if each.startswith("  mixed_float16: ")]
    assert waits in line
    assert waits not in machine.autoprec(*words, "--policies", "float32,fp16").stdout


def test_graphs_are_refused_where_the_batch_is_split(tuned: Any) -> None:
    profile, shown = tuned("graphs").profile(), tuned("graphs").shown
    lost = "a split batch's gradients do not survive the CUDA graphs of that mode"
    assert f"setting compile_mode: reduce-overhead left out: {lost}" in shown
    refused = {each.candidate: each.reason for each in profile.evidence.refusals}
    assert refused["compile_mode reduce-overhead"].startswith(lost)
    assert profile.recipe.accumulation_steps == 4
    assert "compile_mode" not in profile.recipe.knobs


def test_float8_is_refused_by_capability(tuned: Any) -> None:
    refused = {e.candidate: e.reason for e in tuned("graphs").profile().evidence.refusals}
    why = "float8 is absent on this device: its Tensor Cores begin at compute capability 8.9"
    assert why in refused["float8"]
