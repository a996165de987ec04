"""What else a Lightning project uses trains under the plugin as under Lightning's own precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec import Policy, Recipe
from autoprec.integrations.lightning import plugin
from tests.integrations.lightning_modules import PACKAGES, module_of, pytorch_of, trainer_of
from tests.integrations.trained import RIGHT, Net, loader, momentum, net, recipe_of, watched

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("without_tensorflow"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

LOSS = nn.functional.cross_entropy
PRECISIONS = {Policy.FLOAT32: "32-true", Policy.MIXED_BFLOAT16: "bf16-mixed"}


class Checkpointed(Net):
    """Computes its hidden layers a second time in the backward pass."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(images)).relu().mean((2, 3))
        hidden = checkpoint(self.hidden, hidden, use_reentrant=False)
        return self.head(hidden)

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.wide(self.dropout(self.layer_norm(self.exact(hidden)))).relu()


def checkpointed(lit: Any) -> Any:
    torch.manual_seed(0)
    lit.net = Checkpointed()
    return lit


def of_two_loaders(lit: Any) -> Any:
    def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
        torch.manual_seed(len(lit.losses))
        loss = sum(LOSS(lit.net(inputs), targets) for inputs, targets in batch.values())
        lit.losses.append(loss.item())
        return loss

    lit.training_step = training_step
    return lit


def without_a_loss_now_and_then(lit: Any) -> Any:
    step = lit.training_step

    def training_step(batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss

    lit.training_step = training_step
    lit.on_before_optimizer_step = lambda optimizer: None  # there may be no gradients
    return lit


def searched(lit: Any) -> Any:
    lit.lr = 0.1
    return lit


def as_it_is(lit: Any) -> Any:
    return lit


def compiled(lit: Any) -> Any:
    lit.log = lambda *args: None  # which torch.compile does not get through
    return torch.compile(lit, backend="eager")


def fit(trainer: Any, lit: Any) -> None:
    trainer.fit(lit, loader(64, 8), loader(16, 8))


def validate_first(trainer: Any, lit: Any) -> None:
    trainer.validate(lit, loader(16, 8), verbose=False)
    fit(trainer, lit)
    trainer.validate(lit, loader(16, 8), verbose=False)


def fit_with_two_loaders(trainer: Any, lit: Any) -> None:
    trainer.fit(lit, {"first": loader(64, 8), "second": loader(64, 8)})


def fit_twice(trainer: Any, lit: Any) -> None:
    fit(trainer, lit)
    trainer.fit_loop.max_epochs += 1
    fit(trainer, lit)


def callback(name: str, *args: Any, **settings: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda pl: {"callbacks": [getattr(pl.callbacks, name)(*args, **settings)]}


def settings(**given: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda pl: given


FEATURES: dict[str, tuple[Any, Any, Any]] = {
    "gradient checkpointing": (checkpointed, settings(), fit),
    "two loaders": (of_two_loaders, settings(), fit_with_two_loaders),
    "steps without a loss": (without_a_loss_now_and_then, settings(), fit),
    "a validation before and after": (as_it_is, settings(), validate_first),
    "two trainings": (as_it_is, settings(), fit_twice),
    "a compiled module": (compiled, settings(), fit),
    "an average of the weights": (as_it_is, callback("WeightAveraging"), fit),
    "stochastic weight averaging": (
        as_it_is,
        callback("StochasticWeightAveraging", 0.05, swa_epoch_start=1),
        fit,
    ),
    "a search of the learning rate": (
        searched,
        callback("LearningRateFinder", num_training_steps=4),
        fit,
    ),
    "a schedule of accumulation": (
        as_it_is,
        callback("GradientAccumulationScheduler", {0: 1, 1: 2}),
        fit,
    ),
    "one batch again and again": (as_it_is, settings(overfit_batches=2), fit),
    "a part of the batches": (as_it_is, settings(limit_train_batches=3), fit),
    "a trial of three batches": (as_it_is, settings(fast_dev_run=3), fit),
    "clipping by value": (as_it_is, settings(gradient_clip_algorithm="value"), fit),
}


def trained(
    package: str, feature: str, made: Any, folder: Path, **precision: Any
) -> tuple[list[float], Any]:
    change, settings_of, run = FEATURES[feature]
    lit = change(module_of(package))
    trainer = trainer_of(
        package, made, max_epochs=2, default_root_dir=folder,
        **settings_of(pytorch_of(package)), **precision,
    )  # fmt: skip
    run(trainer, lit)
    return lit.losses, lit.net


@pytest.mark.parametrize("policy", PRECISIONS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_trains_as_under_lightnings_own_precision(
    feature: str, policy: Policy, tmp_path: Path
) -> None:
    package = PACKAGES[list(FEATURES).index(feature) % 2]
    own = trained(package, feature, None, tmp_path, precision=PRECISIONS[policy])
    made = plugin(Recipe(policy=policy, batch_size=8), package=package, watch=False)
    ours = trained(package, feature, made, tmp_path)
    if feature == "two loaders" and policy.mixed:  # autocast's cache adds up 16-bit gradients
        assert ours[0] == pytest.approx(own[0], rel=2e-2)
        return
    assert ours[0] == own[0] != []
    pairs = zip(ours[1].state_dict().values(), own[1].state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "a compiled module"])
def test_a_feature_leaves_the_whole_profile_in_force(feature: str, tmp_path: Path) -> None:
    package = PACKAGES[list(FEATURES).index(feature) % 2]
    recipe = recipe_of(Policy.MIXED_BFLOAT16, accumulation_steps=1)
    change, settings_of, run = FEATURES[feature]
    lit = change(module_of(package))
    made = plugin(recipe, package=package, watch=False)
    trainer = trainer_of(
        package, made, max_epochs=2, default_root_dir=tmp_path, **settings_of(pytorch_of(package))
    )
    with watched(lit.net) as seen:
        run(trainer, lit)
    assert seen.of("train") == RIGHT
    if seen.of("eval"):
        assert seen.of("eval") == RIGHT
    assert seen.columns == {32}
    assert seen.strides == {True}
    assert [name for name, each in lit.net.named_modules() if "forward" in vars(each)] == []


def test_predicting_alone_runs_under_the_profile() -> None:
    lit = module_of("lightning")
    made = plugin(recipe_of(Policy.MIXED_BFLOAT16), package="lightning")
    with watched(lit.net) as seen:
        trainer_of("lightning", made).predict(lit, loader(16, 8))
    assert seen.of("eval") == RIGHT


def test_micro_batches_without_a_loss_are_no_part_of_their_updates_mean() -> None:
    """5 micro-batches, 4 to an update; two of the first four have no loss."""
    lit = module_of("lightning", model=net(0.0))
    step = lit.training_step

    def training_step(batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = step(batch, batch_idx)
        return None if batch_idx in (1, 3) else loss

    lit.training_step = training_step
    made = plugin(Recipe(batch_size=8, accumulation_steps=4), package="lightning")
    trainer_of("lightning", made, max_epochs=1, gradient_clip_val=None).fit(lit, loader(40, 8))
    model, norms = net(0.0), []
    optimizer = momentum(model.parameters())
    batches = list(loader(40, 8))
    for update in ((0, 2), (4,)):
        for number in update:
            LOSS(model(batches[number][0]), batches[number][1]).div(len(update)).backward()
        found = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack(found).norm()))
        optimizer.step()
        optimizer.zero_grad()
    assert lit.norms == pytest.approx(norms, rel=1e-5)
