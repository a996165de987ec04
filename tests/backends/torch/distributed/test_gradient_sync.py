"""One reduction an update, and what two ranks do is what one process does: real processes, Gloo."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoprec.backends.torch.apply.wrapping import distribute
from autoprec.backends.torch.distributed.sharding import whole
from autoprec.core.dtypes import DType
from autoprec.core.recipe import Distributed, Recipe
from tests.backends.torch.distributed.joined import on_two_ranks
from tests.backends.torch.operated import FLOAT16, FLOAT32, apply, batches, mlp

pytestmark = [pytest.mark.torch, pytest.mark.scale]

ENGINES = ("ddp", "fsdp2")
MICRO_BATCHES = 6  # of each rank, four to an update: the last two are left to flush


@contextmanager
def counted(counts: Counter[str], name: str) -> Iterator[None]:
    """Count the reductions of gradients: DDP's, through our hook, and FSDP2's."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    before = dist.all_reduce, _fsdp_param_group.foreach_reduce

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    dist.all_reduce, _fsdp_param_group.foreach_reduce = map(counting, before)  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_reduce, _fsdp_param_group.foreach_reduce = before


def shared(recipe: Recipe, engine: Any, **ranks: Any) -> Recipe:
    return replace(recipe, distributed=Distributed(engine, 2, **ranks))


def wrapped(recipe: Recipe) -> tuple[nn.Module, Any]:
    model = distribute(recipe, mlp(), "cpu")
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def micro_batches(count: int = MICRO_BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's micro-batches or one process's; the last of each rank holds fewer samples."""
    found = batches(2 * count)
    return [*found[:-2], *((x[:3], y[:3]) for x, y in found[-2:])]


def trained(
    recipe: Recipe, model: nn.Module, optimizer: Any, data: Any, *, ending: str = "flush"
) -> list[torch.Tensor]:
    precision = apply(recipe, model, optimizer)
    for inputs, targets in precision.batches(data) if ending == "batches" else data:
        with precision.autocast():
            outputs = model(inputs)
        precision.backward(nn.functional.cross_entropy(outputs, targets))
        precision.clip_grad_norm_(0.1)
        precision.step()
    assert precision.flush() is (ending == "flush")
    assert precision.steps == 2
    return [whole(p.detach()).clone() for p in model.parameters()]


def work(rank: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="the micro-batches of one update hold 8, 3 samples")
    counts: Counter[str] = Counter()
    found: dict[str, Any] = {}
    for engine in ENGINES:
        once = shared(replace(FLOAT32, accumulation_steps=4), engine)
        own = micro_batches()[rank::2]
        for ending in ("flush", "batches"):
            found[f"{engine} {ending}"] = trained(once, *wrapped(once), own, ending=ending)
        each = shared(once, engine, sync_each_microbatch=True)
        found[f"{engine} each"] = trained(each, *wrapped(each), own)
        for name, chosen in {
            "once": replace(once, distributed=Distributed(engine, 2, reduce_dtype=DType.BFLOAT16)),
            "each": replace(
                each,
                distributed=replace(each.distributed, reduce_dtype=DType.BFLOAT16),  # type: ignore[type-var]
            ),
        }.items():
            model, optimizer = wrapped(chosen)
            precision = apply(chosen, model, optimizer)
            for update in ("first", f"{engine} {name}"):
                with counted(counts, update):
                    for inputs, targets in own[:4]:
                        with precision.autocast():
                            outputs = model(inputs)
                        precision.backward(nn.functional.cross_entropy(outputs, targets))
                        precision.step()
            assert precision.steps == 2
        found[f"{engine} overflow"] = overflow(engine, rank)
    return found | {"counts": counts}


def overflow(engine: str, rank: int) -> list[Any]:
    """Let one rank's loss overflow in the second of three updates."""
    recipe = shared(FLOAT16, engine)
    model, optimizer = wrapped(recipe)
    precision = apply(recipe, model, optimizer)
    changed = []
    for index, (inputs, targets) in enumerate(batches(3)):
        with precision.autocast():
            outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        precision.backward(loss * (1e38 if (index, rank) == (1, 1) else 1.0))
        changed.append(precision.step())
    return [changed, precision.skipped, precision.scaler.get_scale()]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("way", ["flush", "batches", "each"])
@pytest.mark.parametrize("engine", ENGINES)
def test_partial_updates_clipping_and_a_short_last_batch_are_those_of_one_process(
    both: Any, engine: str, way: str
) -> None:
    recipe = replace(FLOAT32, accumulation_steps=8)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = trained(recipe, model, optimizer, micro_batches())
    for rank in both:
        for ours, theirs in zip(rank[f"{engine} {way}"], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("engine", "of_one"), [("ddp", 1), ("fsdp2", 2)])
def test_an_update_of_four_micro_batches_reduces_once_unless_told_otherwise(
    both: Any, engine: str, of_one: int
) -> None:
    """FSDP2 reduces each of the two layers by itself.

    In the first update DDP reduces once more: that `backward` is what will count is not known yet.
    """
    for rank in both:
        assert rank["counts"][f"{engine} once"] == of_one
        assert rank["counts"][f"{engine} each"] == 4 * of_one


@pytest.mark.parametrize("engine", ENGINES)
def test_an_overflow_of_one_rank_skips_the_step_of_all(both: Any, engine: str) -> None:
    for rank in both:
        assert rank[f"{engine} overflow"] == [[True, False, True], 1, 512.0]
