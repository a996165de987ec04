"""Attention modules in evaluation mode compute under a recipe what they compute in float32."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.backends.mha import get_fastpath_enabled, set_fastpath_enabled

from tests.backends.torch.operated import BFLOAT16, FLOAT16, adam, apply

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

TOLERANCE = 0.02  # what bfloat16 rounds away here
LENGTHS = torch.tensor([6, 3, 4, 1])
PADDING = torch.arange(6) >= LENGTHS[:, None]
RAGGED = PADDING.flip(1)  # on the left, which no nested tensor is made of
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)

Call = Callable[[Any, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def fast_path_as_before() -> Iterator[None]:
    yield
    assert get_fastpath_enabled()


def layer(**kwargs: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **kwargs)


def encoder(**kwargs: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), 2, **kwargs)


def attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(16, 4, batch_first=True)


class Own(nn.TransformerEncoder):
    """A subclass with a call of its own."""

    def forward(self, pair: Any) -> torch.Tensor:  # type: ignore[override]
        x, padding = pair
        return super().forward(x, src_key_padding_mask=padding)


CASES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "encoder": (encoder, lambda m, x: m(x, src_key_padding_mask=PADDING)),
    "positional": (encoder, lambda m, x: m(x, None, PADDING)),
    "float mask": (
        encoder,
        lambda m, x: m(x, src_key_padding_mask=torch.zeros(4, 6).masked_fill(PADDING, -torch.inf)),
    ),
    "final norm": (
        lambda: encoder(norm=nn.LayerNorm(16)),
        lambda m, x: m(x, src_key_padding_mask=PADDING),
    ),
    "unchecked": (
        lambda: encoder(mask_check=False),
        lambda m, x: m(x, src_key_padding_mask=PADDING),
    ),
    "no nested tensors": (
        lambda: encoder(enable_nested_tensor=False),
        lambda m, x: m(x, src_key_padding_mask=PADDING),
    ),
    "padding on the left": (encoder, lambda m, x: m(x, src_key_padding_mask=RAGGED)),
    "causal": (encoder, lambda m, x: m(x, mask=CAUSAL, is_causal=True)),
    "causal, padded": (
        encoder,
        lambda m, x: m(x, mask=CAUSAL.isinf(), src_key_padding_mask=PADDING, is_causal=True),
    ),
    "norm first": (
        lambda: nn.TransformerEncoder(
            layer(norm_first=True, activation="gelu"), 2, enable_nested_tensor=False
        ),
        lambda m, x: m(x, src_key_padding_mask=PADDING),
    ),
    "one layer": (layer, lambda m, x: m(x, src_key_padding_mask=PADDING)),
    "attention": (attention, lambda m, x: m(x, x, x, key_padding_mask=PADDING)[0]),
    "no weights": (
        attention,
        lambda m, x: m(x, x, x, key_padding_mask=PADDING, need_weights=False)[0],
    ),
    "encoder and decoder": (
        lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True),
        lambda m, x: m(x, x, src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING),
    ),
    "subclass": (lambda: Own(layer(), 2), lambda m, x: m((x, PADDING))),
}

SEEN = {"subclass": ~PADDING}  # what it gives in padding is its own


class Model(nn.Module):
    """Attention between two linear layers, the second of which learns."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        made, self.call = CASES[name]
        self.first, self.attention, self.head = nn.Linear(12, 16), made(), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.call(self.attention, self.first(x)))
        return outputs


def inputs() -> torch.Tensor:
    return torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(1))


def distance(name: str, outputs: torch.Tensor, exact: torch.Tensor) -> float:
    seen = SEEN.get(name, torch.ones(4, 6, dtype=torch.bool))
    return float((outputs - exact)[seen].norm() / exact[seen].norm())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
def test_evaluation_through_a_recipe_gives_what_float32_gives(name: str, recipe: Any) -> None:
    model = Model(name).eval()
    with torch.no_grad():
        exact = model(inputs())
    for islands in ((), ("attention",)):
        precision = apply(replace(recipe, float32_modules=islands), model, adam(model))
        with torch.no_grad():
            ways = [precision.forward(inputs())]
            with precision.autocast():
                ways.append(model(inputs()))
            with torch.autocast("cpu", torch.bfloat16):
                ways.append(model(inputs()))
        for outputs in ways:
            assert 0 < distance(name, outputs, exact) < TOLERANCE


@pytest.mark.parametrize("name", ["encoder", "final norm", "encoder and decoder", "no weights"])
def test_a_part_frozen_in_evaluation_mode_gives_the_gradients_of_float32(name: str) -> None:
    gradients = []
    for recipe in (None, BFLOAT16):
        model = Model(name).train()
        model.attention.eval().requires_grad_(False)
        model.first.requires_grad_(False)
        if recipe is None:
            outputs = model(inputs())
        else:
            outputs = apply(recipe, model, adam(model)).forward(inputs())
        outputs.square().mean().backward()
        gradients.append(model.head.weight.grad)
    exact, low = gradients
    assert exact is not None
    assert low is not None
    assert float((low - exact).norm() / exact.norm()) < 0.02


def test_outside_autocast_the_fast_path_is_torchs_own() -> None:
    model = Model("encoder").eval()
    with torch.no_grad():
        exact = model(inputs())
        apply(BFLOAT16, model, adam(model))
        assert torch.equal(model(inputs()), exact)


def test_islands_inside_an_encoder_compute_in_evaluation_too() -> None:
    seen = []
    model = Model("encoder").eval()
    island = "attention.layers.0.linear1"
    precision = apply(replace(FLOAT16, float32_modules=(island,)), model, adam(model))
    inner = model.get_submodule(island)
    function = inner.forward

    def looked_at(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(x)
        seen.append(result.dtype)
        return result

    inner.forward = looked_at
    with torch.no_grad():
        precision.forward(inputs())
    assert seen == [torch.float32]


def test_the_switch_is_put_back_after_an_exception_and_as_it_was() -> None:
    model = Model("encoder").eval()
    precision = apply(BFLOAT16, model, adam(model))
    with pytest.raises((AssertionError, RuntimeError)), torch.no_grad():
        precision.forward(torch.randn(4, 5, 12))  # not as long as its mask
    assert get_fastpath_enabled()
    set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert precision.forward(inputs()).dtype is torch.float32
        assert not get_fastpath_enabled()
    finally:
        set_fastpath_enabled(True)


def test_threads_that_leave_in_any_order_put_the_switch_back() -> None:
    inside, seen = threading.Barrier(2), []

    class Waiting(nn.Identity):
        """Stands for a layer's dropout, which only the ordinary path calls."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.wait(timeout=60)
            seen.append(get_fastpath_enabled())
            return x

    def evaluate() -> None:
        model = Model("encoder").eval()
        model.attention.get_submodule("layers.0").dropout = Waiting()
        with torch.no_grad():
            apply(BFLOAT16, model, adam(model)).forward(inputs())

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == [False, False]


@pytest.mark.parametrize("name", ["encoder", "unchecked", "one layer", "no weights"])
def test_compiled_models_evaluate_too(name: str) -> None:
    model = Model(name).eval()
    set_fastpath_enabled(False)
    with torch.no_grad():
        exact = model(inputs())  # compiled, torch itself makes no nested tensors
    set_fastpath_enabled(True)
    recipe = replace(BFLOAT16, compile=True)
    precision = apply(recipe, model, adam(model), compile_backend="aot_eager")
    with torch.no_grad():
        assert distance(name, precision.forward(inputs()), exact) < 0.02
    for part in model.modules():
        assert getattr(part, "use_nested_tensor", True)


def test_nothing_is_left_after_restoring_and_nothing_is_put_on_other_models() -> None:
    model = Model("encoder")
    precision = apply(BFLOAT16, model, adam(model))
    assert "forward" in model.attention.__dict__
    for again in (copy.deepcopy(model.attention), pickle.loads(pickle.dumps(model.attention))):
        assert "forward" in again.__dict__
    precision.restore()
    assert not any("forward" in module.__dict__ for module in model.modules())
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    apply(BFLOAT16, plain, adam(plain))
    assert not any("forward" in module.__dict__ for module in plain)


def test_another_models_encoder_is_kept_off_it_too() -> None:
    model, teacher = nn.Linear(16, 2), _other_encoder().eval()
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    inputs = torch.randn(3, 5, 16)
    precision = apply(BFLOAT16, model)
    with torch.no_grad():
        exact = teacher(inputs, src_key_padding_mask=padding)
        for _ in range(2):
            with precision.autocast():
                outputs = teacher(inputs, src_key_padding_mask=padding)
            assert outputs.dtype is torch.float32
            assert torch.allclose(outputs[~padding], exact[~padding], atol=0.1)
    assert torch.backends.mha.get_fastpath_enabled()


def _other_encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2)
