"""What two runs of a call differ by, in numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoprec.backends.torch.watch.differences import difference
from autoprec.backends.torch.watch.repeated_call import Run

pytestmark = pytest.mark.torch

SAMPLES = 16
SIGNS = torch.tensor([1.0, -1.0]).repeat(SAMPLES // 2)


def compared(away: torch.Tensor, samples: int = SAMPLES) -> Any:
    """Compare outputs that are so far `away`, each of which adds as much to a loss of 4."""
    call: Any = SimpleNamespace(
        loss=torch.tensor(4.0),
        batch=samples,
        cut_gradient=lambda index, count: torch.ones_like(away),
    )
    exact = torch.arange(float(away.numel())).reshape(away.shape)
    runs = (Run({0: exact + away}, {}), Run({0: exact}, {}))
    return difference(*runs, call, samples=samples, share=1.0, floor=0.0)


def test_what_samples_add_to_a_loss_tells_how_much_of_it_is_chance() -> None:
    alike = compared(torch.full((SAMPLES, 3), 0.01))
    assert alike.loss == pytest.approx(0.12, rel=1e-3)
    assert alike.loss_error == pytest.approx(0.0, abs=1e-4)
    mixed = compared(0.1 * SIGNS.unsqueeze(1) + 0.01)
    assert mixed.loss == pytest.approx(0.04, rel=1e-3)
    assert mixed.loss_error == pytest.approx(float(SIGNS.std()) * 0.1, rel=1e-3)


def test_without_a_row_for_each_of_many_samples_it_is_not_known() -> None:
    assert compared(0.1 * SIGNS.reshape(4, 4)).loss_error == 0.0
    assert compared(0.1 * SIGNS[:4], samples=4).loss_error == 0.0
    assert compared(torch.tensor(0.1)).loss_error == 0.0


def test_outputs_that_do_not_vary_count_by_their_size() -> None:
    """As those of a head that starts as its bias: what float32's rounding leaves is no scale."""
    exact = torch.full((SAMPLES, 3), 0.5) + 1e-8 * torch.rand(SAMPLES, 3)
    call: Any = SimpleNamespace(
        loss=None, batch=SAMPLES, cut_gradient=lambda index, count: torch.ones_like(exact)
    )
    runs = (Run({0: exact * 1.002}, {}), Run({0: exact}, {}))
    found = difference(*runs, call, samples=SAMPLES, share=1.0, floor=0.0)
    assert found.outputs == pytest.approx(0.002, rel=1e-2)
