"""A stack of equal blocks is found, and compiled once for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.torch.apply.equal_blocks import equal_blocks
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, Recipe
from tests.backends.torch.operated import adam, apply

#: What torch.compile itself reads.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

WIDTH, DEPTH = 32, 10


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.leave(x))


def stack(depth: int = DEPTH) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Block() for _ in range(depth)))


class Counting:
    """A compiler that runs what it is given as it is, and counts graphs and their operators."""

    def __init__(self) -> None:
        self.operators: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called = [n for n in graph.graph.nodes if n.op.startswith("call")]
        self.operators.append(len(called))
        return graph.forward


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"blocks.{number}" for number in numbers)


def test_blocks_that_compile_alike_are_found() -> None:
    assert equal_blocks(stack()) == names(*range(DEPTH))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)
    assert equal_blocks(encoder) == tuple(f"layers.{number}" for number in range(4))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (stack(3), ()),
        (nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), ()),
        (Stack(*(Block(scale=number) for number in range(6))), ()),
        (Stack(Block(0.5), *(Block() for _ in range(4))), names(1, 2, 3, 4)),
        (nn.Sequential(stack(4), nn.Linear(WIDTH, 100 * WIDTH)), ()),
    ],
    ids=["few", "layers alone", "other numbers", "all but one", "a small part of the model"],
)
def test_what_is_no_stack_of_equal_blocks_is_left_whole(
    model: nn.Module, found: tuple[str, ...]
) -> None:
    assert equal_blocks(model) == found


def test_a_frozen_block_is_not_equal_to_others() -> None:
    model = stack(6)
    model.blocks[0].requires_grad_(False)
    assert equal_blocks(model) == names(1, 2, 3, 4, 5)


POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)
BY_BLOCK = {"compile_scope": "blocks"}


def trained(recipe: Recipe, backend: Any, model: nn.Module | None = None) -> tuple[Any, nn.Module]:
    """Two updates of a model under a recipe; what `apply` returned, and the model."""
    torch.compiler.reset()
    model = stack() if model is None else model
    precision = apply(recipe, model, adam(model), compile_backend=backend)
    inputs = torch.linspace(-1, 1, 48).reshape(6, 8)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for _ in range(2):
            precision.backward_and_step(precision.forward(inputs).square().mean())
    return precision, model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kernel", ["default", "math"])
def test_one_block_is_compiled_for_all_ten(policy: Policy, kernel: str) -> None:
    whole, block = Counting(), Counting()
    trained(Recipe(policy, compile=True, knobs={"attention": kernel}), whole)
    trained(Recipe(policy, compile=True, knobs={"attention": kernel, **BY_BLOCK}), block)
    assert (len(whole.operators), len(block.operators)) == (1, 1)
    assert block.operators[0] < whole.operators[0] / (DEPTH - 4)


@pytest.mark.parametrize(
    "more",
    [
        {"float32_modules": tuple(f"blocks.{n}.norm" for n in range(DEPTH))},
        {"float32_modules": ("blocks.3.norm",)},
        {"alignment": Alignment(5, tuple(f"blocks.{n}.up" for n in range(DEPTH)))},
    ],
    ids=["islands in all", "an island in one", "padded"],
)
def test_blocks_with_changed_parts_are_compiled_with_the_whole_model(more: dict[str, Any]) -> None:
    """Dynamo would compile each of them anew, and give up after eight."""
    counter = Counting()
    recipe = Recipe(Policy.MIXED_BFLOAT16, compile=True, knobs=BY_BLOCK, **more)
    precision, _ = trained(recipe, counter)
    assert len(counter.operators) == 1
    (skipped,) = precision.report.skipped
    assert skipped.reason.startswith("islands, padding or float8 in its blocks would compile")


def test_blocks_compute_what_the_whole_model_does_and_all_of_it_can_be_undone() -> None:
    recipe = Recipe(compile=True, knobs=BY_BLOCK)
    _, eager = trained(Recipe(), "eager")
    precision, model = trained(recipe, "eager")
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own, other)
    assert precision.report.skipped == ()
    blocks = [model.get_submodule(path) for path in equal_blocks(model)]
    assert all(block._compiled_call_impl is not None for block in blocks)
    assert model._compiled_call_impl is None
    precision.restore()
    assert all(block._compiled_call_impl is None for block in blocks)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_model_without_equal_blocks_is_compiled_as_a_whole_and_says_so() -> None:
    counter = Counting()
    precision, _ = trained(Recipe(compile=True, knobs=BY_BLOCK), counter, stack(2))
    assert len(counter.operators) == 1
    (skipped,) = precision.report.skipped
    assert "no equal blocks" in skipped.reason


def test_a_users_own_compiled_block_is_theirs_again() -> None:
    model = stack()
    model.blocks[0].compile(backend="eager")
    own = model.blocks[0]._compiled_call_impl
    precision, _ = trained(Recipe(compile=True, knobs=BY_BLOCK), "eager", model)
    precision.restore()
    assert model.blocks[0]._compiled_call_impl is own


def doubled(module: nn.Module, given: Any, result: Tensor) -> Tensor:
    return 2 * result


def test_a_block_with_a_hook_inside_is_not_equal_to_others() -> None:
    """Dynamo guards on no hooks: the graph of another block would leave this one's out."""
    models = []
    for recipe in (Recipe(), Recipe(compile=True, knobs=BY_BLOCK)):
        model = stack(6)
        model.blocks[0].up.register_forward_hook(doubled)
        model.blocks[1].register_forward_hook(doubled)  # it runs outside of the block's graph
        model.blocks[4].up.register_forward_pre_hook(lambda module, given: (-given[0],))
        assert equal_blocks(model) == names(1, 2, 3, 5)
        models.append(trained(recipe, "eager", model)[1])
    for own, other in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(own, other)


def test_blocks_with_the_same_hook_inside_are_equal() -> None:
    model = stack(5)
    for block in model.blocks:
        block.up.register_forward_hook(doubled)
    assert equal_blocks(model) == names(*range(5))


def test_a_forward_of_a_blocks_own_is_called() -> None:
    """Other code may have put one on the module itself."""
    models = []
    for compiled in (True, False):
        model = stack(5)
        own = model.blocks[2]
        own.forward = lambda x, own=own: Block.forward(own, -x)
        recipe = Recipe(compile=True, knobs=BY_BLOCK) if compiled else Recipe()
        models.append(trained(recipe, "eager", model)[1])
    for own, other in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(own, other)
