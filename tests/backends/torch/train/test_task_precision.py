"""Settings that round float32 products are part of what a task is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.backends.torch.train.task_precision import (
    computes_in,
    noted_autocasts,
    rounded_convolutions,
)
from tests.backends.torch.described import facts, small
from tests.fork_server import ForkServer

pytestmark = pytest.mark.torch


ROUNDED = [
    ("cpu", "torch.set_float32_matmul_precision('medium')", "bfloat16"),
    ("cpu", "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", "bfloat16"),
    ("cpu", "torch.backends.fp32_precision = 'bf16'", "bfloat16"),
    ("cuda", "torch.set_float32_matmul_precision('high')", "TF32"),
    ("cuda", "torch.set_float32_matmul_precision('medium')", "TF32"),
    ("cuda", "torch.backends.cuda.matmul.allow_tf32 = True", "TF32"),
    ("cuda", "torch.backends.cuda.matmul.fp32_precision = 'tf32'", "TF32"),
    ("cuda", "torch.backends.fp32_precision = 'tf32'", "TF32"),
]
PLAIN = [
    ("cpu", "torch.backends.cuda.matmul.allow_tf32 = True"),
    ("cuda", "torch.backends.cudnn.allow_tf32 = True"),
    ("cuda", "torch.backends.cuda.matmul.fp32_precision = 'ieee'"),
    ("mps", "torch.set_float32_matmul_precision('high')"),
    ("xpu", "torch.set_float32_matmul_precision('high')"),
    ("cuda", "pass"),
]


def test_settings_that_round_float32_products_are_told(forked: ForkServer, tmp_path: Path) -> None:
    """Each in a process of its own: what the newer settings change, nothing puts back exactly."""
    script = """
import os, torch
from autoprec.backends.torch.train.task_precision import low_precision
for device_type, statement in %r:
    child = os.fork()
    if not child:
        exec(statement)
        print(low_precision(torch.nn.Linear(1, 1), set(), device_type), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    cases = [case[:2] for case in (*ROUNDED, *PLAIN)]
    (tmp_path / "script.py").write_text(script % cases)
    ran = forked.run(tmp_path / "script.py")
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert len(said) == len(cases)
    for (_, statement, rounded), line in zip(ROUNDED, said, strict=False):
        assert f"rounded to {rounded} " in line, statement
    assert said[len(ROUNDED) :] == [""] * len(PLAIN)


def test_a_rounded_baseline_is_part_of_the_facts() -> None:
    with process_settings_restored():
        torch.set_float32_matmul_precision("medium")
        assert "apply_profile leaves the setting" in facts().low_precision
    assert facts().low_precision == ""


def test_convolutions_are_rounded_by_default_on_cuda_alone() -> None:
    with process_settings_restored():
        assert rounded_convolutions("cuda") == "TF32"  # PyTorch begins with that
        torch.backends.cudnn.allow_tf32 = False
        assert rounded_convolutions("cuda") == ""
        torch.backends.cudnn.allow_tf32 = True
        assert rounded_convolutions("cuda") == "TF32"
    assert {rounded_convolutions(kind) for kind in ("cpu", "xpu", "mps")} == {""}


def test_weights_that_train_in_16_bits_are_named_by_their_dtype() -> None:
    def batches(size: int) -> Iterator[Any]:
        while True:
            yield torch.randn(size, 4).bfloat16(), torch.randn(size, 1)

    assert (
        facts(build_model=lambda: small().bfloat16(), build_data=batches).weights_in == "bfloat16"
    )
    assert facts().weights_in == ""


def test_weights_in_float64_are_told() -> None:
    def batches(size: int) -> Iterator[Any]:
        while True:
            yield torch.randn(size, 4).double(), torch.randn(size, 1).double()

    told = facts(build_model=lambda: small().double(), build_data=batches).low_precision
    assert "parameters are float64" in told


def test_adapters_on_frozen_16_bit_weights_are_no_float32() -> None:
    adapted = nn.Sequential(nn.Linear(8, 8).bfloat16().requires_grad_(False), nn.Linear(8, 1))
    assert computes_in(adapted, {}) == "bfloat16"
    assert computes_in(adapted[1], {}) == ""


class OwnAutocast(nn.Module):
    """Its body runs in an autocast of its own, its head does not."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, width), nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            x = self.body(x)
        return self.head(x.float()).mean(-1, keepdim=True)


@pytest.mark.parametrize(("outputs", "own"), [(1, "float16"), (40, "")])
def test_a_model_that_opens_autocast_around_most_of_itself_is_no_float32(
    outputs: int, own: str
) -> None:
    model = OwnAutocast(8, outputs)
    with noted_autocasts(model, "cpu") as autocasts:
        model(torch.randn(2, 4))
    assert computes_in(model, autocasts) == own
    described = facts(build_model=lambda: OwnAutocast(8, outputs))
    assert described.weights_in == own
    assert "opens autocast itself (seen in body)" in described.low_precision
