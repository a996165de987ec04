"""Linear layers in float8: near float32, undone without a trace, only where they may be."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.torch.apply import float8_linear as float8
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.float8 import SMALLEST_WIDTH
from tests.backends.torch.operated import adam, apply, same, weights

#: Dynamo instantiates the class itself where it traces an autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

RECIPE = Recipe(Policy.MIXED_BFLOAT16, compile=True, knobs={"float8": True})
WIDE = SMALLEST_WIDTH


def net(width: int = WIDE) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0)),
    )


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take layers of 32 for wide ones, to be quick."""
    monkeypatch.setattr("autoprec.core.speed.float8.SMALLEST_WIDTH", 32)


def away(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().float() - wanted.detach()).norm() / wanted.detach().norm())


def results(layer: nn.Linear, inputs: Tensor, gradient: Tensor, *, in_float8: bool) -> list[Tensor]:
    """The output, and the gradients of the input, the weight and the bias."""
    layer.zero_grad()
    inputs = inputs.clone().requires_grad_()
    if in_float8:
        with torch.autocast("cpu", torch.bfloat16):
            output = float8.float8_linear(inputs, layer.weight, layer.bias, native=False)
        assert output.dtype is torch.bfloat16
    else:
        output = layer(inputs)
    output.backward(gradient.to(output.dtype))
    found = (inputs.grad, layer.weight.grad, layer.bias.grad)
    assert all(each is not None and each.dtype is torch.float32 for each in found)
    return [output, *(each.clone() for each in found if each is not None)]


@pytest.mark.parametrize("rows", [(64,), (3, 7)])
def test_a_wide_layer_and_its_gradients_are_near_those_of_float32(rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDE, WIDE)
    inputs, gradient = torch.randn(*rows, WIDE), 1e-4 * torch.randn(*rows, WIDE)
    wanted = results(layer, inputs, gradient, in_float8=False)
    found = results(layer, inputs, gradient, in_float8=True)
    assert [each.shape for each in found] == [each.shape for each in wanted]
    errors = [away(*pair) for pair in zip(found, wanted, strict=True)]
    assert all(error < 0.1 for error in errors)
    assert all(error > 0.01 for error in errors[:3])  # it is not bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cpu_computes_what_the_products_of_float8_give(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, left_scale = float8._rounded(torch.randn(32, 48), dtype)
    right, right_scale = float8._rounded(1e-3 * torch.randn(48, 64), torch.float8_e4m3fn)
    scales = left_scale, right_scale
    native = float8._product(left, right, scales, native=True)
    emulated = float8._product(left, right, scales, native=False)
    torch.testing.assert_close(native, emulated, rtol=2**-7, atol=0.0)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_computes_the_same() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    inputs, gradient = torch.randn(32, 64), torch.randn(32, 64)
    ours = results(layer, inputs, gradient, in_float8=True)
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    theirs = convert_to_float8_training(nn.Sequential(layer), config=config)
    layer.zero_grad()
    given = inputs.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = theirs(given)
    output.backward(gradient.to(output.dtype))
    found = (output, given.grad, layer.weight.grad)
    for own, other in zip(ours, found, strict=False):
        assert away(own, other.float()) < 0.01  # it rounds the output once less


@pytest.mark.parametrize("value", [0.0, 1e-38, torch.inf, torch.nan])
def test_zeros_stay_zeros_and_what_is_not_finite_shows(value: float) -> None:
    layer, inputs = nn.Linear(16, 16, bias=False), torch.zeros(4, 16)
    inputs[0, 0] = value
    with torch.no_grad():
        found = float8.float8_linear(inputs, layer.weight, None, native=False)
    if abs(value) < 1.0:
        assert found.eq(0.0).all()
    else:
        assert not found.isfinite().all()


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    weight, inputs = torch.randn(16, 32, requires_grad=True), torch.randn(4, 32, requires_grad=True)
    output = float8.float8_linear(inputs, weight, None, native=False)
    (gradient,) = torch.autograd.grad(output.float().square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_restoring_leaves_no_trace_and_checkpoints_are_those_of_the_model(narrow: None) -> None:
    plain, model = net(32), net(32)
    assert not any("forward" in vars(module) for module in model.modules())
    parameters = list(model.parameters())
    precision = apply(RECIPE, model, adam(model))
    assert precision.report.float8 == ("2", "4")
    assert sum("forward" in vars(module) for module in model.modules()) == 3  # and the root
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    plain.load_state_dict(copy.deepcopy(model).state_dict())
    model.load_state_dict(plain.state_dict())
    precision.restore()
    assert not any("forward" in vars(module) for module in model.modules())
    inputs = torch.randn(4, 16)
    assert torch.equal(model(inputs), plain(inputs))
    assert same(weights(model), weights(plain))


def test_all_of_a_model_is_compiled_with_it(narrow: None) -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = net(32)
    precision = apply(RECIPE, model, adam(model), compile_backend=counting)
    plain = net(32)(inputs := torch.randn(4, 16))
    with precision.autocast():
        loss = model(inputs)
    assert len(graphs) == 1
    assert 0.002 < away(loss, plain) < 0.1
    assert torch.equal(model(inputs), plain)  # outside autocast it is float32's


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(32, 32), nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.odd, self.kept, self.wide = nn.Linear(32, 40), nn.Linear(32, 32), nn.Linear(32, 48)
        self.sixteen_bit = nn.Linear(32, 32).bfloat16()
        self.last = nn.Linear(32, 32)


def test_layers_that_must_not_be_touched_are_not(narrow: None) -> None:
    model = Routed()
    assert float8.float8_layers(model) == ("kept", "wide")
    paths, skipped = float8.use_float8(model, ("kept",), torch.device("cpu"))
    assert (paths, skipped) == (("wide",), ())


def test_a_model_without_wide_layers_stays_in_bfloat16_and_it_is_said() -> None:
    model = net(64)
    report = apply(RECIPE, model).report
    assert report.float8 == ()
    (skipped,) = report.skipped
    assert (skipped.what, skipped.reason) == (
        "float8",
        "this model has no linear layer that is wide enough",
    )


def test_a_device_is_asked_whether_it_multiplies_so_and_rightly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, device = float8.float8_obstacle.__wrapped__, torch.device("cpu")
    assert ask(device) == ""
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **_: torch.full((16, 16), torch.nan))
    assert ask(device) == "cpu computes such products wrong, by nan of their size"

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("needs compute capability\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert ask(device) == "cpu refuses such products: needs compute capability"
