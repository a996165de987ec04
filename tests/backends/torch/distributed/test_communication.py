"""Ranks join, agree on what a clock or a memory says, and compare what they are about to run."""

from __future__ import annotations

import pytest

from autoprec.core.dtypes import DType
from autoprec.core.numerics.exact_settings import judge_settings
from autoprec.core.numerics.reference_recipe import settings_of
from autoprec.core.recipe import Distributed, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.failures import WorkerFailure
from tests.backends.torch.distributed.rank_tasks import RankTracer, Start

pytestmark = [pytest.mark.torch, pytest.mark.scale]

BUDGET = TimingBudget(seconds=0.2, min_steps=3)
OWN_GROUP = """
import os
import torch.distributed as dist
if "RANK" in os.environ:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
"""
# Rank 1 says that it takes longer, and holds more memory each time, whatever it is asked.
UNEQUAL_RANKS = """
import os, time
if os.environ.get("RANK") == "1":
    from autoprec.backends.shared import process_memory, step_timing
    real = time.perf_counter
    time.perf_counter = lambda: 3 * real()
    process_memory.MemoryGrowth.since_last_check = lambda self: real() % 1 < 0.5
"""
# Rank 1 says that its device has hardly any memory left.
FULL_DEVICE = """
import os
from autoprec.backends.torch import devices
devices.limit_memory = lambda device: None
devices.free_bytes = lambda device: 1000 if os.environ["RANK"] == "1" else 10**12
"""
# What only an evaluation computes depends on how its input lies in memory.
EVALUATED_IN_MEMORY_ORDER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        if not self.training:
            x = x.as_strided(x.shape, torch.empty(x.shape).stride())
        return self.head(x.mean((2, 3)))

def build_data(batch_size):
    for _ in range(40):
        x = torch.randn(batch_size, 3, 2, 2)
        yield x, x.mean((2, 3)).argmax(1)
"""
# A gradient of +-4096 on the ranks, whose mean is what there is to learn: bfloat16 rounds it off.
CANCELLING = """
def build_model():
    return nn.Linear(1, 1, bias=False)

def build_data(batch_size):
    sign = 1.0
    while True:
        x = 1.0 + 0.1 * torch.rand(batch_size, 1)
        yield x, torch.cat([2.0 * x, torch.full_like(x, sign)], 1)
        sign = -sign

def loss_fn(outputs, targets):
    wanted, sign = targets[:, :1], targets[:, 1:]
    weight = 2.0 * outputs / wanted
    return ((outputs - wanted) ** 2).mean() + (4096.0 * sign * (weight - weight.detach())).mean()

def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)
"""


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_step_counts_all_samples_and_says_what_it_waits_for_the_other_rank(
    start_ranks: Start, engine: str
) -> None:
    ranks = start_ranks(2, engine=engine, head=OWN_GROUP)  # a task with a group of its own
    recipe = Recipe(batch_size=4, accumulation_steps=3)
    measured = ranks.call("measure", recipe=recipe, seed=0, budget=BUDGET)
    assert measured.samples_per_step == 2 * 3 * 4
    exposed = measured.exposed_communication
    assert exposed is not None
    assert 0.0 <= exposed.low <= exposed.ratio <= exposed.high <= 1.0
    assert exposed.rounds >= 2
    assert measured.finite


@pytest.mark.parametrize(("engine", "measured"), [("ddp", True), ("fsdp2", False)])
def test_where_one_rank_has_no_room_for_whole_gradients_nothing_is_made_to_hold_them(
    start_ranks: Start, engine: str, measured: bool
) -> None:
    """DDP holds them in any case."""
    ranks = start_ranks(2, engine=engine, head=FULL_DEVICE)
    found = ranks.call("measure", recipe=Recipe(batch_size=4), seed=0, budget=BUDGET)
    assert (found.exposed_communication is not None) is measured
    assert ("no room for whole gradients" in "".join(found.notes)) is not measured
    with_them = Recipe(batch_size=4, accumulation_steps=2)  # training itself holds them
    found = ranks.call("measure", recipe=with_them, seed=0, budget=BUDGET)
    assert found.exposed_communication is not None


def test_ranks_whose_clocks_and_memories_differ_stop_at_the_same_step(start_ranks: Start) -> None:
    """Each decision that they took apart would leave one waiting: the call would not return."""
    ranks = start_ranks(2, head=UNEQUAL_RANKS)
    for _ in range(2):
        ranks.call("measure", recipe=Recipe(batch_size=4), seed=0, budget=BUDGET)
    run = ranks.call("reference", batch_size=4, steps=10**6, checkpoints=(0,), seconds=0.3)
    assert 1 < len(run.losses) < 10**6
    assert ranks.alive


def test_ranks_with_different_recipes_stop_before_the_first_step(start_ranks: Start) -> None:
    ranks = start_ranks(2)
    each = [{"name": "trial", "recipe": Recipe(batch_size=size), "seed": 0} for size in (4, 8)]
    with pytest.raises(WorkerFailure, match="the ranks were given different recipes"):
        ranks._call("open", each, None)


def test_a_recipe_for_another_number_of_ranks_is_refused(start_ranks: Start) -> None:
    recipe = Recipe(batch_size=4, distributed=Distributed("ddp", 3))
    with pytest.raises(WorkerFailure, match="a recipe for 3 ranks given, expected one for 2"):
        start_ranks(2).call("open", name="trial", recipe=recipe, seed=0)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_evaluation_is_compared_with_its_settings(start_ranks: Start, engine: str) -> None:
    ranks = start_ranks(2, engine=engine, more=EVALUATED_IN_MEMORY_ORDER)
    laid_out = Recipe(batch_size=4, memory_format="channels_last")
    found = ranks.call("compare_settings", recipe=laid_out)
    assert found.evaluated
    judged = judge_settings(found, settings_of(laid_out))
    assert "its evaluation is" in judged.verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_reduction_that_rounds_off_what_is_learned_is_rejected(
    start_ranks: Start, engine: str
) -> None:
    proof = Proof(RankTracer(start_ranks(2, engine=engine, more=CANCELLING)), steps=30)

    def recipe(dtype: DType) -> Recipe:
        return Recipe(batch_size=4, distributed=Distributed(engine, 2, reduce_dtype=dtype))

    assert proof.prove(recipe(DType.FLOAT32)).accepted
    rounded = proof.prove(recipe(DType.BFLOAT16))
    assert rounded.verdict == "rejected"
