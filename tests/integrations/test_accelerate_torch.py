"""A profile bound to accelerate's Accelerator, in a loop as people write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch import nn

from autoprec import Policy, Recipe
from autoprec.core.recipe import LossScale
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.accelerate import bind
from tests.integrations.trained import (
    OVERFLOWS,
    POLICIES,
    RIGHT,
    SCALE,
    SCALES,
    adam,
    images,
    loader,
    momentum,
    net,
    recipe_of,
    reference,
    relative,
    watched,
    wrapped_modules,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]


def train(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    batches: Any,
    *,
    epochs: int,
    clip: float | None = 1.0,
    losses: list[float] | None = None,
) -> list[float]:
    """Train as accelerate's documentation shows it."""
    losses = [] if losses is None else losses
    for _ in range(epochs):
        for inputs, targets in batches:
            torch.manual_seed(len(losses))
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_loop_trains_what_our_own_trains(policy: Policy, optimizer_first: bool) -> None:
    recipe = recipe_of(policy)
    losses, expected = reference(recipe, images(80), epochs=4)
    accelerator = Accelerator(cpu=True)
    precision = bind(accelerator, recipe, watch=False)
    model = net()
    before = {name: id(each) for name, each in model.named_parameters()}
    optimizer = momentum(model.parameters())
    batches = accelerator.prepare(loader(80, precision.batch_size))
    if optimizer_first:
        optimizer, model = accelerator.prepare(optimizer, model)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    with watched(model) as seen:
        found = train(accelerator, model, optimizer, batches, epochs=4)
        model.eval()
        outputs = model(images(8)[0])
    tolerance = 1e-2 if policy.mixed else 1e-6  # the loss is outside autocast here
    assert found == pytest.approx(losses, rel=tolerance)
    assert relative(model, expected) < (3e-2 if policy.mixed else 1e-6)
    assert precision.steps == 20
    assert outputs.dtype is torch.float32
    if policy is Policy.MIXED_BFLOAT16:
        assert seen.of("train") == RIGHT
        assert seen.of("eval") == RIGHT
        assert seen.columns == {32}
        assert seen.strides == {True}
    assert precision.ran is not None
    assert precision.ran.problems(recipe) == ()
    assert precision.ran.batch == 8
    assert {name: id(each) for name, each in model.named_parameters()} == before
    assert accelerator.unwrap_model(model) is model
    precision.detach()
    assert wrapped_modules(model) == []


@pytest.mark.parametrize(("epochs", "clip"), [(1, None), (2, None), (2, 0.05)])
def test_the_last_partial_update_is_the_mean_of_what_it_holds(
    epochs: int, clip: float | None
) -> None:
    recipe = recipe_of(Policy.FLOAT32, accumulation_steps=3)
    losses, expected = reference(recipe, images(56), epochs=epochs, dropout=0.0, clip=clip)
    accelerator = Accelerator(cpu=True)
    bind(accelerator, recipe)
    model = net(0.0)
    model, optimizer, batches = accelerator.prepare(
        model, momentum(model.parameters()), loader(56, 8)
    )
    found = train(accelerator, model, optimizer, batches, epochs=epochs, clip=clip)
    assert found == pytest.approx(losses, rel=1e-6)
    assert relative(model, expected) < 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_are_skipped_and_reported(fused: bool) -> None:
    knobs = {"fused_optimizer": True} if fused else {}
    recipe = recipe_of(Policy.MIXED_FLOAT16, accumulation_steps=1, loss_scale=SCALE, knobs=knobs)
    accelerator = Accelerator(cpu=True)
    precision = bind(accelerator, recipe)
    model = net()
    model, optimizer = accelerator.prepare(model, adam(model.parameters()))
    updates: list[int] = []
    scales: list[float] = []
    reported: list[bool] = []
    norms: list[float] = []

    def overflow(grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.inf) if len(updates) in OVERFLOWS else grad

    def run() -> None:
        for inputs, targets in loader(80, 8):
            updates.append(1)
            before = model.head.weight.detach().clone()
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
                optimizer.step()
                optimizer.zero_grad()
            scales.append(accelerator.scaler.get_scale())
            reported.append(accelerator.optimizer_step_was_skipped)
            assert torch.equal(before, model.head.weight) == (len(updates) in OVERFLOWS)

    model.head.bias.register_hook(overflow)
    with pytest.warns(AutoprecWarning, match="256, its floor"):
        run()
    assert scales == SCALES
    assert [n + 1 for n, skipped in enumerate(reported) if skipped] == list(OVERFLOWS)
    assert precision.skipped == 4
    assert 0.01 < norms[0] < 100  # not 1024 times that


def test_a_saved_state_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    scale = LossScale(initial=1024.0, growth_interval=4)
    recipe = recipe_of(Policy.MIXED_FLOAT16, loss_scale=scale)
    straight: list[float] = []
    for resumed in (False, True):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True)
        precision = bind(accelerator, recipe)
        model = net(0.0)
        model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
        batches = loader(80, 8)
        if resumed:
            accelerator.load_state(tmp_path / "state")
            assert accelerator.scaler.get_scale() == 4096.0
            found = train(accelerator, model, optimizer, batches, epochs=2)
            assert found == straight
        else:
            train(accelerator, model, optimizer, batches, epochs=2)
            accelerator.save_state(tmp_path / "state")
            straight = train(accelerator, model, optimizer, batches, epochs=2)
            state = torch.load(tmp_path / "state" / "scaler.pt", weights_only=True)
            plain = torch.amp.GradScaler("cpu")
            plain.load_state_dict(state)
            assert plain.state_dict() == state
        assert precision.scaler.get_scale() == 1024.0 * 2**5
        precision.detach()


@pytest.mark.parametrize("found", ["named", "found by accelerate"])
def test_a_float32_checkpoint_starts_at_the_profiles_scale(tmp_path: Path, found: str) -> None:
    """And a state without its model is the error that it is."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=found != "named")
    folder = str(tmp_path / "state") if found == "named" else None
    weights: list[Any] = []
    for policy in (Policy.FLOAT32, Policy.MIXED_FLOAT16):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, project_config=project)
        precision = bind(accelerator, recipe_of(policy))
        model = net(0.0)
        model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
        if policy is Policy.FLOAT32:
            train(accelerator, model, optimizer, loader(32, 8), epochs=1)
            accelerator.save_state(folder)
            weights.append({k: v.clone() for k, v in model.state_dict().items()})
            continue
        accelerator.load_state(folder)
        assert accelerator.scaler is precision.scaler
        assert accelerator.scaler.get_scale() == 1024.0
        loaded = model.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in weights[0].items())
        assert optimizer.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
        train(accelerator, model, optimizer, loader(32, 8), epochs=1)
        assert precision.steps == 2
        for path in tmp_path.rglob("model.safetensors"):
            path.unlink()
        with pytest.raises(FileNotFoundError, match="pytorch_model"):
            accelerator.load_state(folder)
        assert accelerator.scaler is precision.scaler


def test_binding_one_accelerator_leaves_another_as_it_is() -> None:
    bound, other = Accelerator(cpu=True), Accelerator(cpu=True)
    names = ("prepare", "prepare_model", "backward", "accumulate", "unscale_gradients")
    bind(bound, recipe_of(Policy.MIXED_BFLOAT16))
    assert all(name in vars(bound) for name in names)
    assert all(name not in vars(other) for name in names)
    bind(bound, recipe_of(Policy.FLOAT32))  # anew: the first one's methods are given back
    assert vars(bound)["prepare"].__self__.own["prepare"].__self__ is bound
    assert vars(bound)["prepare"].__self__.own["prepare"].__func__ is Accelerator.prepare


def test_switched_off_the_loop_trains_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC", "off")
    runs = []
    for bound in (True, False):
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if bound else 2)
        if bound:
            bind(accelerator, recipe_of(Policy.MIXED_BFLOAT16))
        model = net()
        model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
        losses = train(accelerator, model, optimizer, loader(64, 8), epochs=2)
        runs.append((losses, model.state_dict()))
    assert runs[0][0] == runs[1][0]
    pairs = zip(runs[0][1].values(), runs[1][1].values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_loop_that_does_not_accumulate_is_told() -> None:
    accelerator = Accelerator(cpu=True)
    bind(accelerator, recipe_of(Policy.MIXED_BFLOAT16))
    model = net()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    inputs, targets = images(8)
    accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    with pytest.warns(AutoprecWarning, match=r"made of 1 micro-batches, .* accumulates 2 of 8"):
        optimizer.step()


def test_an_island_whose_weights_are_used_without_calling_it_is_named() -> None:
    class Fused(nn.Module):
        """Uses its head's weight as fused losses do."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.body(inputs), self.head.weight)

    accelerator = Accelerator(cpu=True)
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, float32_modules=("head",))
    bind(accelerator, recipe)
    model = Fused()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    accelerator.backward(model(torch.ones(4, 6)).square().mean())
    with pytest.warns(AutoprecWarning, match="head did not run"):
        optimizer.step()


def test_a_second_model_is_named_and_left_alone() -> None:
    accelerator = Accelerator(cpu=True)
    bind(accelerator, recipe_of(Policy.MIXED_BFLOAT16))
    accelerator.prepare(net())
    with pytest.warns(AutoprecWarning, match="Linear, prepared later, trains in float32"):
        other = accelerator.prepare(nn.Linear(3, 3))
    assert other(torch.ones(2, 3)).dtype is torch.float32


def test_what_was_prepared_before_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net())
    with pytest.raises(UsageError, match=r"prepared its model already.*before prepare"):
        bind(accelerator, recipe_of(Policy.FLOAT32))


def test_accelerates_own_precision_must_be_the_profiles() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(UsageError, match=r"told bf16 and the profile's policy is float32.*leave"):
        bind(accelerator, recipe_of(Policy.FLOAT32))
    recipe = recipe_of(Policy.MIXED_BFLOAT16)
    bind(accelerator, recipe, watch=False)
    model = net()
    model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
    with watched(model) as seen:
        train(accelerator, model, optimizer, loader(32, 8), epochs=1)
    assert seen.of("train") == RIGHT
