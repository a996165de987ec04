"""What surgery leaves alone, what it changes, and that it can be undone."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from autoprec.backends.torch.apply.forward_wrappers import wrappers_on
from autoprec.backends.torch.apply.process_settings import (
    _WRITE,
    global_settings,
    process_settings_restored,
)
from autoprec.backends.torch.apply.surgeon import TorchSurgeon
from autoprec.backends.torch.apply.surgery import restore
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, Recipe
from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    apply,
    batches,
    mlp,
    same,
    train,
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
    apply(EVERYTHING, model, optimizer)
    TorchSurgeon().remove(model)
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
    before, model, inputs = readings(), mlp(), torch.ones(2, 6)
    with process_settings_restored():
        first = apply(replace(BFLOAT16, alignment=Alignment(8, ("0",))), model)
        second = apply(replace(BFLOAT16, knobs={"threads": 1}), model)
        first.restore()
        with second.autocast():
            assert model(inputs).dtype is torch.float32
        assert torch.get_num_threads() == 1
        second.restore()
        assert readings() == before
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


@pytest.mark.parametrize(("model", "optimizer"), [("no", None), (mlp(), "no")])
def test_wrong_arguments_are_named(model: Any, optimizer: Any) -> None:
    with pytest.raises(UsageError, match="str given, expected a torch"):
        apply(FLOAT32, model, *([optimizer] if optimizer else []))


# Optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [FLOAT32, FLOAT16])
def test_a_fused_optimizer_trains_the_same(recipe: Recipe) -> None:
    plain, fused = mlp(), mlp()
    data = batches(3)
    for model, knobs in ((plain, {}), (fused, {"fused_optimizer": True})):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        precision = apply(replace(recipe, knobs=knobs), model, optimizer)
        planted = (1,) if recipe is FLOAT16 else ()
        assert train(precision, model, data, overflow_at=planted) == [True, not planted, True]
    for ours, theirs in zip(weights(fused), weights(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_cannot_be_fused_is_said() -> None:
    model = mlp()
    optimizer = torch.optim.RMSprop(model.parameters())
    precision = apply(replace(FLOAT32, knobs={"fused_optimizer": True}), model, optimizer)
    assert [s.path for s in precision.report.skipped] == ["RMSprop"]


# The process -----------------------------------------------------------------------------------


def readings() -> list[Any]:
    return [
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_num_threads(),
    ]


GLOBAL = [
    ("cuda:0", Recipe(policy=Policy.TF32, knobs={"cudnn_benchmark": True})),
    ("cpu", Recipe(knobs={"implicit_bfloat16": True, "threads": 1})),
]


@pytest.mark.parametrize(("device", "recipe"), GLOBAL)
def test_global_settings_are_restored_also_after_an_error(device: str, recipe: Recipe) -> None:
    before = readings()

    def fail_inside() -> None:
        with global_settings(recipe, device) as changed:
            assert changed
            assert readings() != before
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert readings() == before


def test_tf32_is_set_for_products_and_convolutions() -> None:
    with global_settings(Recipe(policy=Policy.TF32), "cuda"):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"


def test_apply_sets_threads_for_the_process_and_says_so() -> None:
    with process_settings_restored():
        precision = apply(Recipe(knobs={"threads": 1}), mlp())
        assert torch.get_num_threads() == 1
        assert precision.report.globals_set == ("threads=1",)


@pytest.mark.parametrize(("device", "recipe"), GLOBAL)
def test_what_a_recipe_set_for_the_process_is_taken_back_with_it(
    device: str, recipe: Recipe
) -> None:
    before, surgeon = readings(), TorchSurgeon()
    with process_settings_restored():
        with surgeon.apply(recipe, model=mlp(), device=device) as precision:
            assert readings() != before
        assert readings() == before
        precision.restore()
        assert readings() == before


@pytest.mark.parametrize(("device", "recipe"), GLOBAL)
def test_applying_another_recipe_takes_back_what_the_first_set(device: str, recipe: Recipe) -> None:
    before, surgeon, model = readings(), TorchSurgeon(), mlp()
    with process_settings_restored():
        surgeon.apply(recipe, model=model, device=device)
        surgeon.apply(FLOAT32, model=model, device=device)
        assert readings() == before


def test_what_the_user_set_since_stays_theirs() -> None:
    with process_settings_restored():
        precision = TorchSurgeon().apply(Recipe(policy=Policy.TF32), model=mlp(), device="cuda:0")
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("medium")
        precision.restore()
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_models_may_need_the_same_setting(first_out: int) -> None:
    before, surgeon = readings(), TorchSurgeon()
    models = [mlp(), mlp()]
    with process_settings_restored():
        both = [surgeon.apply(GLOBAL[0][1], model=m, device="cuda:0") for m in models]
        set_by_both = readings()
        both.pop(first_out).restore()
        assert readings() == set_by_both
        both.pop().restore()
        assert readings() == before


def test_settings_of_a_model_that_is_gone_are_taken_back_by_the_next() -> None:
    before, surgeon = readings(), TorchSurgeon()
    with process_settings_restored():
        surgeon.apply(Recipe(knobs={"threads": 1}), model=mlp())
        gc.collect()
        surgeon.apply(FLOAT32, model=mlp())
        assert readings() == before


# Models that share modules ------------------------------------------------------------------------


class OnBackbone(nn.Module):
    """A head on a backbone that other models use too."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(10, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(inputs))


class Narrow(nn.Module):
    """Says in which dtype its own code computes."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = inputs.dtype
        return inputs.relu()


def test_models_that_share_a_backbone_keep_their_own_islands() -> None:
    backbone = nn.Sequential(nn.Linear(6, 10), Narrow())
    one, other = OnBackbone(backbone), OnBackbone(backbone)
    inputs = torch.ones(2, 6)
    kept = apply(replace(BFLOAT16, float32_modules=("backbone.1",)), one)
    second = apply(BFLOAT16, other)
    with kept.autocast():
        one(inputs)
    assert backbone[1].seen is torch.float32
    second.restore()
    with kept.autocast():
        one(inputs)
    assert backbone[1].seen is torch.float32
    kept.restore()
    with kept.autocast():
        one(inputs)
    assert backbone[1].seen is torch.bfloat16


def test_applying_again_to_one_of_them_replaces_its_own_islands_only() -> None:
    backbone = nn.Sequential(nn.Linear(6, 10), Narrow())
    one, other = OnBackbone(backbone), OnBackbone(backbone)
    apply(replace(BFLOAT16, float32_modules=("backbone.1",)), one)
    apply(BFLOAT16, one)
    with apply(BFLOAT16, other).autocast():
        other(torch.ones(2, 6))
    assert backbone[1].seen is torch.bfloat16


def test_a_shared_module_cannot_compute_in_two_dtypes() -> None:
    backbone = nn.Sequential(nn.Linear(6, 10), Narrow())
    one, other = OnBackbone(backbone), OnBackbone(backbone)
    first = apply(replace(BFLOAT16, float32_modules=("backbone.1",)), one)
    with pytest.raises(UsageError, match="is shared with a model that runs under"):
        apply(FLOAT16, other)
    first.restore()
    apply(FLOAT16, other)


def test_a_copy_of_an_applied_model_can_be_restored_by_itself() -> None:
    model = OnBackbone(nn.Sequential(nn.Linear(6, 10), Narrow()))
    precision = apply(replace(BFLOAT16, float32_modules=("backbone.1",)), model)
    copied = copy.deepcopy(model)
    restore(copied)
    with precision.autocast():
        copied(torch.ones(2, 6))
        model(torch.ones(2, 6))
    assert copied.backbone[1].seen is torch.bfloat16
    assert model.backbone[1].seen is torch.float32


def test_what_cannot_be_operated_on_is_said_in_one_sentence() -> None:
    with pytest.deprecated_call():
        scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(UsageError, match="TorchScript"):
        apply(BFLOAT16, scripted)
    with pytest.raises(UsageError, match="Use DistributedDataParallel, or one device"):
        apply(BFLOAT16, nn.DataParallel(mlp()))


NAMED = {
    "matmul_precision": "set_float32_matmul_precision",
    "matmul_tf32": "backends.cuda.matmul.allow_tf32",
    "cudnn_tf32": "backends.cudnn.allow_tf32",
    "onednn_tf32": "backends.mkldnn.allow_tf32",
    "cudnn_benchmark": "backends.cudnn.benchmark",
    "threads": "set_num_threads",
}


def test_the_readme_names_every_setting_of_the_process() -> None:
    readme = Path(__file__).parents[4].joinpath("README.md").read_text()
    assert set(NAMED) == set(_WRITE)
    assert [name for name in NAMED.values() if f"`torch.{name}" not in readme] == []


def test_a_float32_recipe_changes_nothing_of_the_process() -> None:
    before = readings()
    apply(FLOAT32, mlp())
    assert readings() == before


def test_settings_made_through_the_newer_api_are_restored_too() -> None:
    with process_settings_restored():
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
