"""Islands: a module's own code in float32, its children's products still fast."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.backends.torch.apply.model_changes import restore
from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError
from tests.backends.torch.operated import BFLOAT16, FLOAT32, apply, float16

pytestmark = pytest.mark.torch


class Spies(nn.Module):
    """Remembers the dtype of what came in, and in which dtype a product would run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def note(self, inputs: torch.Tensor) -> None:
        product = torch.ones(1, 1) @ torch.ones(1, 1)
        self.seen.append((inputs.dtype, product.dtype))


class Leaf(Spies):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.note(inputs)
        return self.linear(inputs)


class Container(Spies):
    """Own code before and after its children, as residual blocks and hand-written norms have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Leaf()
        self.blocks = nn.ModuleList([Leaf()])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        self.note(hidden)
        return self.blocks[0](hidden * hidden) + hidden


class Model(Spies):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Container()
        self.head = Leaf()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.note(inputs)
        return self.head(self.inner(inputs))


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def with_islands(*paths: str, policy: Recipe = BFLOAT16) -> Recipe:
    return replace(policy, float32_modules=paths)


def dtypes(model: Model) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    return {path: m.seen[-1] for path, m in model.named_modules() if isinstance(m, Spies)}


LOW, FULL = torch.bfloat16, torch.float32
INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(4))


def run(recipe: Recipe, model: Model) -> torch.Tensor:
    precision = apply(recipe, model)
    with precision.autocast():
        return model(INPUTS)


def test_the_own_code_is_float32_and_the_children_go_back_to_autocast() -> None:
    model = model_of()
    run(with_islands("inner"), model)
    assert dtypes(model) == {
        "": (FULL, LOW),
        "inner": (FULL, FULL),
        "inner.first": (FULL, LOW),
        "inner.blocks.0": (FULL, LOW),
        "head": (FULL, LOW),
    }


def test_a_leaf_island_raises_its_inputs_and_leaves_its_neighbours_alone() -> None:
    model = model_of()
    run(with_islands("head"), model)
    seen = dtypes(model)
    assert seen["head"] == (FULL, FULL)
    assert seen["inner"] == (LOW, LOW)


def test_an_island_inside_an_island_and_a_root_island() -> None:
    model = model_of()
    run(with_islands("", "inner.first"), model)
    assert dtypes(model) == {
        "": (FULL, FULL),
        "inner": (FULL, LOW),  # it notes what its first child, an island, returned
        "inner.first": (FULL, FULL),
        "inner.blocks.0": (FULL, LOW),
        "head": (FULL, LOW),
    }


@pytest.mark.parametrize("policy", [BFLOAT16, float16()])
def test_every_module_an_island_is_float32(policy: Recipe) -> None:
    reference = model_of()
    everything = tuple(path for path, _ in reference.named_modules() if path != "inner.blocks")
    result = run(with_islands(*everything, policy=policy), model_of())
    assert torch.equal(result, reference(INPUTS))


def test_evaluation_without_autocast_is_untouched() -> None:
    model = model_of()
    apply(with_islands("inner"), model)
    assert torch.equal(model(INPUTS), model_of()(INPUTS))
    assert all(seen == (FULL, FULL) for seen in dtypes(model).values())


def test_an_exception_inside_leaves_autocast_as_it_was() -> None:
    model = model_of()
    precision = apply(with_islands("inner"), model)
    with precision.autocast():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(3, 5))
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is LOW
    assert torch.is_autocast_cache_enabled()
    assert torch.equal(model(INPUTS), model_of()(INPUTS))


def gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    return (p.grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    class Checkpointed(Container):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.first, inputs, use_reentrant=reentrant)
            return self.blocks[0](hidden * hidden) + hidden

    results = []
    for kind in (Container, Checkpointed):
        torch.manual_seed(0)
        model = kind()
        precision = apply(with_islands(""), model)
        inputs = INPUTS.clone().requires_grad_()
        with precision.autocast():
            loss = model(inputs).square().mean()
        precision.backward(loss)
        results.append([inputs.grad, *gradients(model)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_islands_compute_the_same_in_one_graph(backend: str) -> None:
    torch._dynamo.reset()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            return self.second(hidden * hidden - hidden.mean())

    torch.manual_seed(0)
    eager = Plain()
    compiled = copy.deepcopy(eager)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    results = []
    for model, compiling in ((eager, False), (compiled, True)):
        recipe = replace(with_islands(""), compile=compiling)
        precision = apply(recipe, model, compile_backend=counter)
        with precision.autocast():
            loss = model(INPUTS).square().mean()
        precision.backward(loss)
        results.append([loss, model(INPUTS), *gradients(model)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert counter.frame_count == 2  # one graph under autocast, one without


def test_a_copy_carries_its_islands_and_calls_its_own_weights() -> None:
    model = model_of()
    precision = apply(with_islands("inner", "head"), model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for copied in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        with precision.autocast():
            assert torch.equal(copied(INPUTS), model(INPUTS))
        assert dtypes(copied)["inner"] == (FULL, FULL)
        with torch.no_grad():
            copied.inner.first.linear.weight.zero_()
            copied.inner.first.linear.bias.zero_()
        with precision.autocast():
            assert not torch.equal(copied(INPUTS), model(INPUTS))
        restore(copied)
        run(BFLOAT16, copied)
        assert dtypes(copied)["inner"] == (LOW, LOW)


def test_state_dict_is_as_without() -> None:
    model = model_of()
    keys = list(model.state_dict())
    apply(with_islands("inner", ""), model)
    assert list(model.state_dict()) == keys
    model_of().load_state_dict(model.state_dict())


def test_a_module_under_two_names_is_an_island_under_both() -> None:
    model = model_of()
    model.head = model.inner.first
    run(with_islands("inner.first"), model)
    assert model.inner.first.seen == [(FULL, FULL)] * 2


def test_an_unknown_island_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'inner\.frist'.*did you mean 'inner\.first'"):
        apply(with_islands("inner.frist"), model_of())


def test_a_float32_policy_needs_no_islands() -> None:
    model = model_of()
    precision = apply(replace(FLOAT32, float32_modules=("inner",)), model)
    assert precision.report.islands == ()
    assert "forward" not in model.inner.__dict__


# Knobs that hold for the whole process -----------------------------------------------------------


class Precise(nn.Linear):
    """Notes how float32 products are computed, in its forward and in its backward pass."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[str] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.note()
        outputs = super().forward(inputs)
        outputs.register_hook(self.note)
        return outputs

    def note(self, gradient: torch.Tensor | None = None) -> None:
        self.seen.append(torch.get_float32_matmul_precision())


@pytest.mark.parametrize(("islands", "products"), [((), "medium"), (("1",), "highest")])
def test_no_knob_rounds_the_products_of_an_island(islands: tuple[str, ...], products: str) -> None:
    """`implicit_bfloat16` would, in both passes: it holds for the process."""
    model = nn.Sequential(nn.Linear(4, 4), Precise())
    recipe = replace(BFLOAT16, float32_modules=islands, knobs={"implicit_bfloat16": True})
    with process_settings_restored():
        precision = apply(recipe, model)
        with precision.autocast():
            loss = model(INPUTS).sum()
        precision.backward(loss)
        assert model[1].seen == [products, products]
        assert precision.report.globals_set == (() if islands else ("matmul_precision=medium",))
