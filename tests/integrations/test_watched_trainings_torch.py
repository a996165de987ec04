"""Trainings by other people's trainers are checked while they go on, as our own loop's are."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy, Recipe, apply_profile
from autoprec.errors import AutoprecError, AutoprecWarning, UsageError
from autoprec.integrations.accelerate import bind
from autoprec.integrations.lightning import fabric_plugin, plugin
from tests.integrations.lightning_modules import fabric_of, module_of, pytorch_of, trainer_of
from tests.integrations.trained import loader, momentum, net, recipe_of
from tests.integrations.trainings import (
    Training,
    by_accelerate,
    by_fabric,
    by_lightning,
    by_the_trainer,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state", "without_tensorflow"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)


class Losing(nn.Module):
    """Loses the digits of an angle that grows with every batch it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(108, 16), nn.Linear(16, 3)
        self.register_buffer("size", torch.tensor(0.02))
        self.size: torch.Tensor

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.size.mul_(1.6).clamp_(max=1e9)
        return self.last(torch.sin(self.first(pixels.flatten(1) * self.size)))


class Drowning(Losing):
    """Loses the digits beside a sum of its own code that grows."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.size.mul_(1.6).clamp_(max=3000.0)
        return self.last((self.first(pixels.flatten(1)) + self.size) - self.size)


LOSING = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)

TRAINERS: list[Any] = [
    pytest.param(by_lightning, {}, marks=needs_lightning, id="Lightning"),
    pytest.param(by_fabric, {}, marks=needs_lightning, id="Fabric"),
    pytest.param(by_accelerate, {}, id="accelerate"),
    pytest.param(by_accelerate, {"flag": "bf16"}, id="accelerate with a flag"),
    pytest.param(by_the_trainer, {}, id="the Trainer"),
    pytest.param(by_the_trainer, {"flag": "bf16"}, id="the Trainer with a flag"),
]


def policies(flags: dict[str, str]) -> list[Policy]:
    """Name the policies that a training with these flags can have."""
    return [Policy.MIXED_BFLOAT16] if flags else [Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16]


@pytest.mark.parametrize(("training", "flags"), TRAINERS)
def test_a_training_with_checks_is_the_training_without_them(
    training: Training, flags: dict[str, str], tmp_path: Path
) -> None:
    for policy in policies(flags):
        runs = []
        for watch in (False, "raise"):
            model = net(0.1)
            losses, precision = training(
                model, recipe_of(policy), tmp_path, 64, watch=watch, watch_every=1, **flags
            )
            runs.append((losses, list(model.state_dict().values())))
            assert len(precision.watched) == (4 if watch else 0)
        assert runs[0][0] == runs[1][0]
        assert len(runs[0][0]) == 8
        assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
        assert not any(each.not_checked or each.problem for each in precision.watched)
        assert all(0 < each.gradient < 0.5 for each in precision.watched)


def own_first_check(recipe: Recipe) -> Any:
    model = net(0.0)
    precision = apply_profile(recipe, model=model, optimizer=momentum(model.parameters()))
    for inputs, targets in precision.batches(loader(16, 8)):
        precision.backward(nn.functional.cross_entropy(precision.forward(inputs), targets))
        precision.step()
    return precision.watched[0]


@pytest.mark.parametrize(("training", "flags"), TRAINERS)
def test_a_check_finds_what_it_finds_in_our_own_loop(
    training: Training, flags: dict[str, str], tmp_path: Path
) -> None:
    for policy in policies(flags):
        recipe = recipe_of(policy)
        expected = own_first_check(recipe)
        _, precision = training(net(0.0), recipe, tmp_path, 16, **flags)
        (check,) = precision.watched
        assert abs(check.loss) > 0
        assert check.loss == pytest.approx(expected.loss, rel=1e-3)
        assert check.outputs == pytest.approx(expected.outputs, rel=1e-3)
        assert check.gradient == pytest.approx(expected.gradient, rel=1e-2)


@pytest.mark.parametrize(("training", "flags"), TRAINERS)
def test_a_late_break_is_told(training: Training, flags: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.warns(AutoprecWarning, match=r"updates in mixed_bfloat16 .*float32") as said:
        _, precision = training(Losing(), LOSING, tmp_path, 320, watch_every=4, **flags)
    told = [each for each in said if "updates in mixed" in str(each.message)]
    assert len({str(each.message) for each in told}) == len(told)
    assert not precision.watched[0].problem
    assert any(each.action == "warn" for each in precision.watched)


@pytest.mark.parametrize(
    "training", [by_accelerate, pytest.param(by_lightning, marks=needs_lightning)]
)
def test_a_models_own_code_is_kept_in_float32(training: Training, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.warns(AutoprecWarning, match="From the next update on .* is kept in float32"):
        _, precision = training(Drowning(), LOSING, tmp_path, 320, watch="float32", watch_every=4)
    acted = [number for number, each in enumerate(precision.watched) if each.action]
    assert precision.watched[acted[0]].action == "the model's own code in float32"
    after = precision.watched[acted[-1] + 1 :]
    assert len(after) >= 2
    assert not any(each.problem for each in after)


def test_a_training_can_be_ended(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(AutoprecError, match=r"after .* updates in mixed_bfloat16"):
        by_accelerate(Losing(), LOSING, tmp_path, 320, watch="raise", watch_every=4)


def test_other_settings_are_refused() -> None:
    from accelerate import Accelerator

    with pytest.raises(UsageError, match="watch='always' given, expected 'warn'"):
        bind(Accelerator(cpu=True), LOSING, watch="always")  # type: ignore[arg-type]


@needs_lightning
def test_layers_of_the_lightning_module_itself_are_watched_where_it_calls_itself() -> None:
    pl = pytorch_of("lightning")
    losses: list[float] = []

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(108, 16), nn.Linear(16, 3)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(pixels.flatten(1)).relu())

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return momentum(self.parameters())

    def train(watch: Any) -> Any:
        torch.manual_seed(0)
        made = plugin(LOSING, package="lightning", watch=watch, watch_every=1)
        trainer_of("lightning", made, max_epochs=1).fit(Lit(), loader(32, 8))
        return made

    watched = train("raise").watched
    assert [(each.problem, each.not_checked) for each in watched] == [("", "")] * 4
    train(False)
    assert losses[:4] == losses[4:]


@needs_lightning
def test_what_mends_stays_in_evaluation_and_in_a_resumed_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = plugin(LOSING, package="lightning", watch="float32", watch_every=4)
    lit = module_of("lightning", Losing())
    trainer = trainer_of("lightning", made, max_epochs=1, default_root_dir=tmp_path)
    with pytest.warns(AutoprecWarning, match="From the next update on .* kept in float32"):
        trainer.fit(lit, loader(320, 8))
    watched = made.watched
    assert any("in float32" in each.action for each in watched)
    kept = made.state_dict()["watch"]["float32_modules"]
    assert kept
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert dtypes_while(lambda: trainer.validate(lit, loader(16, 8), verbose=False), lit.net) == {
        torch.float32
    }
    assert made.watched == watched

    again = plugin(LOSING, package="lightning", watch="float32", watch_every=4)
    other = module_of("lightning", Losing())
    resumed = trainer_of("lightning", again, max_epochs=2, default_root_dir=tmp_path)
    found = dtypes_while(
        lambda: resumed.fit(
            other, loader(320, 8), ckpt_path=tmp_path / "last.ckpt", weights_only=True
        ),
        other.net,
    )
    assert found == {torch.float32}
    assert again.watched[: len(watched)] == watched
    assert len(again.watched) > len(watched)


def dtypes_while(training: Callable[[], Any], model: Any) -> set[torch.dtype]:
    """Return in what the sine's argument was computed, in every call of the model itself."""
    found = set()
    handle = model.last.register_forward_pre_hook(lambda module, args: found.add(args[0].dtype))
    try:
        training()
    finally:
        handle.remove()
    return found


def test_accelerates_states_hold_the_checks_where_they_are_registered(tmp_path: Path) -> None:
    from accelerate import Accelerator

    runs = []
    for resumed in (False, True):
        accelerator = Accelerator(cpu=True)
        precision = bind(accelerator, LOSING, watch_every=2)
        torch.manual_seed(0)
        model = Losing()
        model, optimizer = accelerator.prepare(model, momentum(model.parameters()))
        accelerator.register_for_checkpointing(precision)
        if resumed:
            accelerator.load_state(tmp_path)
        for inputs, targets in loader(24, 8):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(tmp_path)
        runs.append(precision.watched)
        precision.detach()
        assert precision.watched == runs[-1]
    assert [each.updates for each in runs[1]] == [1, 3, 5]
    assert runs[1][:2] == runs[0]


@needs_lightning
def test_a_state_that_is_loaded_before_the_model_is_called_goes_on() -> None:
    """Fabric attaches when the model is first called, which may be after its load."""
    runs = []
    for state in (None, "loaded"):
        made = fabric_plugin(LOSING, package="lightning", watch_every=2)
        if state is not None:
            made.load_state_dict(runs[0].state_dict())
        _train_with_fabric(made)
        runs.append(made)
    assert [each.updates for each in runs[1].watched] == [1, 3, 5]
    assert runs[1].watched[:2] == runs[0].watched
    assert runs[1].loop.steps == 6


def _train_with_fabric(made: Any) -> None:
    fabric = fabric_of("lightning").Fabric(accelerator="cpu", devices=1, plugins=[made])
    torch.manual_seed(0)
    model = Losing()
    module, optimizer = fabric.setup(model, momentum(model.parameters()))
    for inputs, targets in loader(24, 8):
        fabric.backward(nn.functional.cross_entropy(module(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
