"""What Fabric can do beside a profile works, or is refused with the way out; of both packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy, Recipe
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.lightning import fabric_plugin
from tests.integrations.lightning_modules import PACKAGES, STRATEGIES, fabric_of, strategy_here
from tests.integrations.trained import images, loader, momentum, net, recipe_of, reference, relative

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("without_tensorflow"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = recipe_of(Policy.MIXED_FLOAT16, accumulation_steps=1)
COMPILED = Recipe(batch_size=8, compile=True)
LOSS = nn.functional.cross_entropy


def fabric_with(recipe: Recipe, package: str = "lightning", **settings: Any) -> tuple[Any, Any]:
    made = fabric_plugin(recipe, package=package, watch=False)
    fabric = fabric_of(package).Fabric(
        **{"accelerator": "cpu", "devices": 1, "plugins": [made], **settings}
    )
    return fabric, made


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        *STRATEGIES.items(),
        ("XLAFSDPStrategy", r"XLAFSDPStrategy has a precision of its own.*DDP or FSDP2"),
        ("DataParallelStrategy", r"DataParallel, whose replicas .*torchrun"),
    ],
)
def test_a_strategy_that_no_profile_goes_with(package: str, name: str, said: str) -> None:
    strategy = strategy_here(fabric_of(package).strategies, name)
    with pytest.raises(UsageError, match=f"^Fabric with this profile: .*{said}"):
        fabric_with(BFLOAT16, package, strategy=strategy)


class Steps(nn.Module):
    """A model with a training step, as a LightningModule has one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: Any) -> torch.Tensor:
        return LOSS(self(batch[0]), batch[1])


def method(fabric: Any) -> None:
    model = Steps()
    module, optimizer = fabric.setup(model, momentum(model.parameters()))
    module.mark_forward_method("training_step")
    fabric.backward(module.training_step(images(8)))
    optimizer.step()


def raw_model(fabric: Any) -> None:
    model = net()
    _, optimizer = fabric.setup(model, momentum(model.parameters()))
    inputs, targets = images(8)
    fabric.backward(LOSS(model(inputs), targets))
    optimizer.step()


def autocast_first(fabric: Any) -> None:
    with fabric.autocast():
        pass


def a_second_model(fabric: Any) -> None:
    fabric.setup(net())
    fabric.setup(nn.Linear(2, 2))


def compiled(**settings: Any) -> Callable[[Any], None]:
    def set_up(fabric: Any) -> None:
        fabric.setup(torch.compile(net(), backend="eager"), **settings)

    return set_up


def stepping(make: Callable[[Any], torch.optim.Optimizer], *closures: Any) -> Callable[[Any], None]:
    def step(fabric: Any) -> None:
        model = net()
        module, optimizer = fabric.setup(model, make(model.parameters()))
        inputs, targets = images(8)
        fabric.backward(LOSS(module(inputs), targets))
        optimizer.step(*closures)

    return step


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("recipe", "use", "said"),
    [
        (BFLOAT16, method, r"never called through Fabric.*call what fabric\.setup\(...\) returned"),
        (BFLOAT16, raw_model, r"never called through Fabric.*call what fabric\.setup"),
        (BFLOAT16, autocast_first, r"before a model was set up.*call fabric\.setup"),
        (BFLOAT16, a_second_model, r"set up Linear after Net, .* Fabric of their own"),
        (COMPILED, compiled(), r"compiles the model, and torch\.compile does as well"),
        (COMPILED, compiled(_reapply_compile=False), r"torch\.compile does as well"),
        (BFLOAT16, stepping(torch.optim.LBFGS, lambda: 1.0), r"LBFGS calls .*AdamW or SGD"),
        (FLOAT16, stepping(momentum, lambda: 1.0), r"given a closure under a loss scale.* Use"),
    ],
)
def test_what_would_go_past_the_profile(
    package: str, recipe: Recipe, use: Callable[[Any], None], said: str
) -> None:
    fabric, _ = fabric_with(recipe, package)
    with pytest.raises(UsageError, match=said):
        use(fabric)


def test_a_loop_that_does_not_accumulate_is_told() -> None:
    fabric, _ = fabric_with(recipe_of(Policy.MIXED_BFLOAT16))
    with pytest.warns(AutoprecWarning, match=r"made of 1 micro-batches, .* accumulates 2 of 8"):
        stepping(momentum)(fabric)


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16])
def test_a_loop_that_accumulates_without_synchronising_trains_as_our_own(policy: Policy) -> None:
    recipe = recipe_of(policy)
    losses, expected = reference(recipe, images(80), epochs=1)
    fabric, made = fabric_with(recipe)
    model = net()
    module = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(momentum(model.parameters()))
    found = []
    for number, (inputs, targets) in enumerate(fabric.setup_dataloaders(loader(80, 8)), 1):
        torch.manual_seed(len(found))
        whole = number % made.accumulation_steps == 0
        with fabric.no_backward_sync(module, enabled=not whole):
            loss = LOSS(module(inputs), targets)
            found.append(loss.item())
            fabric.backward(loss / made.accumulation_steps)
        if whole:
            fabric.clip_gradients(module, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
    assert found == pytest.approx(losses, rel=1e-3 if policy.mixed else 1e-6)
    assert relative(model, expected) < (1e-2 if policy.mixed else 1e-5)
    assert made.loop.steps == 5


def test_gradients_are_clipped_by_value_as_they_are_without_a_scale() -> None:
    clipped = []
    for recipe in (FLOAT16, Recipe(batch_size=8)):
        fabric, _ = fabric_with(recipe)
        model = net(0.0)
        module, optimizer = fabric.setup(model, momentum(model.parameters()))
        inputs, targets = images(8)
        fabric.backward(LOSS(module(inputs), targets))
        fabric.clip_gradients(module, optimizer, clip_val=0.01)
        clipped.append(model.head.weight.grad.clone())
        optimizer.step()
    assert clipped[0].abs().max() == pytest.approx(0.01)
    torch.testing.assert_close(*clipped, rtol=0.05, atol=1e-3)


def test_a_model_that_is_set_up_twice_has_the_profile_once() -> None:
    fabric, made = fabric_with(BFLOAT16)
    model = net()
    inputs, _ = images(8)
    fabric.setup(model)(inputs)
    module, optimizer = fabric.setup(model, momentum(model.parameters()))
    attached = made.loop.attached
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fabric.backward(LOSS(module(inputs), images(8)[1]))
        optimizer.step()
    assert made.loop.attached is attached
    assert made.loop.ran.dtype == "bfloat16"


@pytest.mark.parametrize("package", PACKAGES)
def test_what_the_script_runs_under_fabrics_autocast_runs_under_the_profiles(package: str) -> None:
    fabric, made = fabric_with(BFLOAT16, package)
    model = net()
    module, optimizer = fabric.setup(model, momentum(model.parameters()))
    other = nn.Linear(3, 3)
    inputs, targets = images(8)
    with fabric.autocast():
        outputs = nn.functional.linear(module(inputs), other.weight)
    assert outputs.dtype is torch.bfloat16
    fabric.backward(LOSS(outputs.float(), targets))
    optimizer.step()
    assert made.loop.ran.dtype == "bfloat16"
