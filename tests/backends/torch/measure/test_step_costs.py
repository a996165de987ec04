"""Operations, kernels and saved bytes of a step; what cannot be measured is unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.backends.shared.attempt import try_to_measure
from autoprec.backends.torch.measure import describe, step_costs
from tests.backends.torch.described import facts, pairs, small, task

pytestmark = pytest.mark.torch


def by_inputs(model: nn.Module, batch: Any) -> torch.Tensor:
    """A physics-informed net in small: the gradient by a leaf that is the model's input."""
    inputs = batch[0].requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return (slope**2).mean() + F.mse_loss(outputs, batch[1])


def by_function(model: nn.Module, batch: Any) -> torch.Tensor:
    """Forces from energies, by torch.func."""
    weights = dict(model.named_parameters())

    def energy(inputs: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (inputs,)).sum()

    forces = torch.func.vmap(torch.func.grad(energy))(batch[0])
    return (forces**2).mean()


@pytest.mark.parametrize("step", [by_inputs, by_function])
def test_gradients_by_inputs_are_described(step: Callable[..., Any]) -> None:
    found = facts(training_step=step)
    assert found.flops_per_sample is not None
    assert found.flops_per_sample > 3 * 2 * (4 * 16 + 16)  # more than one pass there and back
    assert found.splittable


def test_operations_by_module_where_torch_can_tell_them_apart() -> None:
    shares = {unit.path: unit.products for unit in facts().units}
    assert shares["0"] > 0.5  # inputs need no gradient, so it is 2 to 3 there
    assert shares["0"] + shares["2"] == pytest.approx(1)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.mean(0) for part in self.linear(inputs).unbind()])


def jagged(batch_size: int) -> Iterator[Any]:
    while True:
        parts = [torch.randn(1 + index % 3, 4) for index in range(batch_size)]
        yield (
            torch.nested.nested_tensor(parts, layout=torch.jagged),
            torch.randn(batch_size, 1),
        )


def test_what_cannot_be_counted_is_unknown() -> None:
    found = facts(build_model=Jagged, build_data=jagged)
    assert found.flops_per_sample is None
    assert found.samples == 32
    assert found.splittable


def test_a_measurement_without_memory_is_unknown() -> None:
    calls = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(batch)
        if 1 < len(calls) <= 5:  # operations twice, what is kept, the whole batch
            torch.empty(2**50)
        return F.mse_loss(model(batch[0]), batch[1])

    found = facts(training_step=step)
    assert found.flops_per_sample is None
    assert found.saved_bytes_per_sample == 0
    assert not found.splittable
    assert found.split_reason.endswith("there is not enough memory for it")


def test_what_is_counted_is_freed_at_once() -> None:
    """Without a garbage collection: a pass's activations must not outlive it."""
    import gc
    import weakref

    seen = []

    class Notes(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output = inputs.exp()
            seen.append(weakref.ref(output))
            return output

    model = nn.Sequential(nn.Linear(4, 1), Notes())
    batch = (torch.randn(8, 4), torch.randn(8, 1))
    gc.collect()
    gc.disable()
    try:
        step_costs.saved_bytes(task(), model, batch, 0)
        assert [reference() for reference in seen] == [None]
    finally:
        gc.enable()


def test_kernels_are_what_a_step_runs_with_their_operands() -> None:
    found = facts(build_optimizer=lambda model: torch.optim.Adam(model.parameters()))
    flops = sum(kernel.count * kernel.flops_per_sample for kernel in found.kernels)
    assert flops == pytest.approx(found.flops_per_sample)
    first = next(k for k in found.kernels if k.flops_per_sample == 2 * 4 * 16)
    assert first.bytes_per_sample == 4 * (4 + 16)  # images in, features out
    assert first.fixed_bytes == 4 * (4 * 16 + 16)
    assert all(kernel.bytes_per_sample or kernel.fixed_bytes for kernel in found.kernels)
    weights = 4 * 16 + 16 + 16 + 1
    assert 0 <= found.optimizer_bytes - 2 * 4 * weights <= 4 * 4  # Adam's moments and its counts


class Looped(nn.Module):
    """Sorts a long row: most of its time is in one operator that is no product."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.flatten().repeat(20000).sort().values[: len(inputs), None]


def test_the_slowest_operator_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Looped())
    found = step_costs.slowest_operator(task(), model, next(pairs(8)), 0, lambda: None)
    name, seconds, of_all = found
    assert name == "aten.sort"
    assert 0 < seconds < of_all


def test_an_operator_takes_no_more_of_a_step_than_of_the_pass_it_was_timed_in() -> None:
    """Operators that something disturbed took longer than the step before."""
    model = nn.Sequential(nn.Linear(4, 4), Looped())
    name, share = describe._slow_operator(task(), model, next(pairs(8)), 0, "cpu", 1e-9)
    assert name == "aten.sort"
    assert share < 1.0


@pytest.mark.parametrize(
    ("seconds", "named"), [(0.4, ("", 0.0)), (0.6, ("aten.sort", 0.6)), (1.2, ("aten.sort", 1.0))]
)
def test_an_operator_is_named_where_it_takes_half_of_the_step(
    seconds: float, named: tuple[str, float]
) -> None:
    assert describe._named_operator("aten.sort", seconds, 1.0) == named


def test_an_operator_that_takes_less_than_half_of_the_step_is_not_named() -> None:
    """Tiny operators of equal size, most of whose time is the framework's own."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))]
    found = facts(build_model=lambda: nn.Sequential(*layers, nn.Linear(4, 1)))
    assert (found.slow_operator, found.slow_operator_share) == ("", 0.0)


def test_an_operator_that_cannot_be_timed_is_none() -> None:
    def wait() -> None:
        raise RuntimeError("the device is lost")

    assert try_to_measure(
        lambda: step_costs.slowest_operator(task(), small(), next(pairs(8)), 0, wait)
    ) == (None, "RuntimeError: the device is lost")


def test_kernels_that_cannot_be_watched_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no dispatch here")

    monkeypatch.setattr(step_costs, "run_pass", fail)
    assert try_to_measure(lambda: step_costs.kernels(task(), small(), None, 0, 1)) == (
        None,
        "RuntimeError: no dispatch here",
    )
