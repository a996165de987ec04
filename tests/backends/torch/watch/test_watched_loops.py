"""Checks in loops of other shapes, in little memory, and of what cannot be checked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autoprec import Recipe, apply_profile
from autoprec.backends.torch.watch.repeated_call import RepeatedCall
from autoprec.core.numerics import watching
from autoprec.core.recipe import LossScale
from autoprec.core.watch_settings import EVERY
from autoprec.errors import AutoprecWarning, UsageError
from benchmarks.numerics.late_breaks import BFLOAT16, FLOAT16, Pace
from benchmarks.numerics.late_breaks_torch import batches, train, trained

pytestmark = pytest.mark.torch


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def applied(recipe: Recipe = BFLOAT16, **how: Any) -> tuple[nn.Module, Any, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, apply_profile(recipe, model=model, optimizer=optimizer, **how)


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16])
def test_a_loop_written_for_amp_is_checked(recipe: Recipe) -> None:
    model, optimizer, precision = applied(recipe, watch_every=2)
    data = batches()
    for _ in range(6):
        inputs, targets = next(data)
        with precision.autocast():
            loss = nn.functional.mse_loss(model(inputs), targets)
        precision.scaler.scale(loss).backward()
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad()
    assert [each.updates for each in precision.watched] == [1, 3, 5]
    assert all(each.samples == 8 and each.loss is None for each in precision.watched)


def test_calls_without_a_gradient_are_passed_over() -> None:
    model, _, precision = applied(watch_every=1)
    data = batches()
    for _ in range(3):
        inputs, targets = next(data)
        with precision.autocast(), torch.no_grad():
            model(inputs)
        with precision.autocast():
            model(inputs).detach()
            outputs = model(inputs)
        precision.backward(nn.functional.mse_loss(outputs, targets))
        precision.step()
    assert [each.samples for each in precision.watched] == [8, 8, 8]


def test_a_loss_inside_the_model_is_compared_too() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = network()

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
            outputs = self.inside(inputs)
            return {"loss": nn.functional.mse_loss(outputs, targets), "outputs": outputs}

    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = apply_profile(BFLOAT16, model=model, optimizer=optimizer)
    inputs, targets = next(batches())
    precision.backward(precision.forward(inputs, targets=targets)["loss"])
    precision.step()
    (check,) = precision.watched
    assert 0.0 < abs(check.loss) < 0.01
    assert 0.0 < check.gradient < 0.1


def test_a_model_that_is_never_called_as_a_whole_is_said_to_be_unchecked() -> None:
    model, _, precision = applied()

    def train_in_parts() -> None:
        for inputs, targets in itertools.islice(batches(), 9):
            with precision.autocast():
                outputs = model[2](model[1](model[0](inputs)))
            precision.backward(nn.functional.mse_loss(outputs.float(), targets))
            precision.step()

    with pytest.warns(AutoprecWarning, match="could not be made: no call of the model as a whole"):
        train_in_parts()
    (check,) = precision.watched
    assert "no call of the model" in check.not_checked


def test_a_model_whose_statistics_are_of_all_ranks_is_said_to_be_unchecked() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.SyncBatchNorm(16), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(AutoprecWarning, match="not checked while it goes on: SyncBatchNorm"):
        precision = apply_profile(BFLOAT16, model=model, optimizer=optimizer)
    assert precision.watched == ()
    apply_profile(BFLOAT16, model=model, optimizer=optimizer, watch=False)


def too_large(most: int) -> Any:
    def exact(self: RepeatedCall) -> Any:
        if self._samples > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return RepeatedCall._run(self, autocast=False)

    return exact


def test_a_check_takes_as_many_samples_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RepeatedCall, "exact", too_large(3))
    precision, _ = train(network(), BFLOAT16, updates=2)
    (check,) = precision.watched
    assert (check.samples, check.batch) == (2, 8)
    assert check.not_checked == "of 8 samples 2 fit in memory"
    assert 0.0 < check.gradient < 0.1


def test_a_check_that_never_fits_is_left_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(network(), BFLOAT16, updates=3, watch=False)[1]
    monkeypatch.setattr(RepeatedCall, "exact", too_large(0))
    with pytest.warns(AutoprecWarning, match="not enough memory for a second pass"):
        precision, losses = train(network(), BFLOAT16, updates=3)
    assert "not enough memory" in precision.watched[0].not_checked
    assert losses == expected


def test_an_error_in_a_check_ends_no_training() -> None:
    class OnlyLow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 2)

        def forward(self, given: torch.Tensor) -> Any:
            result = self.inside(given)
            if result.dtype is not torch.bfloat16:
                raise TypeError("16 bits only")
            return result

    with pytest.warns(AutoprecWarning, match="TypeError: 16 bits only"):
        precision, _ = train(OnlyLow(), BFLOAT16, updates=4)
    assert "TypeError: 16 bits only" in precision.watched[0].not_checked


def test_a_call_that_cannot_be_repeated_is_not_judged() -> None:
    hidden = iter(range(1, 1000))

    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 2)

        def forward(self, given: torch.Tensor) -> Any:
            return self.inside(given) * next(hidden)

    with pytest.warns(AutoprecWarning, match="cannot be repeated"):
        precision, _ = train(Foreign(), BFLOAT16, updates=4, watch="raise")
    assert "cannot be repeated" in precision.watched[0].not_checked
    assert not any(each.problem for each in precision.watched)


def test_nothing_is_watched_where_nothing_is_rounded_or_where_it_is_switched_off() -> None:
    for recipe, how in ((Recipe(batch_size=8), "warn"), (BFLOAT16, False)):
        model, optimizer, precision = applied(recipe, watch=how)
        assert precision.watched == ()
        assert "_compiled_call_impl" not in vars(model)
        assert not optimizer._optimizer_step_post_hooks
        assert "watch" not in precision.state_dict()


def test_a_later_profile_ends_the_earlier_watch() -> None:
    model, optimizer, first = applied(watch_every=1)
    second = apply_profile(BFLOAT16, model=model, optimizer=optimizer, watch_every=1)
    inputs, targets = next(batches())
    second.backward(nn.functional.mse_loss(second.forward(inputs), targets))
    second.step()
    assert (len(first.watched), len(second.watched)) == (0, 1)


def test_a_resumed_training_goes_on_with_its_checks() -> None:
    precision, _ = train(network(), BFLOAT16, updates=5, every=4)
    state = precision.state_dict()
    assert [each.updates for each in precision.watched] == [1, 5]
    _, _, other = applied(watch_every=4)
    other.load_state_dict(state)
    assert other.watched == precision.watched
    _, _, earlier = applied(watch_every=4)
    earlier.load_state_dict({k: v for k, v in state.items() if k != "watch"})
    assert earlier.watched == ()


def test_settings_are_refused_before_anything_is_applied() -> None:
    model = network()
    with pytest.raises(UsageError, match="watch='sometimes' given"):
        apply_profile(BFLOAT16, model=model, watch="sometimes")  # type: ignore[call-overload]
    assert "forward" not in vars(model[0])
    with pytest.raises(UsageError, match="watch_every=0 given"):
        apply_profile(replace(BFLOAT16), model=model, watch_every=0)


def flops_of_an_update(precision: Any, batch: Any) -> int:
    with FlopCounterMode(display=False) as flops:
        inputs, targets = batch
        precision.backward(nn.functional.mse_loss(precision.forward(inputs), targets))
        precision.step()
    return flops.get_total_flops()


@pytest.mark.parametrize(("doubted", "passes"), [(False, 2), (True, 4)])
def test_checks_cost_at_most_half_a_percent_of_ten_thousand_updates(
    doubted: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if doubted:  # noise is asked, and excuses it
        monkeypatch.setattr(watching, "ALLOWED_OF_OUTPUTS", 0.0)
    precision = applied()[2]
    data = batches()
    with_check, without = (flops_of_an_update(precision, next(data)) for _ in range(2))
    assert [each.problem for each in precision.watched] == [""]
    assert with_check == (1 + passes) * without > 0
    checks, last = 0, 0
    while (last := watching.next_check(last, EVERY)) <= 10_000:
        checks += 1
    assert checks * passes <= 0.005 * 10_000


def test_a_batch_that_overflows_now_and_then_is_told_although_no_check_falls_on_it() -> None:
    """An update that is skipped is no update: checks are due at numbers 1, 50 and 100."""
    now_and_then = Pace(1.0, 8, 20)
    with pytest.warns(AutoprecWarning, match="its outputs are not finite") as said:
        precision, _ = trained(
            "long batch", FLOAT16, now_and_then, watch="float32", every=2000, updates=110
        )
    assert any("is kept in float32" in str(each.message) for each in said)
    assert [each.updates for each in precision.watched] == [1, 50, 78, 81, 100]
    assert [each.updates for each in precision.watched if each.problem] == [78]


def test_many_skips_in_a_row_are_the_loss_scales_business() -> None:
    recipe = replace(FLOAT16, loss_scale=LossScale(mode="dynamic", initial=2.0**40))
    precision, _ = train(network(), recipe, every=2000, updates=60)
    assert precision.counts.skipped > 8
    assert not any(each.problem or each.action for each in precision.watched)
    assert len(precision.watched) <= 1 + precision.counts.skipped // 4 + 3


@pytest.mark.parametrize("watch", ["warn", "float32"])
def test_weights_that_are_lost_between_two_checks_are_told_of(watch: str) -> None:
    """Float32 gives what is not finite there as well, so that there is nothing to compare."""
    model, _, precision = applied(watch=watch, watch_every=2)
    data = batches()

    def update() -> None:
        inputs, targets = next(data)
        precision.backward(nn.functional.mse_loss(precision.forward(inputs), targets))
        precision.step()

    for _ in range(4):
        update()
    with torch.no_grad():
        model[2].bias[0] = torch.inf
    with pytest.warns(AutoprecWarning, match="4 updates .* weights are not finite in 2. Nothing"):
        update()
    assert [bool(each.problem) for each in precision.watched] == [False, False, True]
    assert precision.state_dict()["watch"]["float32_modules"] == []
