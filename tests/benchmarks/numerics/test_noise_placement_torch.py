"""Where noise is put: in the proof on every weight and nothing else, in the benchmark's other null
on what products give and nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.torch.train.model_state import RELATIVE_NOISE, add_noise
from benchmarks.numerics.noise_placement import NoisyProducts

pytestmark = pytest.mark.torch


def test_the_proofs_noise_is_on_all_weights_and_on_no_buffer() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(1.0)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    add_noise(model, 3)
    for name, value in model.named_parameters():
        away = (value.detach() - 1.0).abs()
        assert float(away.max()) <= RELATIVE_NOISE * 1.001, name
        assert float(away.mean()) == pytest.approx(RELATIVE_NOISE / 2, rel=0.35), name
        assert len(value.detach().unique()) > 1, name
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize("operation", ["mm", "addmm", "bmm", "conv"])
def test_noise_in_products_is_on_what_every_product_gives(operation: str) -> None:
    square, image = torch.rand(64, 64) + 1, torch.rand(2, 3, 16, 16) + 1
    run: Any = {
        "mm": lambda: square @ square,
        "addmm": lambda: nn.functional.linear(square, square, square[0]),
        "bmm": lambda: torch.bmm(square[None], square[None]),
        "conv": lambda: nn.functional.conv2d(image, image[:, :, :3, :3]),
    }[operation]
    exact = run()
    with NoisyProducts(0):
        noisy = run()
    away = (noisy / exact - 1).abs()
    assert float(away.max()) <= RELATIVE_NOISE * 1.01
    assert float(away.mean()) == pytest.approx(RELATIVE_NOISE / 2, rel=0.2)


def test_noise_in_products_is_in_the_backward_pass_too_and_nowhere_else() -> None:
    given = torch.rand(8, 8) + 1
    weight = (torch.rand(8, 8) + 1).requires_grad_()
    with NoisyProducts(0):
        sums = (given + weight).exp().sum() + torch.softmax(given, -1).sum()
    with_noise = torch.autograd.grad(sums, weight)[0]
    plain = (given + weight).exp().sum() + torch.softmax(given, -1).sum()
    assert torch.equal(sums.detach(), plain.detach())
    assert torch.equal(with_noise, torch.autograd.grad(plain, weight)[0])
    product = (given @ weight).sum()
    exact = torch.autograd.grad(product, weight, retain_graph=True)[0]
    with NoisyProducts(0):
        noisy = torch.autograd.grad(product, weight)[0]
    assert not torch.equal(noisy, exact)
    assert torch.allclose(noisy, exact, rtol=RELATIVE_NOISE * 1.01)
