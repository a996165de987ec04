"""A profile as Lightning's precision plugin: Trainer and Fabric, of both packages."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import Policy, Recipe
from autoprec.core.recipe import LossScale
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.lightning import fabric_plugin, plugin
from tests.integrations.lightning_modules import (
    PACKAGES,
    module_of,
    pytorch_of,
    trainer_of,
)
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

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("without_tensorflow"),
    pytest.mark.filterwarnings("default"),  # Lightning's own
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("policy", POLICIES)
def test_automatic_optimization_trains_what_our_own_loop_trains(
    package: str, policy: Policy
) -> None:
    """20 updates of two micro-batches with clipping, an island, padding and channels_last."""
    recipe = recipe_of(policy)
    losses, model = reference(recipe, images(80), epochs=4)
    made = plugin(recipe, package=package)
    lit = module_of(package, schedule=True)
    trainer = trainer_of(package, made, max_steps=20, max_epochs=-1)
    trainer.fit(lit, loader(80, made.batch_size))
    assert lit.losses == pytest.approx(losses, rel=1e-6)
    assert relative(lit.net, model) < 1e-5
    assert trainer.global_step == 20
    assert lit.planned == 20
    assert len(lit.rates) == 20
    assert made.loop.steps == 20
    assert made.loop.ran is None  # detached
    if policy.mixed:
        plain, _ = reference(recipe_of(Policy.FLOAT32), images(80), epochs=4)
        assert max(abs(a / b - 1) for a, b in zip(plain, losses, strict=True)) > 1e-4


@pytest.mark.parametrize("package", PACKAGES)
def test_islands_padding_and_layout_hold_in_every_phase(package: str) -> None:
    made = plugin(recipe_of(Policy.MIXED_BFLOAT16), package=package, watch=False)
    lit = module_of(package)
    before = {name: id(each) for name, each in lit.named_parameters()}
    with watched(lit.net) as seen:
        trainer = trainer_of(package, made, max_epochs=1, gradient_clip_val=None)
        trainer.fit(lit, loader(32, 8), loader(16, 8))
        assert wrapped_modules(lit) == []
        trainer.validate(lit, loader(16, 8), verbose=False)
        outputs = trainer.predict(lit, loader(16, 8))
    assert seen.of("train") == RIGHT
    assert seen.of("eval") == RIGHT
    assert seen.columns == {32}
    assert seen.strides == {True}
    assert all(each.dtype is torch.float32 for each in outputs)
    assert {name: id(each) for name, each in lit.named_parameters()} == before
    assert list(lit.net.state_dict()) == list(net().state_dict())


def test_what_ran_is_known_after_the_first_update() -> None:
    made = plugin(recipe_of(Policy.MIXED_BFLOAT16), package="lightning")

    class Look(pytorch_of("lightning").Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.ran = made.loop.ran

    look = Look()
    trainer_of("lightning", made, max_epochs=1, callbacks=[look]).fit(
        module_of("lightning"), loader(32, 8)
    )
    assert look.ran.dtype == "bfloat16"
    assert look.ran.islands == ("exact",)
    assert look.ran.padded == ("wide",)
    assert look.ran.memory_format == "channels_last"
    assert look.ran.batch == 8


def test_images_are_laid_out_for_a_module_that_is_never_called_itself() -> None:
    pl = pytorch_of("lightning")
    seen = []

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            seen.append(batch[0].is_contiguous(memory_format=torch.channels_last))
            outputs = self.head(self.conv(batch[0]).mean((2, 3)))
            return nn.functional.cross_entropy(outputs, batch[1])

        def configure_optimizers(self) -> Any:
            return momentum(self.parameters())

    made = plugin(Recipe(batch_size=8, memory_format="channels_last"), package="lightning")
    trainer_of("lightning", made, max_epochs=1).fit(Lit(), loader(16, 8))
    assert seen == [True, True]


def test_a_loader_of_another_batch_is_named_once() -> None:
    made = plugin(recipe_of(Policy.MIXED_BFLOAT16), package="lightning")
    trainer = trainer_of("lightning", made, max_epochs=1)
    with pytest.warns(AutoprecWarning, match="batches of 4 .* checked with 8") as found:
        trainer.fit(module_of("lightning"), loader(32, 4))
    assert len([each for each in found if each.category is AutoprecWarning]) == 1


class Twice(nn.Module):
    """Uses its weights without gradients first, as a contrast with its own past."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(inputs)


@pytest.mark.parametrize("held", [True, False], ids=["a part", "the LightningModule itself"])
def test_a_call_without_gradients_in_the_step_takes_no_gradients(held: bool) -> None:
    pl = pytorch_of("lightning")
    gradients = []

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            if held:
                self.net = Twice()
            else:
                self.encoder, self.other = nn.Linear(8, 3), nn.Linear(3, 3)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs = batch[0].flatten(1)[:, :8]
            called = self.net if held else self.encoder
            with torch.no_grad():
                target = called(inputs)
            return (called(inputs) - target.float() + 1).square().mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            owner = self.net if held else self
            assert made.loop.attached.root is owner
            gradients.append(owner.encoder.weight.grad is not None)

        def configure_optimizers(self) -> Any:
            return momentum(self.parameters())

    made = plugin(Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8), package="lightning")
    trainer_of("lightning", made, max_epochs=1).fit(Lit(), loader(32, 8))
    assert gradients == [True] * 4


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_last_partial_update_of_an_epoch_is_the_mean_of_what_it_holds(epochs: int) -> None:
    """7 micro-batches, 3 to an update: the third update holds one."""
    recipe = recipe_of(Policy.FLOAT32, accumulation_steps=3, memory_format="contiguous")
    losses, model = reference(recipe, images(56), epochs=epochs, dropout=0.0)
    lit = module_of("lightning", dropout=0.0)
    made = plugin(recipe, package="lightning")
    trainer = trainer_of("lightning", made, max_epochs=epochs)
    trainer.fit(lit, loader(56, 8))
    assert trainer.global_step == 3 * epochs
    assert lit.losses == pytest.approx(losses, rel=1e-6)
    assert relative(lit.net, model) < 1e-6


def test_a_partial_update_is_a_mean_before_it_is_clipped() -> None:
    recipe = recipe_of(Policy.FLOAT32, accumulation_steps=4)
    found = []

    class Look(pytorch_of("lightning").Callback):  # type: ignore[misc]
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms = [p.grad.norm() for p in module.parameters() if p.grad is not None]
            found.extend([float(torch.stack(norms).norm())] if norms else [])

    lit = module_of("lightning", dropout=0.0)
    made = plugin(recipe, package="lightning")
    trainer = trainer_of(
        "lightning", made, max_epochs=1, gradient_clip_val=1e-3, callbacks=[Look()]
    )
    trainer.fit(lit, loader(8, 8))
    assert trainer.global_step == 1
    norm = lit.norms[0]  # before clipping: the gradient of the one batch
    model = net(0.0)
    inputs, targets = images(8)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    expected = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert norm == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_are_skipped_and_the_scale_follows_its_rule(fused: bool) -> None:
    knobs = {"fused_optimizer": True} if fused else {}
    recipe = recipe_of(Policy.MIXED_FLOAT16, accumulation_steps=1, loss_scale=SCALE, knobs=knobs)
    made = plugin(recipe, package="lightning")
    lit = module_of("lightning", optimizer=adam, schedule=True)
    scales, weights, update = [], [], [0]

    def overflow(grad: torch.Tensor) -> torch.Tensor:
        update[0] += 1
        return torch.full_like(grad, torch.inf) if update[0] in OVERFLOWS else grad

    lit.net.head.bias.register_hook(overflow)

    class Look(pytorch_of("lightning").Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            scales.append(made.loop.scaler.get_scale())
            weights.append(lit.net.head.weight.detach().clone())

    trainer = trainer_of("lightning", made, max_steps=10, max_epochs=-1, callbacks=[Look()])
    with pytest.warns(AutoprecWarning, match="256, its floor"):
        trainer.fit(lit, loader(80, 8))
    assert scales == SCALES
    assert made.skipped == 4
    assert made.loop.scaler.counts.floor_hits == 2
    unchanged = [n for n in range(1, 10) if torch.equal(weights[n], weights[n - 1])]
    assert [n + 1 for n in unchanged] == list(OVERFLOWS)
    assert trainer.global_step == 10  # Lightning counts skipped updates
    assert len(lit.rates) == 10
    assert 0.01 < lit.norms[0] < 100  # not 1024 times that


def straight(folder: Path, recipe: Recipe, **settings: Any) -> tuple[Any, Any, Any]:
    made = plugin(recipe, package="lightning")
    lit = module_of("lightning", dropout=0.0)
    trainer = trainer_of("lightning", made, max_epochs=-1, default_root_dir=folder, **settings)
    return made, lit, trainer


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """All batches are alike, because Lightning begins a loader that it resumes from its start."""
    recipe = recipe_of(
        Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=1024.0, growth_interval=4)
    )
    inputs, targets = images(8)
    data = TensorDataset(inputs.repeat(80, 1, 1, 1), targets.repeat(80))
    each_ninth = pytorch_of("lightning").callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=9, save_top_k=-1, filename="{step}"
    )
    _, lit, trainer = straight(
        tmp_path, recipe, max_steps=20, enable_checkpointing=True, callbacks=[each_ninth]
    )
    trainer.fit(lit, DataLoader(data, batch_size=8))
    whole = lit.losses
    path = tmp_path / "step=9.ckpt"
    assert torch.load(path, weights_only=True)["AutoprecPrecision"]["scaler"]["scale"] == 4096.0
    made, lit, trainer = straight(tmp_path, recipe, max_steps=20)
    trainer.fit(lit, DataLoader(data, batch_size=8), ckpt_path=path, weights_only=True)
    assert lit.losses == whole[18:]
    assert made.loop.steps == 20
    assert made.loop.scaler.get_scale() == 1024.0 * 2**5


def test_scales_load_from_and_into_lightnings_own_plugin(tmp_path: Path) -> None:
    pl = pytorch_of("lightning")
    recipe = recipe_of(Policy.MIXED_FLOAT16)
    made, lit, trainer = straight(tmp_path, recipe, max_steps=3)
    trainer.fit(lit, loader(80, 8))
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    checkpoint = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    theirs = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    theirs.load_state_dict(checkpoint[type(theirs).__qualname__])
    assert theirs.scaler.get_scale() == 1024.0
    theirs.scaler.load_state_dict({**theirs.scaler.state_dict(), "scale": 128.0})
    del checkpoint["AutoprecPrecision"]
    checkpoint["MixedPrecision"] = theirs.state_dict()
    torch.save(checkpoint, tmp_path / "theirs.ckpt")
    made, lit, trainer = straight(tmp_path, recipe, max_steps=6)
    trainer.fit(lit, loader(80, 8), ckpt_path=tmp_path / "theirs.ckpt", weights_only=True)
    assert made.loop.scaler.get_scale() == 128.0


def test_a_float32_checkpoint_starts_at_the_profiles_scale(tmp_path: Path) -> None:
    _, lit, trainer = straight(tmp_path, recipe_of(Policy.FLOAT32), max_steps=3)
    trainer.fit(lit, loader(80, 8))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    made, lit, trainer = straight(tmp_path, recipe_of(Policy.MIXED_FLOAT16), max_steps=6)
    trainer.fit(lit, loader(80, 8), ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    assert made.loop.scaler.get_scale() == 1024.0
    assert trainer.global_step == 6


def test_switched_off_the_trainer_trains_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC", "off")
    runs = []
    for made in (plugin(recipe_of(Policy.MIXED_BFLOAT16), package="lightning"), None):
        lit = module_of("lightning")
        settings = {} if made else {"accumulate_grad_batches": 2}
        trainer_of("lightning", made, max_epochs=2, **settings).fit(lit, loader(64, 8))
        runs.append((lit.losses, lit.net.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(
        torch.equal(a, b) for a, b in zip(runs[0][1].values(), runs[1][1].values(), strict=True)
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plugin_travels_to_other_processes(package: str) -> None:
    for make in (plugin, fabric_plugin):
        made = make(recipe_of(Policy.MIXED_BFLOAT16), package=package)
        assert pickle.loads(pickle.dumps(made)).batch_size == 8


def test_one_line_beside_another_precision_is_lightnings_own_error() -> None:
    made = plugin(recipe_of(Policy.MIXED_BFLOAT16), package="lightning")
    with pytest.raises(ValueError, match="both"):
        trainer_of("lightning", made, precision="bf16-mixed")


def test_a_path_of_another_model_is_named() -> None:
    recipe = recipe_of(Policy.MIXED_BFLOAT16, float32_modules=("encoder.last",))
    made = plugin(recipe, package="lightning")
    with pytest.raises(UsageError, match=r"names 'encoder.last'.*part="):
        trainer_of("lightning", made, max_epochs=1).fit(module_of("lightning"), loader(32, 8))
