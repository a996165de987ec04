"""docs/migration.md: what it says of torch holds for the torch installed, and its loops train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autoprec import Policy, Recipe, apply_profile
from autoprec.core.recipe import LossScale
from tests.code_blocks import block


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
def test_the_old_names_are_deprecated_and_switch_off_without_their_device(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"torch.cuda.amp.{name}"):
        old = getattr(torch.cuda.amp, name)()
    enabled = old.is_enabled() if name == "GradScaler" else old._enabled
    assert enabled == torch.cuda.is_available()


def test_custom_fwd_takes_a_device_type_now() -> None:
    with pytest.warns(FutureWarning, match="custom_fwd"):
        torch.cuda.amp.custom_fwd(lambda context: None)
    torch.amp.custom_fwd(lambda context: None, device_type="cuda")


def test_comparing_scales_misses_a_skip_at_a_fixed_scale() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, backoff_factor=0.999999999)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)  # the step was skipped
    assert scaler.get_scale() == 128.0  # and the scale does not show it


@pytest.mark.parametrize(
    ("dtype", "lost", "kept"),
    [(torch.bfloat16, 1 / 300, 1 / 200), (torch.float16, 1 / 2100, 1 / 1900)],
)
def test_small_updates_of_16_bit_weights_are_lost(
    dtype: torch.dtype, lost: float, kept: float
) -> None:
    weight = torch.ones(1, dtype=dtype)
    assert weight + lost == weight
    assert weight + kept != weight


def test_autocast_leaves_the_weights_float32_and_batch_norm_statistics_too() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 1, 4, 4)).sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model[1].running_mean.dtype == torch.float32


def test_a_float16_checkpoint_loads_into_a_float32_model() -> None:
    saved = {name: value.half() for name, value in nn.Linear(2, 2).state_dict().items()}
    model = nn.Linear(2, 2)
    model.load_state_dict(saved)
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight.detach(), saved["weight"].float())


# The page's own loops ---------------------------------------------------------------------------

POLICIES = [Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16]
SCALE = 256.0

WriteProfile = Callable[[Recipe, str], Path]


def tuned(policy: Policy, accumulation_steps: int = 1) -> Recipe:
    scale = LossScale(initial=SCALE) if policy.needs_loss_scale else None
    return Recipe(policy=policy, accumulation_steps=accumulation_steps, loss_scale=scale)


def autocast(policy: Policy) -> torch.autocast:
    dtype = torch.float16 if policy is Policy.MIXED_FLOAT16 else torch.bfloat16
    return torch.autocast("cpu", dtype, enabled=policy is not Policy.FLOAT32)


def scaler_of(policy: Policy) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=policy.needs_loss_scale)


def weights(*models: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for model in models for parameter in model.parameters()]


def net(inputs: int, outputs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_loop_before_and_the_one_after_train_the_same(
    policy: Policy, write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_profile(tuned(policy), "torch").parent)
    monkeypatch.setattr(torch.cuda.amp, "autocast", lambda: autocast(policy))
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda: scaler_of(policy))
    loader = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(6)]
    trained = []
    for loop in (block("docs/migration.md", 0), block("docs/migration.md", 1)):
        model = net(6, 3, seed=0)
        names = {
            "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
            "loss_fn": nn.CrossEntropyLoss(),
        }
        exec(
            loop,
            {"torch": torch, "apply_profile": apply_profile}
            | {"model": model, "loader": loader}
            | names,
        )
        trained.append(weights(model))
    before, after = trained
    assert not torch.equal(before[0], net(6, 3, seed=0)[0].weight)
    assert all(map(torch.equal, before, after))


def against(logits: torch.Tensor, target: float) -> torch.Tensor:
    targets = torch.full_like(logits, target)
    return nn.functional.binary_cross_entropy_with_logits(logits, targets)


def discriminator_loss(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return against(real, 1.0) + against(fake, 0.0)


def generator_loss(fake: torch.Tensor) -> torch.Tensor:
    return against(fake, 1.0)


class Gan:
    """Two nets, an optimizer of each, and data."""

    def __init__(self) -> None:
        self.generator, self.discriminator = net(4, 6, seed=1), net(6, 1, seed=2)
        parts = (self.generator, self.discriminator)
        self.generator_optimizer, self.discriminator_optimizer = (
            torch.optim.Adam(part.parameters(), lr=0.01) for part in parts
        )
        self.loader = [(torch.randn(8, 6), torch.randn(8, 4)) for _ in range(6)]


def losses_by_hand(
    gan: Gan, policy: Policy, real: torch.Tensor, noise: torch.Tensor
) -> Iterator[torch.Tensor]:
    """The discriminator's loss, and after its step the generator's."""
    with autocast(policy):
        fake = gan.generator(noise)
        judged = gan.discriminator(real), gan.discriminator(fake.detach())
    yield discriminator_loss(judged[0].float(), judged[1].float())
    with autocast(policy):
        judged_again = gan.discriminator(fake)
    yield generator_loss(judged_again.float())


def train_by_hand(gan: Gan, policy: Policy, accumulation_steps: int) -> None:
    """The loop of torch's own AMP examples: two optimizers, one scaler, updated once."""
    scaler = scaler_of(policy)
    turns = [
        (gan.discriminator_optimizer, list(gan.discriminator.parameters())),
        (gan.generator_optimizer, list(gan.generator.parameters())),
    ]
    for index, (real, noise) in enumerate(gan.loader, start=1):
        losses = losses_by_hand(gan, policy, real, noise)
        for (optimizer, own), loss in zip(turns, losses, strict=True):
            scaler.scale(loss / accumulation_steps).backward(inputs=own)
            if index % accumulation_steps:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(own, 1.0)
            scaler.step(optimizer)
            optimizer.zero_grad()
        if index % accumulation_steps == 0:
            scaler.update()


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_gan_trains_as_the_plain_loop_does(
    policy: Policy,
    accumulation_steps: int,
    write_profile: WriteProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(write_profile(tuned(policy, accumulation_steps), "torch").parent)
    torch.manual_seed(0)
    gan, plain = Gan(), Gan()
    plain.loader = gan.loader
    loop = block("docs/migration.md", 2)
    losses = {"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}
    exec(loop, {"torch": torch, "apply_profile": apply_profile} | {"nn": nn} | vars(gan) | losses)
    train_by_hand(plain, policy, accumulation_steps)
    for trained, expected, first in zip(
        weights(gan.generator, gan.discriminator),
        weights(plain.generator, plain.discriminator),
        weights(Gan().generator, Gan().discriminator),
        strict=True,
    ):
        assert torch.equal(trained, expected)
        assert not torch.equal(trained, first)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_average_is_evaluated_wherever_it_was_made(
    policy: Policy, write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_profile(tuned(policy, 2), "torch").parent)
    torch.manual_seed(0)
    model, held_out = net(6, 3, seed=0), torch.randn(4, 6)
    names = {
        "torch": torch,
        "apply_profile": apply_profile,
        "AveragedModel": AveragedModel,
        "get_ema_multi_avg_fn": get_ema_multi_avg_fn,
        "decay": 0.0,  # the average is the last update's weights
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(5)],
        "held_out": held_out,
    }
    exec(block("docs/migration.md", 6), names)
    assert names["average"].n_averaged == names["precision"].updates_in(5) == 3
    assert names["outputs"].dtype is torch.float32
    assert torch.equal(names["outputs"], names["precision"].forward(held_out))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_roll_out_and_its_update_have_the_same_log_probabilities(
    policy: Policy, write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net(6, 2, seed=3)

        def forward(self, states: torch.Tensor) -> torch.distributions.Categorical:
            return torch.distributions.Categorical(self.body(states).softmax(-1))

    profile = write_profile(tuned(policy), "torch")
    monkeypatch.chdir(profile.parent)
    torch.manual_seed(0)
    model, states = Actor(), torch.randn(64, 6)
    precision = apply_profile(profile, model=model, optimizer=torch.optim.SGD(model.parameters()))
    names = {"torch": torch, "precision": precision, "states": states, "epochs": 1}
    before = weights(model)[0].clone()
    exec(block("docs/migration.md", 7), names | {"advantages": torch.randn(64)})
    assert not torch.equal(weights(model)[0], before)
    names |= {"advantages": torch.zeros(64), "epochs": 2}
    exec(block("docs/migration.md", 7), names)
    assert torch.equal(names["ratio"], torch.ones(64))
    exact = model(states).log_prob(names["actions"])
    assert torch.equal(exact, names["before"]) == (policy is Policy.FLOAT32)
