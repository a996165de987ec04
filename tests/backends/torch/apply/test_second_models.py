"""Weight averages, teachers and other models inside `precision.autocast()` give float32, too."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.swa_utils import AveragedModel

from autoprec.backends.torch.apply import second_models
from autoprec.backends.torch.apply.forward_wrappers import wrappers_on
from autoprec.backends.torch.apply.model_changes import restore
from autoprec.core.recipe import Alignment, Recipe
from tests.backends.torch.operated import BFLOAT16, FLOAT16, FLOAT32, adam, apply, mlp

pytestmark = pytest.mark.torch

LOW, FULL = torch.bfloat16, torch.float32


class Net(nn.Module):
    """Ends in a softmax of its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.ReLU())
        self.head = nn.Linear(10, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs)).softmax(-1)


class Ema(nn.Module):
    """Keeps a copy of the model in evaluation mode, as timm's ModelEmaV2 does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    def forward(self, *args: Any) -> torch.Tensor:
        return self.module(*args)


def rebuilt(model: nn.Module) -> nn.Module:
    made = type(model)() if isinstance(model, Net) else mlp(seed=5)
    made.load_state_dict(model.state_dict())
    return made


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": AveragedModel,
    "in a module of its own": Ema,
    "in evaluation mode": lambda model: copy.deepcopy(model).eval(),
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "rebuilt": rebuilt,
    "deepcopy of a deepcopy": lambda model: copy.deepcopy(Ema(model).module).train(),
}

RECIPES = {
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
    "islands": replace(BFLOAT16, float32_modules=("body.1",)),
    "padding": replace(BFLOAT16, alignment=Alignment(8, ("head",))),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_gives_the_same_wherever_it_was_made(name: str, recipe: Any) -> None:
    model, inputs = Net(), torch.randn(4, 6)
    before = COPIES[name](model)
    precision = apply(recipe, model)
    after = COPIES[name](model)
    given = [precision.forward(inputs)]
    for called in (before, after, before, model, after):
        with precision.autocast():
            given.append(called(inputs))
    with precision.autocast():
        given += [model(inputs), before(inputs), after(inputs)]
    assert {each.dtype for each in given} == {FULL}
    assert all(torch.equal(each, given[0]) for each in given)
    precision.restore()
    exact = model(inputs)
    restore(after.module if hasattr(after, "module") else after)
    for called in (before, after):
        assert torch.equal(called(inputs), exact)
        assert not any(wrapper for each in called.modules() for wrapper in wrappers_on(each))


class Normed(nn.Module):
    """Overflows in float16 where its inputs are large; says in which dtype its layers computed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        self.computed = (hidden.dtype, self.norm(hidden).dtype)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_copy_that_is_trained_takes_a_profile_of_its_own(made: str) -> None:
    recipe = replace(FLOAT16, float32_modules=("norm",), alignment=Alignment(8, ("head",)))
    model, inputs = Normed(), torch.randn(8, 6)
    copied = copy.deepcopy(model)
    first = apply(recipe, model, adam(model))
    if made == "after":
        copied = copy.deepcopy(model)
    wrapped = {name: list(map(type, wrappers_on(each))) for name, each in model.named_modules()}
    own = apply(recipe, copied, adam(copied))
    for trained, precision in ((model, first), (copied, own), (model, first)):
        assert precision.backward_and_step(precision.forward(inputs).square().mean())
        assert trained.computed == (torch.float16, FULL)
    for name, each in copied.named_modules():
        assert list(map(type, wrappers_on(each))) == wrapped[name]
    weights = [each.clone() for each in model.parameters()]
    before = {name: each.clone() for name, each in copied.named_buffers()}
    assert not own.backward_and_step(own.forward(inputs * 1e30).square().mean())
    assert all(torch.equal(each, before[name]) for name, each in copied.named_buffers())
    assert (own.skipped, first.skipped) == (1, 0)
    assert all(map(torch.equal, weights, model.parameters()))
    first.restore()
    assert own.forward(inputs).dtype == FULL
    assert copied.computed == (torch.float16, FULL)


@pytest.mark.parametrize("other", [nn.Linear(6, 2), nn.Sequential(nn.Linear(6, 2)), Net()])
def test_another_model_gives_float32_before_and_after_the_models_own_call(other: Any) -> None:
    model, inputs = mlp(), torch.randn(4, 6)
    precision = apply(BFLOAT16, model, adam(model))
    for _ in range(3):
        with precision.autocast():
            outputs, taught = model(inputs), other(inputs)
        assert outputs.dtype is taught.dtype is FULL
    for _ in range(3):
        with precision.autocast():
            taught, outputs = other(inputs), model(inputs)
            again = other(inputs)
    assert outputs.dtype is taught.dtype is again.dtype is FULL
    with precision.autocast(), torch.no_grad():
        assert other(inputs).dtype is FULL
    assert not list(wrappers_on(other))


def test_the_first_call_of_another_model_late_in_training_is_float32_outside_gradients() -> None:
    """A weight average is evaluated after an epoch of steps that call the model alone."""
    model, inputs = mlp(), torch.randn(4, 6)
    average = AveragedModel(model)
    precision = apply(BFLOAT16, model, adam(model))
    for _ in range(4):
        with precision.autocast():
            model(inputs)
    model.eval()
    with precision.autocast():
        assert average(inputs).dtype is FULL
    model.train()
    with precision.autocast():
        model(inputs)
    with torch.no_grad(), precision.autocast():
        assert average(inputs).dtype is FULL


def test_parts_of_the_model_stay_in_16_bits() -> None:
    model, inputs = Net(), torch.randn(4, 6)
    precision = apply(BFLOAT16, model)
    for _ in range(2):
        with precision.autocast():
            assert model.head(model.body(inputs)).dtype is LOW


def test_an_exception_inside_leaves_nothing_behind() -> None:
    class Raises(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("theirs")

    model, raising = mlp(), Raises()
    precision = apply(BFLOAT16, model)
    for called in (raising, raising, lambda x: (model(x), raising(x))):
        with pytest.raises(RuntimeError, match="theirs"), precision.autocast():
            called(torch.ones(1, 6))
        assert not nn_module._global_forward_pre_hooks
        assert not raising._forward_hooks
    with precision.autocast():
        assert nn.Linear(6, 2)(torch.ones(1, 6)).dtype is FULL


def test_nothing_is_left_of_it_outside_of_the_context() -> None:
    model, other = mlp(), nn.Linear(6, 2)
    precision = apply(BFLOAT16, model)
    with precision.autocast():
        model(torch.ones(1, 6))
        other(torch.ones(1, 6))
    assert not nn_module._global_forward_pre_hooks
    assert not model._forward_hooks
    assert not other._forward_hooks
    with torch.autocast("cpu", LOW):
        assert other(torch.ones(1, 6)).dtype is LOW


def test_contexts_inside_each_other_and_of_two_profiles() -> None:
    first, second, other = mlp(), mlp(), nn.Linear(6, 2)
    inputs = torch.ones(1, 6)
    one, two = apply(BFLOAT16, first), apply(BFLOAT16, second)
    for _ in range(2):
        with one.autocast():
            with two.autocast():
                assert second(inputs).dtype is other(inputs).dtype is FULL
            assert first(inputs).dtype is other(inputs).dtype is FULL
            with one.autocast():
                assert other(inputs).dtype is FULL
            assert other(inputs).dtype is FULL
    assert not nn_module._global_forward_pre_hooks


def test_the_modules_of_another_thread_are_none_of_its_business() -> None:
    model, other = mlp(), nn.Linear(6, 2).bfloat16()
    precision = apply(BFLOAT16, model)
    seen: list[torch.dtype] = []
    thread = threading.Thread(target=lambda: seen.append(other(torch.ones(1, 6, dtype=LOW)).dtype))
    with precision.autocast():
        thread.start()
        thread.join()
        assert nn.Linear(6, 2)(torch.ones(1, 6)).dtype is FULL
    assert seen == [LOW]


def test_nothing_keeps_a_model_alive() -> None:
    model = mlp()
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(model)
        precision = apply(FLOAT32, model, torch.optim.SGD(model.parameters(), 0.1))
        with precision.autocast():
            model(torch.ones(1, 6))
        del model, precision
        assert gone() is None
    finally:
        gc.enable()


def test_float32_sets_no_hooks() -> None:
    precision = apply(FLOAT32, mlp())
    with precision.autocast():
        assert not nn_module._global_forward_pre_hooks


def test_a_model_in_torch_compiles_wrapper_beside_another() -> None:
    torch._dynamo.reset()
    model, other, inputs = torch.compile(mlp(), backend="eager"), nn.Linear(6, 2), torch.randn(4, 6)
    precision = apply(BFLOAT16, model)
    for _ in range(3):
        with precision.autocast():
            assert other(inputs).dtype is model(inputs).dtype is other(inputs).dtype is FULL


def test_a_copy_that_was_restored_by_itself_stays_so() -> None:
    model, inputs = mlp(), torch.randn(4, 6)
    precision = apply(replace(BFLOAT16, float32_modules=("0", "1", "2")), model)
    restored = copy.deepcopy(model)
    restore(restored)
    with precision.autocast():
        outputs = restored(inputs)
    assert outputs.dtype is FULL
    assert not torch.equal(outputs, model(inputs))
    assert not list(wrappers_on(restored[0]))


@pytest.mark.parametrize("own", [True, False])
def test_a_compiled_model_is_compiled_once_beside_another(own: bool) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, other, inputs = mlp(), nn.Linear(6, 2), torch.randn(4, 6)
    if not own:
        model.compile(backend=counter)
    precision = apply(replace(BFLOAT16, compile=own), model, compile_backend=counter)
    for _ in range(4):
        with precision.autocast():
            outputs, taught = model(inputs), other(inputs)
        assert outputs.dtype is taught.dtype is FULL
        precision.backward(outputs.sum() + taught.sum())
        assert precision.forward(inputs).dtype is FULL
    with torch.no_grad(), precision.autocast():
        assert other(inputs).dtype is FULL
    assert counter.frame_count <= 2


def test_a_model_that_joins_the_training_late_gives_float32_soon_and_then_always() -> None:
    model, late = mlp(), nn.Linear(6, 3)
    precision = apply(BFLOAT16, model)
    inputs = torch.randn(4, 6)
    for _ in range(second_models.ALWAYS):
        with precision.autocast():
            model(inputs)
    seen = []
    for _ in range(3 * second_models.EVERY):
        with precision.autocast():
            seen.append(late(inputs).dtype)
            model(inputs)
    first = seen.index(FULL)
    assert first < second_models.EVERY
    assert set(seen[first:]) == {FULL}


def test_a_model_that_joins_an_evaluation_late_gives_float32_at_once() -> None:
    model, late = mlp(), nn.Linear(6, 3)
    precision = apply(BFLOAT16, model)
    inputs = torch.randn(4, 6)
    for _ in range(second_models.ALWAYS + 1):
        with precision.autocast():
            model(inputs)
    with torch.no_grad(), precision.autocast():
        assert late(inputs).dtype is FULL


def test_one_context_may_be_kept_nested_and_used_as_a_decorator() -> None:
    weight = torch.randn(4, 4)
    precision = apply(BFLOAT16, mlp())
    context = precision.autocast()

    @context
    def product() -> torch.Tensor:
        return weight @ weight

    with context:
        with context:
            assert (weight @ weight).dtype is LOW
        assert product().dtype is LOW
    assert product().dtype is LOW
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        with context:
            assert not torch.is_autocast_cache_enabled()
        assert torch.get_autocast_dtype("cpu") is torch.float16


@pytest.mark.parametrize("recipe", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_context_made_at_any_micro_batch_serves_all_of_them(recipe: Recipe, before: int) -> None:
    model = mlp()
    precision = apply(replace(recipe, accumulation_steps=3), model, adam(model))
    context, weight = None, torch.randn(4, 6)
    expected = LOW if recipe is BFLOAT16 else FULL
    for step in range(7):
        context = precision.autocast() if step == before else context
        if context is not None:
            with context:
                assert (weight @ weight.T).dtype is expected
            assert context(torch.matmul)(weight, weight.T).dtype is expected
        precision.backward(precision.forward(weight).sum())
        precision.step()


def test_threads_enter_one_context_side_by_side() -> None:
    context = apply(BFLOAT16, mlp()).autocast()
    inside, outside = threading.Barrier(2), []

    def enter() -> None:
        with context:
            inside.wait(10)
        outside.append(torch.is_autocast_enabled("cpu"))

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outside == [False, False]
