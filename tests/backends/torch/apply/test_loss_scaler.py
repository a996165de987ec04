"""The loss scaler: torch's own numbers, plus a floor, a fixed mode and counts."""

from __future__ import annotations

import logging
import pickle
import warnings

import pytest
import torch
from torch import nn

from autoprec.backends.torch.apply.loss_scaler import LossScaler
from autoprec.core.recipe import LossScale
from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.torch.operated import FLOAT16, apply, mlp

pytestmark = pytest.mark.torch

INF = float("inf")


def one_weight(value: float = 1.0) -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.tensor([value]))
    return weight, torch.optim.SGD([weight], lr=0.5)


def drive(
    scaler: torch.amp.GradScaler, gradients: list[float], lr: float = 0.5
) -> list[tuple[float, int, float]]:
    """Step through `gradients` and return scale, growth counter and weight after each."""
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=lr)
    seen = []
    for gradient in gradients:
        loss = (weight * gradient).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker(), weight.item()))
    return seen


GRADIENTS = [0.5, INF, 0.25, 0.5, 0.5, float("nan"), INF, 0.1, 0.1, 0.1, 0.1]


def test_where_no_scale_was_tuned_it_begins_and_grows_as_torchs() -> None:
    theirs = torch.amp.GradScaler("cpu")
    assert LossScale().initial == theirs.get_scale()
    assert LossScale().growth_interval == theirs.get_growth_interval()


def test_a_dynamic_scale_follows_torchs_scaler_bit_for_bit() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    ours = LossScaler("cpu", LossScale(initial=256.0, growth_interval=3))
    assert drive(ours, GRADIENTS) == drive(theirs, GRADIENTS)
    assert ours.counts.steps == 8
    assert ours.counts.skipped == 3
    assert ours.counts.scale_drops == 3
    assert ours.counts.scale_growths == 2


@pytest.mark.parametrize("factor", [2.0, 1.7])
def test_the_scale_followed_on_the_host_is_the_devices(factor: float) -> None:
    scaler = LossScaler("cpu", LossScale(initial=300.0, growth_interval=1))
    scaler.set_growth_factor(factor)
    scaler.set_backoff_factor(1 / 3)
    for gradient in GRADIENTS:
        drive(scaler, [gradient])
        assert scaler._host_scale == scaler.get_scale()


def test_the_scale_never_grows_to_infinity() -> None:
    scaler = LossScaler("cpu", LossScale(initial=2.0**126, growth_interval=1))
    drive(scaler, [0.0, 0.0, 0.0])
    assert scaler.get_scale() == 2.0**127 == scaler._host_scale


def test_under_the_floor_the_scale_stays_and_the_warning_names_the_step() -> None:
    scaler = LossScaler("cpu", LossScale(initial=8.0, floor=4.0))
    told = r"step 2: .* at the loss scale 4, its floor\. .* a lower floor helps"
    with pytest.warns(AutoprecWarning, match=told):
        seen = drive(scaler, [0.5, INF, INF])
    assert [scale for scale, _, _ in seen] == [8.0, 4.0, 4.0]
    assert scaler.counts.floor_hits == 1


def test_skips_are_counted_at_the_floor_and_warned_of_once() -> None:
    scaler = LossScaler("cpu", LossScale(initial=4.0, floor=4.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drive(scaler, [INF] * 4)
    assert scaler.counts.skipped == 4
    assert scaler.counts.scale_drops == 0
    assert len(caught) == 1


def test_a_scale_below_the_floor_never_rises_by_a_skip() -> None:
    scaler = LossScaler("cpu", LossScale(initial=64.0, floor=16.0))
    scaler.load_state_dict(LossScaler("cpu", LossScale(initial=2.0)).state_dict())
    with pytest.warns(AutoprecWarning):
        drive(scaler, [INF])
    assert scaler.get_scale() == 2.0


def test_a_fixed_scale_skips_but_never_changes() -> None:
    scaler = LossScaler("cpu", LossScale(mode="fixed", initial=32.0, growth_interval=1))
    seen = drive(scaler, [0.5, INF, 0.5, 0.5])
    assert [scale for scale, _, _ in seen] == [32.0] * 4
    assert seen[0][2] == seen[1][2]
    assert scaler.counts.skipped == 1
    assert scaler.counts.steps == 3


def test_a_disabled_scaler_passes_through_and_counts() -> None:
    scaler = LossScaler("cpu", None)
    weight, optimizer = one_weight()
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.unscale_once_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.5
    assert scaler.counts.steps == 1
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0


def test_detecting_skips_makes_no_synchronisation_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensor.item is what waits for a device: GradScaler calls it once a step; so does ours."""
    calls = 0
    item = torch.Tensor.item

    def counted(tensor: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        return item(tensor)

    def steps(scaler: torch.amp.GradScaler) -> int:
        nonlocal calls
        weight, optimizer = one_weight()
        calls = 0
        for gradient in (0.5, INF, INF, 0.5):
            scaler.scale((weight * gradient).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return calls

    monkeypatch.setattr(torch.Tensor, "item", counted)
    theirs = steps(torch.amp.GradScaler("cpu"))
    assert theirs == 4
    assert steps(LossScaler("cpu", LossScale())) == theirs
    assert steps(LossScaler("cpu", LossScale(mode="fixed"))) == theirs
    with pytest.warns(AutoprecWarning):
        assert steps(LossScaler("cpu", LossScale(initial=1.0, floor=1.0))) == theirs


def test_a_fused_optimizer_that_unscales_itself_says_that_it_skipped() -> None:
    scaler = LossScaler("cpu", LossScale(initial=16.0))
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    changed = []
    for gradient in (1.0, INF, 1.0):
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed.append(scaler.changed_weights)
    assert changed == [True, False, True]
    assert weight.item() == 0.0
    assert scaler.get_scale() == 8.0


def test_several_optimizers_one_skip_halves_once() -> None:
    scaler = LossScaler("cpu", LossScale(initial=16.0))
    first, first_optimizer = one_weight()
    second, second_optimizer = one_weight()
    scaler.scale(first.sum() + (second * INF).sum()).backward()
    scaler.step(first_optimizer)
    scaler.step(second_optimizer)
    scaler.update()
    assert (first.item(), second.item()) == (0.5, 1.0)
    assert scaler.get_scale() == 8.0
    assert (scaler.counts.steps, scaler.counts.skipped) == (1, 1)
    assert scaler.changed_weights


def test_an_optimizer_without_gradients_is_left_alone() -> None:
    scaler = LossScaler("cpu", LossScale(initial=16.0))
    first, first_optimizer = one_weight()
    _, idle = one_weight()
    scaler.scale(first.sum()).backward()
    scaler.unscale_once_(idle)
    scaler.step(idle)
    scaler.step(first_optimizer)
    scaler.update()
    assert first.item() == 0.5


def test_unscaling_happens_exactly_once() -> None:
    scaler = LossScaler("cpu", LossScale(initial=16.0))
    weight, optimizer = one_weight()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_once_(optimizer)
    scaler.unscale_once_(optimizer)
    assert weight.grad is not None
    assert weight.grad.item() == 1.0


def test_states_travel_between_this_scaler_and_torchs() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=5)
    drive(theirs, [0.5, INF, 0.5, 0.5])
    ours = LossScaler("cpu", LossScale())
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    assert drive(ours, GRADIENTS) == drive(theirs, GRADIENTS)
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == ours.state_dict()


def test_a_state_is_restored_after_the_scale_tensor_exists() -> None:
    scaler = LossScaler("cpu", LossScale(initial=64.0))
    drive(scaler, [0.5, INF])
    state = scaler.state_dict()
    drive(scaler, [INF, 0.5])
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert scaler._host_scale == state["scale"]


def test_an_empty_state_leaves_the_scale_as_it_is() -> None:
    scaler = LossScaler("cpu", LossScale(initial=64.0))
    scaler.load_state_dict({})
    assert scaler.get_scale() == 64.0


def test_a_new_scale_given_by_hand_is_followed() -> None:
    scaler = LossScaler("cpu", LossScale(initial=64.0))
    drive(scaler, [0.5])
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0 == scaler._host_scale


def test_it_pickles() -> None:
    scaler = LossScaler("cpu", LossScale(initial=64.0))
    drive(scaler, [0.5, INF])
    again = pickle.loads(pickle.dumps(scaler))
    assert again.state_dict() == scaler.state_dict()
    assert again.counts == scaler.counts


def test_scale_changes_are_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    scaler = LossScaler("cpu", LossScale(initial=64.0, growth_interval=2))
    with caplog.at_level(logging.INFO, logger="autoprec"):
        drive(scaler, [INF, 0.5, 0.5])
    assert caplog.messages == [
        "step 0 skipped: gradients not finite; loss scale 64 -> 32",
        "step 2: loss scale 32 -> 64",
    ]


def complex_weight() -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))
    return weight, torch.optim.SGD([weight], lr=0.5)


def complex_gradient(weight: torch.Tensor, factor: complex) -> torch.Tensor:
    return torch.view_as_real(weight * torch.tensor(factor)).sum()


def test_complex_gradients_are_unscaled_and_clipped_like_real_ones() -> None:
    results = []
    for scale in (None, LossScale(initial=1024.0)):
        scaler = LossScaler("cpu", scale)
        weight, optimizer = complex_weight()
        real = nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [real]})
        scaler.scale(complex_gradient(weight, 2 - 1j) + 3 * real.sum()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_([weight, real], 1.0)
        assert norm.item() == pytest.approx(38**0.5)
        scaler.step(optimizer)
        scaler.update()
        results.append((weight.detach().clone(), real.detach().clone()))
    for exact, scaled in zip(*results, strict=True):
        assert torch.equal(exact, scaled)


@pytest.mark.parametrize("part", [complex(INF, 0), complex(0, INF), complex(0, float("nan"))])
def test_an_overflow_of_either_part_skips_the_step(part: complex) -> None:
    scaler = LossScaler("cpu", LossScale(initial=16.0))
    weight, optimizer = complex_weight()
    for grad in (1 + 1j, part, 1 + 1j):
        weight.grad = torch.full_like(weight, 16 * torch.tensor(grad))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.counts.steps, scaler.counts.skipped) == (2, 1)
    assert torch.equal(weight.detach(), torch.tensor([-0.5 + 0.5j, 1.5 - 2.5j]))


def test_sparse_complex_gradients_are_unscaled_too() -> None:
    scaler = LossScaler("cpu", LossScale(initial=16.0))
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rows = scaler.scale(torch.full((2, 2), 1 + 1j))
    weight.grad = torch.sparse_coo_tensor([[1, 3]], rows, (4, 2), check_invariants=True)
    scaler.step(optimizer)
    scaler.update()
    expected = torch.ones(4, 2, dtype=torch.complex64)
    expected[[1, 3]] -= 1 + 1j
    assert torch.equal(weight.detach(), expected)


def test_the_warning_at_the_smallest_scale_offers_no_lower_floor() -> None:
    smallest = 2.0**-24
    scaler = LossScaler("cpu", LossScale(initial=smallest, floor=smallest))
    with pytest.warns(AutoprecWarning, match="forward pass overflows") as caught:
        drive(scaler, [INF])
    assert "lower floor" not in str(caught[0].message)


def test_a_lower_floor_trains_where_only_the_backward_pass_overflows() -> None:
    """The warning's advice: a gradient of 2**20 fits in float16 at a scale of 2**-5."""

    def train(floor: float) -> LossScaler:
        scaler = LossScaler("cpu", LossScale(initial=1.0, floor=floor))
        weight = nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.SGD([weight], lr=2.0**-30)
        for _ in range(8):
            scaler.scale(weight.half().float().sum() * 2.0**20).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler

    with pytest.warns(AutoprecWarning, match="if the loss is finite"):
        assert train(1.0).counts.steps == 0
    assert train(2.0**-8).counts.skipped == 5


def test_a_closure_under_a_loss_scale_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    scaler = LossScaler("cpu", LossScale(initial=8.0))
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    for given in ((lambda: 0.0,), ()):
        with pytest.raises(UsageError, match="LBFGS was given a closure under a loss scale"):
            scaler.step(optimizer, *given, **({} if given else {"closure": lambda: 0.0}))


def test_a_closure_of_none_is_none() -> None:
    model = mlp()
    scaler = LossScaler("cpu", LossScale(initial=8.0))
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    before = [each.detach().clone() for each in model.parameters()]
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1), None)  # as accelerate does
    changed = zip(model.parameters(), before, strict=True)
    assert not all(torch.equal(now, then) for now, then in changed)


def test_float16_weights_are_refused_with_what_to_leave_out() -> None:
    model = mlp()
    precision = apply(FLOAT16, model, torch.optim.SGD(model.parameters(), 0.1))
    precision.backward(model.half()(torch.ones(4, 6).half()).float().mean())
    with pytest.raises(UsageError, match=r"weights stay in float32.*Leave out model\.half\(\)"):
        precision.step()
