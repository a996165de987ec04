"""docs/migration.md's statements about torch hold for the torch that is installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn


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
