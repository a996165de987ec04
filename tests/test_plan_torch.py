"""Plans of real models from the command line: what a GPU that is not here may bring."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import remember_products

from autoprec.cli import main
from autoprec.measurement_cache import FOLDER_VARIABLE

Planned = Callable[..., str]

SMALL_IMAGES = """
import torch
from torch import nn

def build_model():
    convolutions = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()]
    convolutions += [nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 22 * 22, 10)]
    return nn.Sequential(*convolutions)

def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))

loss_fn = nn.functional.cross_entropy
BATCH_SIZE = {batch}
"""
WIDE = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))

def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 512), torch.randn(batch_size, 512)

loss_fn = nn.functional.mse_loss
BATCH_SIZE = {batch}
"""

RAGGED = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

def build_data(batch_size):
    for step in range(70):
        x = torch.randn(batch_size, 50 if step >= {long_from} else 2, 8)
        yield x, x.sum(-1, keepdim=True)

loss_fn = nn.functional.mse_loss
BATCH_SIZE = 16
"""


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    """Return what the command prints of a task on a device."""

    def plan(text: str, device: str, *words: str) -> str:
        task = tmp_path / "task.py"
        task.write_text(text, encoding="utf-8")
        # a file of the same size, written in the same second, would be taken for the one before
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        assert main(["tune", str(task), "--plan", "--device", device, *words]) == 0
        assert {path.name for path in tmp_path.iterdir()} <= {"task.py", "__pycache__"}
        return capsys.readouterr().out

    return plan


def expected(text: str) -> str:
    """What is said of the one batch there is."""
    (line,) = [line for line in text.splitlines() if line.startswith("expectation: ")]
    return line


def test_three_convolutions_on_a_v100_are_bound_by_launches(planned: Planned) -> None:
    said = expected(planned(SMALL_IMAGES.format(batch=16), "v100"))
    assert "nothing is to be expected" in said
    assert "launching" in said


def test_many_small_images_on_a_v100_are_bound_by_memory(planned: Planned) -> None:
    plan = json.loads(planned(SMALL_IMAGES.format(batch=256), "v100", "--json"))
    float32, mixed = [e for e in plan["estimates"] if e["batch"] == 256]
    assert mixed["policy"] == "mixed_float16"
    assert float32["memory_seconds"] > 0.3 * float32["arithmetic_seconds"]
    assert 1 < mixed["at_most"] < 5  # of the 8 that the peaks promise


def test_a_p100_has_no_tensor_cores(planned: Planned) -> None:
    said = expected(planned(WIDE.format(batch=256), "p100"))
    assert "nothing is to be expected: float16 is emulated (no Tensor Cores" in said


def test_wide_layers_on_an_a100_may_gain(planned: Planned) -> None:
    said = planned(WIDE.format(batch=1024), "a100")
    assert "little" not in expected(said)
    assert "by mixed_bfloat16" in expected(said)
    assert "every matrix dimension is a multiple of" in said


@pytest.mark.slow
def test_on_a_cpu_that_was_measured_before_its_own_figures_count(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = ("--policies", "float32,mixed_bfloat16")
    wide = WIDE.format(batch=1024)
    assert "cannot be said" in expected(planned(wide, "cpu", *words))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
    remember_products("torch")
    said = expected(planned(wide, "cpu", *words))
    assert "cannot be said" not in said
    assert "by mixed_bfloat16: float32 takes at least" in said


@pytest.mark.slow
def test_memory_is_that_of_the_longest_batches_wherever_they_are(planned: Planned) -> None:
    def needed(long_from: int) -> float:
        plan = json.loads(planned(RAGGED.format(long_from=long_from), "a100", "--json"))
        return float(plan["memory"]["bytes_per_sample"])

    always = needed(0)
    assert needed(66) == pytest.approx(always, rel=0.1)
    assert needed(70) < 0.1 * always
