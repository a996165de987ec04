"""`autoprec export`: settings on stdout, what is left out on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec.cli import main
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, LossScale, Recipe

WriteProfile = Callable[[Recipe, str], Path]

EVERYTHING = Recipe(
    policy=Policy.MIXED_BFLOAT16,
    batch_size=16,
    accumulation_steps=4,
    float32_modules=("head",),
    alignment=Alignment(8, ("wide",)),
    memory_format="channels_last",
    compile=True,
    knobs={"fused_optimizer": True, "threads": 2},
)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=1024.0))
NOWHERE = "float32_modules (head); alignment (wide); memory_format (channels_last)"


@pytest.mark.parametrize(
    ("recipe", "target", "settings", "left"),
    [
        (
            EVERYTHING,
            "accelerate",
            {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16"},
            f"{NOWHERE}; compile (torch.compile); batch_size (16); accumulation_steps (4); "
            "fused_optimizer (True); threads (2)",
        ),
        (
            EVERYTHING,
            "deepspeed",
            {
                "train_micro_batch_size_per_gpu": 16,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 0.0,
                "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            },
            f"{NOWHERE}; compile (torch.compile); fused_optimizer (True); threads (2)",
        ),
        (
            EVERYTHING,
            "transformers",
            {
                "per_device_train_batch_size": 16,
                "gradient_accumulation_steps": 4,
                "bf16": True,
                "fp16": False,
                "tf32": False,
                "torch_compile": True,
                "optim": "adamw_torch_fused",
            },
            f"{NOWHERE}; threads (2)",
        ),
        (
            FLOAT16,
            "deepspeed",
            {
                "train_micro_batch_size_per_gpu": 8,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 0.0,
                "torch_autocast": {"enabled": True, "dtype": "float16"},
            },
            "loss_scale (its rule)",
        ),
        (
            Recipe(policy=Policy.TF32),
            "accelerate",
            {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no"},
            "tf32 (TF32 products); batch_size (32); accumulation_steps (1)",
        ),
    ],
)
def test_settings_are_printed_and_the_rest_is_told(
    recipe: Recipe,
    target: str,
    settings: dict[str, Any],
    left: str,
    write_profile: WriteProfile,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_profile(recipe, "torch")
    assert main(["export", str(path), "--to", target]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == settings
    assert printed.err == f"autoprec: {target} has no setting for {left}\n"


def test_the_environment_is_lines_of_names_and_values(
    write_profile: WriteProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe(policy=Policy.TF32, accumulation_steps=2, knobs={"threads": 2})
    assert main(["export", str(write_profile(recipe, "torch")), "--to", "env"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "ACCELERATE_MIXED_PRECISION=no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1",
        "OMP_NUM_THREADS=2",
    ]
    assert "batch_size (32)" in printed.err


def test_an_unknown_tool_is_refused(
    write_profile: WriteProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", str(write_profile(Recipe(), "torch")), "--to", "apex"])
    assert ended.value.code == 2
    assert "deepspeed" in capsys.readouterr().err
