"""What surgery leaves alone, what it changes, and that it can be undone."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from autoprec.backends.torch.apply.forward_wrappers import wrappers_on
from autoprec.backends.torch.apply.model_changes import restore
from autoprec.backends.torch.apply.process_settings import (
    process_settings_restored,
)
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, Recipe
from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT32,
    apply,
    mlp,
    process_readings,
    same,
    weights,
)

pytestmark = pytest.mark.torch


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.volume = nn.Parameter(torch.ones(1, 1, 1, 1, 2))
        self.head = nn.Linear(5, 3)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.layout = images.is_contiguous(memory_format=torch.channels_last)
        return self.softmax(self.head(self.norm(self.conv(images)).mean((2, 3))))


EVERYTHING = Recipe(
    policy=Policy.MIXED_BFLOAT16,
    float32_modules=("norm",),
    alignment=Alignment(8, ("conv", "head")),
    memory_format="channels_last",
    compile=True,
    knobs={"fused_optimizer": True},
)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, precision: Any = None) -> None:
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    loss = model(images).square().sum()
    if precision is None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        precision.backward(loss)
        precision.step()


def test_parameters_names_shapes_and_state_stay_what_they_were() -> None:
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    before = dict(model.named_parameters())
    state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    apply(EVERYTHING, model, optimizer)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[0][key])
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, state[1]["state"][index][key])


@pytest.mark.parametrize("recipe", [EVERYTHING, replace(EVERYTHING, policy=Policy.FLOAT32)])
def test_checkpoints_travel_both_ways_optimizer_included(recipe: Recipe) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = ConvNet()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    plain, plain_optimizer = fresh()
    step(plain, plain_optimizer)
    operated_on, its_optimizer = fresh()
    precision = apply(recipe, operated_on, its_optimizer)
    operated_on.load_state_dict(plain.state_dict())
    its_optimizer.load_state_dict(plain_optimizer.state_dict())
    assert same(weights(plain), weights(operated_on))
    assert its_optimizer.param_groups[0]["fused"]
    step(operated_on, its_optimizer, precision)
    plain.load_state_dict(operated_on.state_dict())
    plain_optimizer.load_state_dict(its_optimizer.state_dict())
    assert same(weights(plain), weights(operated_on))
    step(plain, plain_optimizer)


def test_everything_can_be_undone() -> None:
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(2, 3, 6, 6)
    model.eval()
    expected = model(images)
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    apply(EVERYTHING, model, optimizer).restore()
    assert torch.equal(model(images), expected)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert model._compiled_call_impl is None
    assert model.conv.weight.is_contiguous()
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == group


def test_applying_again_undoes_the_earlier_surgery_first() -> None:
    model = mlp()
    apply(replace(BFLOAT16, float32_modules=("0",)), model)
    first = model.forward
    apply(replace(BFLOAT16, float32_modules=("0",)), model)
    assert len(list(_chain(model.forward))) == len(list(_chain(first)))
    apply(FLOAT32, model)
    assert all("forward" not in module.__dict__ for module in model.modules())


def _chain(forward: Any) -> Any:
    while forward is not None:
        yield forward
        forward = getattr(forward, "inner", None)


def test_who_was_followed_by_another_recipe_takes_nothing_of_that_back() -> None:
    before, model, inputs = process_readings(), mlp(), torch.ones(2, 6)
    with process_settings_restored():
        first = apply(replace(BFLOAT16, alignment=Alignment(8, ("0",))), model)
        second = apply(replace(BFLOAT16, knobs={"threads": 1}), model)
        first.restore()
        with second.autocast():
            assert model(inputs).dtype is torch.float32
        assert torch.get_num_threads() == 1
        second.restore()
        assert process_readings() == before
    assert not any(wrapper for module in model.modules() for wrapper in wrappers_on(module))


def test_a_forward_somebody_else_had_put_there_is_kept() -> None:
    model = mlp()
    own = lambda inputs: nn.Sequential.forward(model, inputs) + 1  # noqa: E731
    model.forward = own
    apply(BFLOAT16, model)
    inputs = torch.ones(1, 6)
    assert torch.equal(model(inputs), own(inputs))
    restore(model)
    assert model.forward is own


def test_the_models_signature_can_still_be_read() -> None:
    model = ConvNet()
    apply(BFLOAT16, model)
    assert list(inspect.signature(model.forward).parameters) == ["images"]


def test_channels_last_lays_out_four_dimensional_weights_and_inputs() -> None:
    model = ConvNet()
    before = [p.detach().clone() for p in model.parameters()]
    apply(replace(FLOAT32, memory_format="channels_last"), model)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert same(before, weights(model))
    model(torch.randn(2, 3, 6, 6))
    assert model.layout


@pytest.mark.parametrize("own_fused", [False, True])
@pytest.mark.parametrize("knobs", [{}, {"fused_optimizer": True}])
def test_optimizer_state_follows_the_layout_of_its_weights(
    knobs: dict[str, bool], own_fused: bool
) -> None:
    """Fused kernels read weights and state as flat memory: other strides, silently wrong steps."""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=own_fused or None)

    plain, plain_optimizer = fresh()
    model, optimizer = fresh()
    step(plain, plain_optimizer)
    saved = copy.deepcopy([plain.state_dict(), plain_optimizer.state_dict()])
    step(model, optimizer)
    recipe = replace(FLOAT32, memory_format="channels_last", knobs=knobs)

    def together() -> None:
        for ours, theirs in zip(weights(model), weights(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    for use in (None, saved, None):  # state from before apply, loaded after it, after removal
        precision = apply(recipe, model, optimizer)
        if use is not None:
            for part, other, state in zip(
                (model, optimizer), (plain, plain_optimizer), saved, strict=True
            ):
                part.load_state_dict(copy.deepcopy(state))
                other.load_state_dict(copy.deepcopy(state))
        for _ in range(2):
            step(model, optimizer, precision)
            step(plain, plain_optimizer)
        together()
        kept = optimizer.state_dict()["state"].values()
        assert all(v.is_contiguous() for state in kept for v in state.values())
        restore(model)
        step(model, optimizer)
        step(plain, plain_optimizer)
        together()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_in_place_keeps_names_and_results(backend: str) -> None:
    torch._dynamo.reset()
    plain, compiled = mlp(), mlp()
    recipe = replace(BFLOAT16, compile=True, float32_modules=("0",))
    precision = apply(recipe, compiled, compile_backend=backend)
    reference = apply(replace(recipe, compile=False), plain)
    assert precision.report.compiled
    inputs = torch.randn(4, 6)
    with precision.autocast():
        result = compiled(inputs)
    with reference.autocast():
        expected = plain(inputs)
    torch.testing.assert_close(result, expected)
    assert list(compiled.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("recipe", [FLOAT32, BFLOAT16])
def test_torchs_own_containers_are_compiled_as_one_graph(recipe: Recipe) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = mlp()
    apply(replace(recipe, compile=True), model, compile_backend=counter)
    model(torch.ones(1, 6))
    assert counter.frame_count == 1
    assert counter.op_count >= 3


def test_removing_and_applying_again_recompiles() -> None:
    torch._dynamo.reset()
    model = mlp()
    inputs = torch.randn(4, 6)
    expected = model(inputs)
    precision = apply(replace(BFLOAT16, compile=True), model)
    with precision.autocast():
        low = model(inputs)
    assert not torch.equal(low, expected)
    precision = apply(replace(FLOAT32, compile=True), model)
    with precision.autocast():
        torch.testing.assert_close(model(inputs), expected)
    precision = apply(replace(BFLOAT16, compile=True, float32_modules=("", "0", "2")), model)
    with precision.autocast():
        torch.testing.assert_close(model(inputs), expected)


def test_a_users_own_compilation_comes_back() -> None:
    model = mlp()
    model.compile(backend="eager")
    own = model._compiled_call_impl
    apply(replace(FLOAT32, compile=True), model)
    assert model._compiled_call_impl is not own
    restore(model)
    assert model._compiled_call_impl is own


def test_a_copy_or_a_saved_model_carries_its_surgery_and_its_own_weights() -> None:
    model = mlp()
    precision = apply(replace(BFLOAT16, float32_modules=("2",)), model)
    inputs = torch.randn(4, 6)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with precision.autocast():
            assert torch.equal(copied(inputs), model(inputs))
            with torch.no_grad():
                copied[2].bias.add_(1.0)
            assert not torch.equal(copied(inputs), model(inputs))
        restore(copied)
        assert all("forward" not in module.__dict__ for module in copied.modules())


def test_data_parallel_is_refused_with_a_way_out() -> None:
    with pytest.raises(UsageError, match="Use DistributedDataParallel"):
        apply(BFLOAT16, nn.DataParallel(mlp()))


def test_an_already_compiled_wrapper_is_operated_on_inside() -> None:
    torch._dynamo.reset()
    inner = mlp()
    wrapped = torch.compile(inner, backend="eager")
    precision = apply(replace(BFLOAT16, float32_modules=("0",)), wrapped)
    with precision.autocast():
        assert wrapped(torch.ones(1, 6)).dtype is torch.float32
    assert precision.report.islands == ("0",)


def test_16_bit_weights_are_reported() -> None:
    with pytest.warns(AutoprecWarning, match="16-bit already"):
        precision = apply(FLOAT32, mlp().bfloat16())
    assert precision.report.warnings


def test_weights_that_no_policy_casts_are_reported() -> None:
    with pytest.warns(AutoprecWarning, match=r"4 parameters are float64 \(0.weight, ...\)"):
        precision = apply(BFLOAT16, mlp().double())
    inputs = torch.ones(1, 6, dtype=torch.float64)
    assert precision.forward(inputs).dtype is torch.float64
    assert not apply(FLOAT32, mlp().double()).report.warnings


@pytest.mark.parametrize(("model", "optimizer"), [("no", None), (mlp(), "no")])
def test_wrong_arguments_are_named(model: Any, optimizer: Any) -> None:
    with pytest.raises(UsageError, match="str given, expected a torch"):
        apply(FLOAT32, model, *([optimizer] if optimizer else []))


def test_what_cannot_be_operated_on_is_said_in_one_sentence() -> None:
    with pytest.deprecated_call():
        scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(UsageError, match="TorchScript"):
        apply(BFLOAT16, scripted)
    with pytest.raises(UsageError, match="Use DistributedDataParallel, or one device"):
        apply(BFLOAT16, nn.DataParallel(mlp()))
    engine = type("DeepSpeedEngine", (nn.Module,), {})()
    with pytest.raises(UsageError, match=r"a DeepSpeedEngine was given.*export PROFILE --to deep"):
        apply(BFLOAT16, engine)
