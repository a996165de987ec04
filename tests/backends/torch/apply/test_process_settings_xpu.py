"""TF32 on Intel's GPUs, where torch has a switch of its own for it.

No such build is here: its switch is the fixture's, the rest is torch's.
"""

from __future__ import annotations

import pytest
import torch

from autoprec.backends.torch.apply.process_settings import (
    process_settings_restored,
    set_process_settings,
)
from autoprec.backends.torch.measure.matmul_timing import TorchArithmetic
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.backends.torch.train.task_precision import rounded_products
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import Recipe
from tests.backends.torch.operated import FLOAT32, mlp

pytestmark = pytest.mark.torch


@pytest.fixture
def intel(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The switch that a build for Intel's GPUs has, and others only warn of."""
    kept = {"allow_tf32": False}
    prop = torch.backends.ContextProp(
        lambda: kept["allow_tf32"], lambda value: kept.update(allow_tf32=value)
    )
    monkeypatch.setattr(type(torch.backends.mkldnn), "allow_tf32", prop)
    return kept


def test_on_an_intel_gpu_tf32_is_onednns_switch(intel: dict[str, bool]) -> None:
    others = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    with process_settings_restored():
        changed = set_process_settings(Recipe(policy=Policy.TF32), "xpu:0")
        assert intel["allow_tf32"]
        assert others == (
            torch.backends.cuda.matmul.allow_tf32,
            torch.get_float32_matmul_precision(),
        )
        assert changed == ("onednn_tf32=True",)
    assert not intel["allow_tf32"]
    precision = TorchSurgeon().apply(Recipe(policy=Policy.TF32), model=mlp(), device="xpu:0")
    assert intel["allow_tf32"]
    precision.restore()
    assert not intel["allow_tf32"]


def test_on_an_intel_gpu_float32_leaves_onednns_switch_alone(intel: dict[str, bool]) -> None:
    intel["allow_tf32"] = True
    with process_settings_restored():
        changed = set_process_settings(FLOAT32, "xpu:0")
        assert intel["allow_tf32"]
        assert changed == ()
    assert rounded_products("xpu") == "TF32"
    intel["allow_tf32"] = False
    assert rounded_products("xpu") == ""


def test_a_build_without_the_switch_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(torch.backends.mkldnn), "allow_tf32")
    assert rounded_products("xpu") == ""
    with TorchSurgeon().apply(Recipe(knobs={"threads": 1}), model=mlp()):
        assert torch.get_num_threads() == 1


def test_intels_products_are_timed_with_and_without_tf32(
    intel: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randn", lambda *size, device: torch.ones(size))
    arithmetic, found = TorchArithmetic(torch.device("xpu:0")), {}
    for dtype in (DType.TF32, DType.FLOAT32):
        arithmetic.prepare(dtype, 2)
        found[dtype] = intel["allow_tf32"]
    assert found == {DType.TF32: True, DType.FLOAT32: False}
