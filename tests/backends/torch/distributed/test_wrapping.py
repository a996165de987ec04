"""Two ranks train what one process with the same global batch trains; real workers, Gloo."""

from __future__ import annotations

import pytest
import torch

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Distributed, Recipe
from tests.backends.torch.distributed.rank_tasks import Start, weights_of

pytestmark = [pytest.mark.torch, pytest.mark.scale]

RUN = {"steps": 5, "checkpoints": (0, 3), "batch_size": 4}
DROPOUT = """
def build_model():
    model = Net()
    model.last = nn.Sequential(nn.Dropout(0.5), nn.Linear(7, 3))
    return model
"""
NORM_FIRST = """
def build_model():
    return nn.Sequential(nn.BatchNorm1d(6), Net())
"""
NORM_INSIDE = """
def build_model():
    model = Net()
    model.blocks[0] = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 7))
    return model
"""
SAMPLER = """
def build_data(batch_size):
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, (x.sum(-1) > 0).long())
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, shuffle=False))
"""
SAMPLES_OF_BOTH = """
def build_data(batch_size):
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(5))
    y = (x.sum(-1) > 0).long()
    for first in range(0, 24, batch_size):
        for rank in range(2):
            chosen = [2 * (first + index) + rank for index in range(batch_size)]
            yield x[chosen], y[chosen]
"""


def same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, expected in second.items():
        torch.testing.assert_close(first[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_in_float32_are_one_process_that_accumulates(
    start_ranks: Start, engine: str
) -> None:
    """Losses, weights, gradients at checkpoints, a clipped norm, and dropout: all the same."""
    more = DROPOUT + "CLIP_GRAD_NORM = 0.5"
    alone = start_ranks(1, more=more)
    expected = alone.call("reference", accumulation_steps=4, **RUN)
    together = start_ranks(2, engine=engine, more=more)
    found = together.call("reference", accumulation_steps=2, **RUN)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.losses[-1] != pytest.approx(found.losses[0], rel=1e-3)  # it trains
    same_weights(weights_of(together), weights_of(alone))
    ranks = Distributed(engine, 2)
    recipe = Recipe(batch_size=4, accumulation_steps=2, distributed=ranks)
    for point in together.call("compare_steps", recipe=recipe):
        assert point.gradient_error == pytest.approx(0.0, abs=1e-5)
    again = together.call("trajectory", recipe=recipe, seed=0, steps=5)
    assert again.losses == pytest.approx(expected.losses, rel=1e-5)
    same_weights(weights_of(together), weights_of(alone))


@pytest.mark.parametrize("norm", ["first", "inside a block"])
def test_a_batch_norm_trains_under_fully_shard_in_bfloat16_as_under_ddp(
    start_ranks: Start, norm: str
) -> None:
    """Its weights stay in float32, like its statistics: kernels refuse to mix them."""
    losses = {}
    for engine in ("ddp", "fsdp2"):
        ranks = start_ranks(2, engine=engine, more=NORM_FIRST if norm == "first" else NORM_INSIDE)
        section = Distributed(engine, 2).for_policy(Policy.MIXED_BFLOAT16)
        recipe = Recipe(Policy.MIXED_BFLOAT16, 8, distributed=section)
        ranks.call("reference", steps=6, checkpoints=(0,), batch_size=8)
        losses[engine] = ranks.call("trajectory", recipe=recipe, seed=0, steps=6).losses
    assert losses["fsdp2"] == pytest.approx(losses["ddp"], rel=0.02)
    assert losses["ddp"][-1] != pytest.approx(losses["ddp"][0], rel=1e-3)


def test_a_task_that_shards_its_data_is_left_to_do_so(start_ranks: Start) -> None:
    together = start_ranks(2, more=SAMPLER)
    found = together.call("reference", **RUN)
    alone = start_ranks(1, more=SAMPLES_OF_BOTH)
    expected = alone.call("reference", accumulation_steps=2, **RUN)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    same_weights(weights_of(together), weights_of(alone))
