"""What a trainer and a profile cannot do together raises, with the way out; needs no trainer."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError
from autoprec.integrations.refusals import REFUSALS, refuse

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16)
ACCUMULATING = Recipe(accumulation_steps=4)
COMPILED = Recipe(compile=True)

ROWS: list[tuple[Recipe, dict[str, Any], str, str]] = [
    (Recipe(), {"precision": "bf16"}, "told bf16 .* float32", "leave mixed_precision"),
    (BFLOAT16, {"precision": "fp16"}, "told fp16 .* mixed_bfloat16", "the profile sets that"),
    (BFLOAT16, {"precision": "fp8"}, "told fp8 .* mixed_bfloat16", "leave mixed_precision"),
    (ACCUMULATING, {"accumulates": 2}, "accumulates 2 .* profile 4", "setting out"),
    (Recipe(), {"accumulates": 2}, "accumulates 2 .* profile 1", "setting out"),
    (Recipe(), {"fsdp1": True}, "FSDP1", "ModelParallelStrategy"),
    (BFLOAT16, {"deepspeed": True}, "DeepSpeed casts", "--to deepspeed"),
    (BFLOAT16, {"own_precision": "XLAStrategy"}, "XLAStrategy has", "DDP or FSDP2"),
    (BFLOAT16, {"data_parallel": True}, "nn.DataParallel", "torchrun"),
    (BFLOAT16, {"finds_batch": "auto_find_batch_size"}, "auto_find_batch_size", "leave that out"),
    (ACCUMULATING, {"accumulation_schedule": True}, "Scheduler changes", "accumulates 4"),
    (ACCUMULATING, {"manual": True}, "manual optimization .* 4", "automatic optimization"),
    (
        ACCUMULATING,
        {"leaves_out_items": "Net.forward"},
        "Net.forward makes nothing of num_items_in_batch, .* 4 micro-batches",
        "loss_is_scaled_for_ga = False",
    ),
    (ACCUMULATING, {"fsdp2": True}, "FSDP2 keeps", "need not be split"),
    (Recipe(), {"closures": "LBFGS"}, "LBFGS calls", "AdamW or SGD"),
    (Recipe(), {"regional_compile": True}, "regional compilation", "use_regional_compilation off"),
    (COMPILED, {"compiles": "torch_compile=True"}, "torch_compile=True does", "take that out"),
    (Recipe(), {"prepared": "model"}, "prepared its model", "before prepare"),
    (Recipe(), {"sixteen_bit_evaluation": "fp16_full_eval"}, "fp16_full_eval", "leave it out"),
    (
        Recipe(knobs={"cudnn_benchmark": True}),
        {"deterministic": True},
        "full_determinism",
        "take cudnn_benchmark out",
    ),
    (Recipe(), {"device_map": True}, "several devices", "without device_map"),
]


@pytest.mark.parametrize(("recipe", "facts", "what", "instead"), ROWS)
def test_a_combination_that_cannot_be_says_what_to_do_instead(
    recipe: Recipe, facts: dict[str, Any], what: str, instead: str
) -> None:
    with pytest.raises(UsageError, match=f"^The trainer with this profile: .*{what}") as raised:
        refuse("The trainer", recipe, facts)
    assert instead in str(raised.value)
    assert "{" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_every_row_of_the_table_is_tried() -> None:
    tried = {
        next(row.what for row in REFUSALS if row.when(recipe, facts))
        for recipe, facts, _, _ in ROWS
    }
    assert tried == {row.what for row in REFUSALS}


@pytest.mark.parametrize(
    ("recipe", "facts"),
    [
        (BFLOAT16, {"precision": "bf16"}),
        (Recipe(), {"precision": "no", "accumulates": 1, "own_precision": "", "prepared": ""}),
        (ACCUMULATING, {"accumulates": 4}),
        (Recipe(), {"manual": True, "fsdp2": True, "accumulation_schedule": True}),
        (Recipe(), {"compiles": "torch_compile=True", "deterministic": True}),
    ],
)
def test_what_goes_together_is_not_refused(recipe: Recipe, facts: dict[str, Any]) -> None:
    refuse("The trainer", recipe, facts)
