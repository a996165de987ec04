"""A recipe may prefer a kernel of scaled_dot_product_attention; a CPU has flash and math."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.backends.torch.apply.attention_kernels import PreferredAttention
from autoprec.backends.torch.apply.forward_wrappers import wrappers_on
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from tests.backends.torch.operated import adam, apply

#: What importing Inductor warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.leave = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.leave(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


INPUTS = torch.linspace(-1, 1, 2 * 12 * 16).reshape(2, 12, 16)


def recipe(kernel: str, policy: Policy = Policy.FLOAT32, **more: Any) -> Recipe:
    return Recipe(policy, knobs={"attention": kernel}, **more)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kernel", "flash"), [("default", True), ("flash", True), ("math", False)])
def test_the_preferred_kernel_runs(kernel: str, flash: bool, policy: Policy) -> None:
    model = Attention()
    precision = apply(recipe(kernel, policy), model, adam(model))
    with Operators() as seen:
        precision.backward_and_step(precision.forward(INPUTS).square().mean())
    assert (FLASH in seen.names) is flash
    assert precision.report.skipped == ()
    precision.restore()
    with Operators() as seen:
        model(INPUTS)
    assert FLASH in seen.names


def test_kernels_differ_in_the_last_digits_alone() -> None:
    results = []
    for kernel in ("flash", "math"):
        model = Attention()
        output = apply(recipe(kernel), model).forward(INPUTS)
        output.square().mean().backward()
        results.append((output.detach(), model.qkv.weight.grad))
    for flash, math in zip(*results, strict=True):
        torch.testing.assert_close(flash, math, rtol=1e-4, atol=1e-6)
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_a_cpu_says_which_kernels_it_has(kernel: str) -> None:
    model = Attention()
    (skipped,) = apply(recipe(kernel), model).report.skipped
    assert skipped.reason == f"a CPU has flash and math kernels, not {kernel}"
    assert list(wrappers_on(model)) == []


def test_copies_of_a_model_prefer_it_too() -> None:
    model = Attention()
    apply(recipe("math"), model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert any(isinstance(each, PreferredAttention) for each in wrappers_on(other))
        with Operators() as seen:
            other(INPUTS)
        assert FLASH not in seen.names


@pytest.mark.slow
@pytest.mark.parametrize("order", [("flash", "math"), ("math", "flash")])
def test_compiled_code_of_one_kernel_is_not_taken_from_a_cache_for_another(
    order: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd's cache is kept between processes, and knows of no setting of the process."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = {}
    for kernel in order:
        torch.compiler.reset()
        model = Attention()
        precision = apply(recipe(kernel, compile=True), model, compile_backend="inductor")
        # A mode that looks at operators would have nothing compiled, and Inductor's patterns would
        # make flash of what "math" computes.
        with config.patch(pattern_matcher=False):
            precision.forward(INPUTS)
        with torch.profiler.profile() as seen:
            precision.forward(INPUTS).square().mean().backward()
        found[kernel] = any("flash" in event.name for event in seen.events())
    assert found == {"flash": True, "math": False}
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"] > 0
