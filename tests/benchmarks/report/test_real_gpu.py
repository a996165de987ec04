"""The tables of models of real size: what was measured, what was doubted, and what was not."""

from __future__ import annotations

from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.recipe import Recipe
from benchmarks.gpu.real_models import MODELS, ways
from benchmarks.report import gpu, real_gpu

GPU = "Made Up GPU"


def row(way: str, seconds: float, visit: int = 0, **changed: Any) -> dict[str, Any]:
    (found,) = [each for each in ways(MODELS["resnet50"], 256, True) if each.name == way]
    return {
        "device": GPU,
        "way": way,
        "visit": visit,
        "recipe": to_plain(found.recipe),
        "dtype": found.multiplies_in(MODELS["resnet50"]).value,
        "step_seconds": seconds,
        "samples_per_second": 256 / seconds,
        "tflops": 6.2 / seconds,
        "peak_share": 0.1 / seconds / 10,
        "peak_memory_bytes": 2**34,
        "first_step_seconds": 40.0,
        "doubts": [],
        **changed,
    }


def cells(lines: list[str], model: str) -> dict[str, str]:
    columns = [each.strip() for each in lines[0].split("|")]
    (line,) = [line for line in lines if line.startswith(f"| {GPU} | {model}")]
    return dict(zip(columns, (each.strip() for each in line.split("|")), strict=True))


def test_without_a_gpu_every_model_is_said_to_be_unmeasured_beside_what_others_published() -> None:
    toys = {GPU: {"grid-mlp": [{"task": "mlp"}]}}
    for found in ({}, toys):
        lines = list(real_gpu.models(found))
        titles = {model.title for model in MODELS.values() if not model.rounded}
        assert {line.split(" | ")[1] for line in lines[2:]} == titles
        for line in lines[2:]:
            narrow = real_gpu.NO_FLOAT8 in line
            assert line.count(real_gpu.NOT_YET) == (9 if narrow else 10)
            assert narrow != ("Llama 3 8B, 4096" in line or "MLP" in line)
    assert "2616-2791 with AMP ([Lambda](https://" in "\n".join(lines)
    assert list(real_gpu.every_way({})) == []
    assert list(gpu.small_tasks({"real-gpt2": [], "tune-gpt2": [], "tune-gpt": []})) == ["gpt"]
    assert list(gpu.small_tasks({"grid-unet": [], "tune-unet": [], "real-unet": []})) == ["unet"]


def test_a_models_row_holds_medians_doubts_and_what_was_chosen() -> None:
    chosen = {"recipe": to_plain(Recipe(batch_size=256)), "evidence": {"tuning_seconds": 88.4}}
    rows = [
        {"device": GPU, "peaks": {"bfloat16": 7.5e14}},
        row("float32", 0.140),
        row("float32 IEEE", 0.2),
        row("mixed_bfloat16", 0.1),
        row("mixed_bfloat16 channels_last", 0.070),
        row("mixed_bfloat16 compiled", 0.060),
        row("mixed_bfloat16 compiled", 0.064, 1, doubts=["+7 % from visit 0"]),
        {**row("mixed_float16", 1.0), "failed": "no memory"},
    ]
    del rows[-1]["step_seconds"]
    found = {GPU: {"real-resnet50": rows, "tune-resnet50": [chosen]}}
    shown = cells(list(real_gpu.models(found)), "ResNet-50, 224 px, batch 256")
    assert shown["at the same batch"] == "2.26x"
    assert shown["float32, IEEE"] == "200 ms"
    assert shown["float32 as PyTorch starts"] == "140 ms"
    assert shown["TF32"] == real_gpu.NOT_YET
    assert shown["bfloat16"] == "100 ms, 70 ms"
    assert shown["float16"] == "failed"
    assert shown["bfloat16 compiled"] == "62 ms (?)"
    assert shown["share of peak"] == "16 %"
    assert shown["`autoprec tune` chose"] == "float32, batch 256, in 88 s"

    every = list(real_gpu.every_way(found[GPU]))
    assert len(every) == 2 + 6 + 1
    compiled = next(line for line in every if "bfloat16 compiled" in line)
    assert "| 60 ms, 64 ms |" in compiled
    assert compiled.endswith("| 16 % of bfloat16 | 16.0 GiB | 40.0 s | +7 % from visit 0 |")
    assert any("failed: no memory | - |" in line for line in every)
