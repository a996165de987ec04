"""A profile as the precision plugin of Lightning's Fabric, of both packages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.integrations.lightning import fabric_plugin
from tests.integrations.lightning_modules import PACKAGES, fabric_of
from tests.integrations.trained import (
    POLICIES,
    RIGHT,
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


def test_switched_off_fabric_trains_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC", "off")
    runs = []
    for plugins in ([fabric_plugin(recipe_of(Policy.MIXED_FLOAT16), package="lightning")], []):
        fabric = fabric_of("lightning").Fabric(accelerator="cpu", devices=1, plugins=plugins)
        model = net()
        module, optimizer = fabric.setup(model, momentum(model.parameters()))
        torch.manual_seed(0)
        for inputs, targets in loader(64, 8):
            fabric.backward(nn.functional.cross_entropy(module(inputs), targets))
            fabric.clip_gradients(module, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(r.values() for r in runs), strict=True))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("policy", POLICIES)
def test_fabric_trains_what_our_own_loop_trains(package: str, policy: Policy) -> None:
    recipe = recipe_of(policy, accumulation_steps=1)
    losses, expected = reference(recipe, images(80), epochs=2, clip=None)
    made = fabric_plugin(recipe, package=package, watch=False)
    fabric = fabric_of(package).Fabric(accelerator="cpu", devices=1, plugins=[made])
    model = net()
    module, optimizer = fabric.setup(model, momentum(model.parameters()))
    found = []
    with watched(model) as seen:
        for _ in range(2):
            for inputs, targets in loader(80, made.batch_size):
                torch.manual_seed(len(found))
                loss = nn.functional.cross_entropy(module(inputs), targets)
                found.append(loss.item())
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            assert module(images(8)[0]).dtype is torch.float32
    assert found == pytest.approx(losses, rel=1e-3 if policy.mixed else 1e-6)
    assert relative(model, expected) < (1e-2 if policy.mixed else 1e-6)
    assert made.loop.steps == 20
    if policy is Policy.MIXED_BFLOAT16:
        assert seen.of("train") == seen.of("eval") == RIGHT
        assert seen.columns == {32}
        assert seen.strides == {True}
        assert made.loop.ran.batch == 8
    made.teardown()
    assert wrapped_modules(model) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_fabric_set_up_may_be_compiled(package: str) -> None:
    recipe = recipe_of(Policy.MIXED_BFLOAT16, accumulation_steps=1)
    losses = []
    for compiles in (False, True):
        made = fabric_plugin(recipe, package=package, watch=False)
        fabric = fabric_of(package).Fabric(accelerator="cpu", devices=1, plugins=[made])
        torch.manual_seed(0)
        model = net()
        module, optimizer = fabric.setup(model, momentum(model.parameters()))
        called = torch.compile(module, backend="eager") if compiles else module
        losses.append([])
        for inputs, targets in loader(64, 8):
            loss = nn.functional.cross_entropy(called(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert made.loop.ran is not None
        assert made.loop.ran.dtype == "bfloat16"
    assert losses[0] == losses[1]
