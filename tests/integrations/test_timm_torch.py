"""timm's training loop with the profile's autocast and loss scaler in the place of its own.

timm is not needed: its loop is written out as train.py of 1.0.31 has it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy, Recipe
from autoprec.core.recipe import LossScale
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.timm import ProfileScaler, parts
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
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]


def arguments(recipe: Recipe, **settings: Any) -> Namespace:
    given = {
        "batch_size": recipe.batch_size,
        "grad_accum_steps": recipe.accumulation_steps,
        "amp": False,
        "amp_dtype": "float16",
        "torchcompile": None,
        "clip_grad": None,
        "clip_mode": "norm",
    }
    return Namespace(**{**given, **settings})


@pytest.fixture(autouse=True)
def clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """What timm.utils has for this, two of its three modes."""

    def dispatch_clip_grad(parameters: Any, value: float, mode: str = "norm") -> None:
        clip: Any = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[mode]
        clip(parameters, value)

    package, utils = ModuleType("timm"), ModuleType("timm.utils")
    vars(utils)["dispatch_clip_grad"] = dispatch_clip_grad
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.utils", utils)


def train_one_epoch(
    model: nn.Module,
    batches: Any,
    optimizer: torch.optim.Optimizer,
    args: Namespace,
    amp_autocast: Any,
    loss_scaler: ProfileScaler,
    losses: list[float],
) -> None:
    accum_steps = args.grad_accum_steps
    last_accum_steps = len(batches) % accum_steps
    last_batch_idx_to_accum = len(batches) - last_accum_steps
    optimizer.zero_grad()
    for batch_idx, (inputs, targets) in enumerate(batches):
        need_update = batch_idx == len(batches) - 1 or (batch_idx + 1) % accum_steps == 0
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps
        torch.manual_seed(len(losses))
        with amp_autocast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        if accum_steps > 1:
            loss /= accum_steps
        loss_scaler(
            loss,
            optimizer,
            clip_grad=args.clip_grad,
            clip_mode=args.clip_mode,
            parameters=model.parameters(),
            create_graph=False,
            need_update=need_update,
        )
        if need_update:
            optimizer.zero_grad()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_script_trains_what_our_own_loop_trains(policy: Policy) -> None:
    """Seven micro-batches, three to an update, so that the last holds one; clipped."""
    recipe = recipe_of(policy, accumulation_steps=3)
    expected, model_of = reference(recipe, images(56), epochs=2, clip=0.5)
    model, losses = net(), list[float]()
    optimizer, args = momentum(model.parameters()), arguments(recipe, clip_grad=0.5)
    amp_autocast, loss_scaler = parts(recipe, model, optimizer, args, watch=False)
    with watched(model) as seen:
        for _ in range(2):
            train_one_epoch(
                model, loader(56, 8), optimizer, args, amp_autocast, loss_scaler, losses
            )
        model.eval()
        with torch.inference_mode(), amp_autocast():
            model(images(8)[0])
    assert losses == pytest.approx(expected, rel=1e-3 if policy.mixed else 1e-6)
    assert relative(model, model_of) < (1e-2 if policy.mixed else 1e-5)
    assert loss_scaler.loop.steps == 6
    assert loss_scaler.loop.ran.problems(recipe) == ()
    if policy is Policy.MIXED_BFLOAT16:
        assert seen.of("train") == seen.of("eval") == RIGHT
        assert seen.columns == {32}
        assert seen.strides == {True}


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_are_skipped(fused: bool) -> None:
    knobs = {"fused_optimizer": True} if fused else {}
    recipe = recipe_of(Policy.MIXED_FLOAT16, accumulation_steps=1, loss_scale=SCALE, knobs=knobs)
    model, updates, scales = net(), list[int](), list[float]()
    optimizer, args = adam(model.parameters()), arguments(recipe, clip_grad=1.0)
    amp_autocast, loss_scaler = parts(recipe, model, optimizer, args)

    def overflow(grad: torch.Tensor) -> torch.Tensor:
        updates.append(1)
        return torch.full_like(grad, torch.inf) if len(updates) in OVERFLOWS else grad

    def train() -> None:
        for batch in loader(80, 8):
            before = model.head.weight.detach().clone()
            train_one_epoch(model, [batch], optimizer, args, amp_autocast, loss_scaler, [])
            scales.append(loss_scaler.loop.scaler.get_scale())
            assert torch.equal(before, model.head.weight) == (len(updates) in OVERFLOWS)

    model.head.bias.register_hook(overflow)
    with pytest.warns(AutoprecWarning, match="256, its floor"):
        train()
    assert scales == SCALES
    assert loss_scaler.loop.skipped == 4


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped() -> None:
    """As `resume_checkpoint` and `CheckpointSaver` do it, by `state_dict_key`."""
    recipe = recipe_of(
        Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=1024.0, growth_interval=2)
    )
    args, saved = arguments(recipe), dict[str, Any]()
    straight: list[float] = []
    for resumed in (False, True):
        model, losses = net(), list[float]()
        optimizer = momentum(model.parameters())
        amp_autocast, loss_scaler = parts(recipe, model, optimizer, args)
        if resumed:
            model.load_state_dict(saved["state_dict"])
            optimizer.load_state_dict(saved["optimizer"])
            loss_scaler.load_state_dict(saved[loss_scaler.state_dict_key])
            assert loss_scaler.loop.scaler.get_scale() == 2048.0
        else:
            train_one_epoch(model, loader(48, 8), optimizer, args, amp_autocast, loss_scaler, [])
            saved = {
                "state_dict": {k: v.clone() for k, v in model.state_dict().items()},
                "optimizer": torch.optim.Optimizer.state_dict(optimizer),
                loss_scaler.state_dict_key: loss_scaler.state_dict(),
            }
            saved["optimizer"] = {**saved["optimizer"], "state": _copied(saved["optimizer"])}
        train_one_epoch(model, loader(48, 8), optimizer, args, amp_autocast, loss_scaler, losses)
        straight = straight or losses
        assert losses == straight
        assert loss_scaler.loop.scaler.get_scale() == 8192.0
    theirs = torch.amp.GradScaler("cpu")  # as NativeScaler holds one
    theirs.load_state_dict(saved["amp_scaler"])
    assert theirs.get_scale() == 2048.0
    loss_scaler.load_state_dict({**theirs.state_dict(), "scale": 64.0})
    assert loss_scaler.loop.scaler.get_scale() == 64.0


def _copied(state: dict[str, Any]) -> dict[Any, Any]:
    return {
        key: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in value.items()}
        for key, value in state["state"].items()
    }


def test_switched_off_the_loop_trains_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC", "off")
    recipe = recipe_of(Policy.MIXED_FLOAT16)
    args = arguments(recipe)
    model, losses = net(), list[float]()
    optimizer = momentum(model.parameters())
    amp_autocast, loss_scaler = parts(recipe, model, optimizer, args)
    train_one_epoch(model, loader(64, 8), optimizer, args, amp_autocast, loss_scaler, losses)
    plain, expected = net(), list[float]()
    optimizer = momentum(plain.parameters())
    for number, (inputs, targets) in enumerate(loader(64, 8), 1):
        torch.manual_seed(len(expected))
        loss = nn.functional.cross_entropy(plain(inputs), targets)
        expected.append(loss.item())
        (loss / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert losses == expected
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize(
    ("recipe", "given", "said"),
    [
        (Recipe(batch_size=8), {"batch_size": 128}, r"--batch-size 128 .*Give it --batch-size 8 "),
        (Recipe(batch_size=8), {"grad_accum_steps": 4}, r"--grad-accum-steps 4 .*steps 1"),
        (Recipe(batch_size=8), {"amp": True}, r"told fp16 and .*float32"),
        (recipe_of(Policy.MIXED_FLOAT16), {"amp": True, "amp_dtype": "bfloat16"}, "told bf16"),
        (Recipe(batch_size=8, compile=True), {"torchcompile": "inductor"}, "--torchcompile does"),
    ],
)
def test_arguments_that_the_profile_cannot_be_with(
    recipe: Recipe, given: dict[str, Any], said: str
) -> None:
    model = net()
    with pytest.raises(UsageError, match=said):
        parts(recipe, model, momentum(model.parameters()), arguments(recipe, **given))


def test_the_scripts_own_amp_of_the_same_precision_is_replaced() -> None:
    recipe = recipe_of(Policy.MIXED_FLOAT16)
    model = net()
    found = parts(recipe, model, momentum(model.parameters()), arguments(recipe, amp=True))
    assert isinstance(found[0](), AbstractContextManager)
