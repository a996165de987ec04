"""The torch tracer: the same start, batches and random numbers for everything compared."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.shared.tracer import ComparisonTracer
from autoprec.backends.torch.trace.tracer import torch_tracer
from autoprec.backends.torch.train.model_state import (
    restore_snapshot,
    take_snapshot,
)
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import UsageError
from tests.backends.torch.traced import BFLOAT16, FLOAT16, FLOAT32, model, task, tracer

pytestmark = pytest.mark.torch


def losses(trace: ComparisonTracer, recipe: Recipe = FLOAT32, steps: int = 6, **kwargs: Any) -> Any:
    return trace.trajectory(recipe=recipe, seed=kwargs.pop("seed", 0), steps=steps, **kwargs).losses


def test_float32_under_the_surgeon_is_the_users_own_loop_dropout_included():
    trace = tracer()
    reference = trace.reference(batch_size=8, steps=6, checkpoints=(0, 3))
    assert losses(trace) == reference.losses
    assert losses(tracer()) == reference.losses


class Noting(nn.Linear):
    """Notes how float32 products are computed in its forward pass."""

    seen: list[str]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.get_float32_matmul_precision())
        return super().forward(inputs)


def test_float32_whose_products_are_bfloat16_is_never_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither float32 itself nor float32 with noise is computed as the recipe is."""
    seen: list[str] = []
    monkeypatch.setattr(Noting, "seen", seen, raising=False)
    trace = tracer(build_model=lambda: nn.Sequential(Noting(6, 1), nn.Flatten(0)))
    implicit = replace(FLOAT32, knobs={"implicit_bfloat16": True})

    def computed(run: Any) -> set[str]:
        seen.clear()
        run()
        return set(seen)

    def reference() -> Any:
        return trace.reference(batch_size=8, steps=3, checkpoints=(0, 2))

    for _ in range(2):  # also after the recipe has run in this process
        assert computed(reference) == {"highest"}
        assert computed(lambda: trace.noise(draws=1)) == {"highest"}
        assert computed(lambda: trace.compare_steps(recipe=implicit)) == {"medium"}
        assert computed(lambda: losses(trace, implicit)) == {"medium"}
        assert computed(lambda: losses(trace, noisy=True)) == {"highest"}


def test_float32_compared_with_itself_is_equal():
    trace = tracer()
    trace.reference(batch_size=8, steps=4, checkpoints=(0, 3, 9))
    points = trace.compare_steps(recipe=FLOAT32)
    assert [point.step for point in points] == [0, 3]
    assert all(point.loss == point.reference for point in points)
    assert all(point.gradient_error == 0.0 for point in points)


def of_the_last_layer(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that leaves the gradients of other layers standing."""
    *_, last = (each for each in model.modules() if isinstance(each, nn.Linear))
    return torch.optim.SGD(last.parameters(), lr=0.1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "known", [{}, {"clip_grad_norm": 0.01}, {"build_optimizer": of_the_last_layer}]
)
def test_float32_answers_while_it_trains_what_a_step_apart_gives(
    known: dict[str, Any], count: int
) -> None:
    trace = tracer(**known)
    trace.reference(batch_size=8, accumulation_steps=count, steps=4, checkpoints=(0, 3))
    plain = trace.trajectory(recipe=replace(FLOAT32, accumulation_steps=count), seed=0, steps=4)
    again = trace.reference(batch_size=8, accumulation_steps=count, steps=4, checkpoints=(1, 3))
    assert again.losses == plain.losses  # a look at the gradient changes no training
    for point in trace.compare_steps(recipe=FLOAT32):
        assert (point.loss, point.gradient_error) == (point.reference, 0.0)


def test_steps_of_a_larger_batch_are_compared_at_the_weights_of_a_smaller_one() -> None:
    trace = tracer()
    run = trace.reference(batch_size=4, steps=4, checkpoints=(0, 3), compared_batch=16)
    assert run.losses == losses(trace, replace(FLOAT32, batch_size=4), steps=4)
    stream = trace._stream(16, 0)
    for index, kept in enumerate(trace._checkpoints):
        assert torch.equal(kept.batch[0], stream.batch(index)[0])
        assert len(kept.batch[0]) == 16
    for point in trace.compare_steps(recipe=replace(FLOAT32, batch_size=16)):
        assert (point.loss, point.gradient_error) == (point.reference, 0.0)
        assert point.reference != run.losses[point.step]


def test_a_compared_step_starts_from_the_weights_of_its_step():
    trace = tracer()
    reference = trace.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    points = trace.compare_steps(recipe=BFLOAT16)
    assert [point.step for point in points] == [0, 3]
    for point in points:
        assert point.reference == pytest.approx(reference.losses[point.step], rel=1e-6)
        assert 0 < point.gradient_error < 0.1


def test_late_losses_are_averaged_over_further_batches_at_the_same_weights():
    def linear() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))

    trace = tracer(build_model=linear)
    trace.reference(batch_size=8, steps=62, checkpoints=(59, 60, 61))
    first, *late = trace.compare_steps(recipe=BFLOAT16)
    assert (first.mean_loss, first.mean_reference) == (None, None)
    stream = trace._stream(8, 0)
    for point, kept in zip(late, trace._checkpoints[1:], strict=True):
        model = linear()
        restore_snapshot(model, kept.state)
        batches = [stream.batch(index) for index in range(32)]
        theirs = [nn.functional.mse_loss(model(x), y).item() for x, y in batches]
        with torch.autocast("cpu", torch.bfloat16):
            ours = [nn.functional.mse_loss(model(x).float(), y).item() for x, y in batches]
        assert point.mean_reference == pytest.approx(sum(theirs) / 32, rel=1e-6)
        assert point.mean_loss == pytest.approx(sum(ours) / 32, rel=1e-6)


def test_a_late_loss_that_is_not_finite_on_a_further_batch_has_no_mean():
    def data(batch_size: int) -> Any:
        for index in range(4):
            yield torch.full((batch_size, 6), 1e5 if index == 3 else 1.0), torch.zeros(batch_size)

    def small() -> nn.Module:
        layer = nn.Linear(6, 1, bias=False)
        nn.init.constant_(layer.weight, 1e-3)
        return nn.Sequential(layer, nn.Flatten(0))

    frozen = tracer(build_model=small, build_data=data, build_optimizer=still)
    frozen.reference(batch_size=8, steps=61, checkpoints=(60,))
    (point,) = frozen.compare_steps(recipe=FLOAT16)
    assert point.loss is not None
    assert (point.mean_loss, point.mean_reference) == (None, None)


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def test_a_scaled_gradient_is_compared_unscaled():
    trace = tracer()
    trace.reference(batch_size=8, steps=1, checkpoints=(0,))
    (point,) = trace.compare_steps(recipe=FLOAT16)
    assert point.gradient_error < 0.02


def test_noise_is_small_and_each_draw_is_another():
    trace = tracer()
    trace.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    points = trace.noise(draws=3)
    assert len(points) == 6
    assert len({point.loss for point in points}) == 6
    assert all(0 < point.gradient_error < 0.1 for point in points)


def test_a_comparison_needs_a_reference():
    with pytest.raises(UsageError, match="reference"):
        tracer().compare_steps(recipe=BFLOAT16)


def test_seeds_have_weights_and_batches_of_their_own():
    trace = tracer()
    assert losses(trace, seed=1) != losses(trace)
    other = torch_tracer(task(), device="cpu", seed=7, report=lambda phase, step: None)
    assert losses(other) != losses(trace)


def test_a_model_that_is_built_differently_each_time_still_starts_the_same():
    def build() -> nn.Module:
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
        return nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))

    trace = tracer(build_model=build)
    assert losses(trace) == losses(trace)


def test_data_that_change_between_runs_are_kept_and_replayed():
    def build(batch_size: int) -> Any:
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        while True:
            x = torch.randn(batch_size, 6, generator=generator)
            yield x, x.sum(-1)

    trace = tracer(build_data=build)
    first = trace.trajectory(recipe=FLOAT32, seed=0, steps=6)
    assert not first.reproducible
    assert losses(trace) == first.losses


def test_accumulation_averages_the_gradients_of_micro_batches():
    plain = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    start = take_snapshot(plain)

    def build() -> nn.Module:
        restore_snapshot(plain, start)
        return plain

    def sgd(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(m.parameters(), lr=0.1)

    def halves(batch_size: int) -> Any:
        torch.manual_seed(3)
        for _ in range(4):
            x = torch.randn(8, 6)
            for part in x.split(batch_size):
                yield part, part.sum(-1)

    kwargs = {"build_model": build, "build_data": halves, "build_optimizer": sgd}
    whole = losses(tracer(**kwargs), steps=3)
    split = losses(tracer(**kwargs), Recipe(batch_size=4, accumulation_steps=2), steps=3)
    assert split == pytest.approx(whole, rel=1e-5)
    trace = tracer(**kwargs)
    reference = trace.reference(batch_size=4, accumulation_steps=2, steps=3, checkpoints=(2,))
    assert reference.losses == pytest.approx(whole, rel=1e-5)


def test_the_users_clipping_is_applied():
    assert losses(tracer(clip_grad_norm=1e-6)) != losses(tracer())


def test_the_reference_clips_what_a_recipe_clips_the_optimizers_own_parameters():
    def the_last_layer_alone(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(m[3].parameters(), lr=0.1)

    trace = tracer(clip_grad_norm=0.5, build_optimizer=the_last_layer_alone)
    reference = trace.reference(batch_size=8, steps=6, checkpoints=())
    assert reference.losses == losses(trace)
    assert reference.losses != losses(tracer(build_optimizer=the_last_layer_alone))


def test_skipped_steps_and_scales_are_told():
    run = tracer().trajectory(
        recipe=Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=2.0**40)),
        seed=0,
        steps=3,
    )
    assert run.skipped == (0, 1, 2)
    assert run.scales == (2.0**39, 2.0**38, 2.0**37)


def test_a_loss_that_is_not_finite_is_none_and_the_last():
    bad = tracer(loss_fn=lambda outputs, targets: (outputs - targets).mean() * torch.inf)
    run = bad.trajectory(recipe=FLOAT32, seed=0, steps=2)
    assert run.losses == (None,)
    assert not run.finite


def test_a_run_ends_when_its_time_is_up():
    assert len(losses(tracer(), steps=50, seconds=0.0)) == 1


def test_evaluate_is_called_after_the_last_step_and_changes_nothing():
    def evaluate(m: nn.Module) -> float:
        m.eval()
        torch.rand(5)
        random.random()
        return 0.75

    with_metric = tracer(evaluate=evaluate).trajectory(recipe=FLOAT32, seed=0, steps=4)
    assert with_metric.metric == 0.75
    assert with_metric.losses == losses(tracer(), steps=4)
    assert (
        tracer(evaluate=lambda m: float("nan")).trajectory(recipe=FLOAT32, seed=0, steps=1).metric
        is None
    )


def test_what_evaluate_does_to_the_modes_is_undone():
    built = []

    def frozen() -> nn.Module:
        built.append(model())
        built[-1][1].eval()
        return built[-1]

    def evaluate(trained: nn.Module) -> float:
        trained.eval()
        return 1.0

    losses(tracer(build_model=frozen, evaluate=evaluate), steps=1)
    assert (built[-1].training, built[-1][1].training) == (True, False)


def test_islands_of_the_recipe_are_in_the_trace():
    trace = tracer()
    trace.reference(batch_size=8, steps=1, checkpoints=(0,))
    everything = Recipe(Policy.MIXED_BFLOAT16, 8, float32_modules=("0", "1", "2", "3", "4", ""))
    (point,) = trace.compare_steps(recipe=everything)
    assert point.loss == pytest.approx(point.reference, rel=1e-6)
    assert point.gradient_error < 1e-5


def test_batches_of_another_size_are_forgotten():
    trace = tracer()
    trace.reference(batch_size=8, steps=1, checkpoints=())
    trace.reference(batch_size=4, steps=1, checkpoints=())
    assert {size for size, _ in trace._streams} == {4}
