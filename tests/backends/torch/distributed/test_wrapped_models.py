"""DistributedDataParallel, for real: two processes, gloo, tiny models."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from autoprec.backends.torch.apply.precision import Precision
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError
from tests.backends.torch.distributed.joined import start
from tests.backends.torch.operated import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    apply,
    batches,
    mlp,
    train,
    weights,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo"),
]

BUCKETS = {"own": False, "views": True}  # where DDP keeps gradients

STEPS = 5  # micro-batches; with two to a step the last one is left to flush


def own_loop(
    recipe: Recipe, model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> bool:
    """A loop written for torch.amp that keeps its lines: it steps after every micro-batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    precision = apply(replace(recipe, accumulation_steps=2), model, optimizer)
    for inputs, targets in data:
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        precision.scaler.scale(loss).backward()
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad()
    return precision.scaler.changed_weights


def compiled(
    recipe: Recipe, model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> bool:
    """The wrapped model is what torch.compile was given."""
    return trained_on(recipe, torch.compile(model, backend="eager"), data)


def work(rank: int, folder: str) -> None:
    """Train in one of two processes, each on its own half of every batch, and keep the weights."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, (train_it, recipe) in CASES.items():
        model = mlp()
        parallel = DistributedDataParallel(model)
        halves = [(x[rank::2], y[rank::2]) for x, y in batches(STEPS)]
        trained = train_it(recipe, parallel, halves)
        torch.save([trained, weights(model)], f"{folder}/{name}-{rank}.pt")
    for name, views in BUCKETS.items():
        plain = gan_parts()
        parts = nn.ModuleDict(
            {
                name: DistributedDataParallel(part, gradient_as_bucket_view=views)
                for name, part in plain.items()
            }
        )
        gan(FLOAT32, parts, [(x[rank::2], y[rank::2]) for x, y in batches(STEPS)])
        torch.save([True, weights(plain)], f"{folder}/gan-{name}-{rank}.pt")
    for name, recipe in SHARDED.items():
        torch.save(sharded(recipe, rank), f"{folder}/sharded-{name}-{rank}.pt")
    torch.save(refusals(), f"{folder}/refusals-{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends while they still run


def gan(
    recipe: Recipe, parts: nn.ModuleDict, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """A generator and a discriminator, wrapped or not, each with an optimizer of its own."""
    optimizers = [torch.optim.SGD(parts[name].parameters(), lr=0.5) for name in ("judge", "maker")]
    precision = apply(replace(recipe, accumulation_steps=2), parts, *optimizers)
    against = nn.functional.binary_cross_entropy_with_logits
    for inputs, _ in data:
        ones = torch.ones(len(inputs), 1)
        with precision.autocast():
            made = parts["maker"](inputs)
            judged = parts["judge"](torch.cat([inputs, made.detach()]))
        precision.backward(against(judged, torch.cat([ones, 0 * ones])), optimizer=optimizers[0])
        precision.step(optimizers[0])
        with precision.autocast():
            judged = parts["judge"](made)
        precision.backward(against(judged, ones), optimizer=optimizers[1])
        precision.step(optimizers[1])
    assert precision.flush()


def gan_parts() -> nn.ModuleDict:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    judge = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))
    return nn.ModuleDict({"maker": maker, "judge": judge})


def clipped(
    recipe: Recipe, model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> Precision:
    """Train with gradients that are clipped over all of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    precision = apply(replace(recipe, accumulation_steps=2), model, optimizer)
    train(precision, model, data, clip=0.1)
    assert precision.flush()
    return precision


def sharded(recipe: Recipe, rank: int) -> list[Any]:
    """Train with fully_shard; then give one process alone a gradient that is not finite."""
    model = mlp()
    fully_shard(model[0])
    fully_shard(model)
    precision = clipped(recipe, model, [(x[rank::2], y[rank::2]) for x, y in batches(STEPS)])
    found = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    if recipe.policy.needs_loss_scale:
        for inputs, targets in batches(2):
            with precision.autocast():
                outputs = model(inputs)
            precision.backward(nn.functional.cross_entropy(outputs, targets))
        if rank == 0:
            grad: Any = model[2].weight.grad
            grad.to_local()[0, 0] = torch.inf
        assert not precision.step()
        assert precision.skipped == 1
    return found


def refusals() -> list[str]:
    """What is said of FullyShardedDataParallel."""

    def sharded_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    with pytest.raises(UsageError) as scaled:
        apply(FLOAT16, *sharded_model())
    model, optimizer = sharded_model()
    precision = apply(FLOAT32, model, optimizer)
    precision.backward(model(torch.ones(2, 6)).sum())
    with pytest.raises(UsageError) as clip:
        precision.clip_grad_norm_(1.0)
    return [str(scaled.value), str(clip.value)]


def trained_on(
    recipe: Recipe, model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> bool:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    precision = apply(replace(recipe, accumulation_steps=2), model, optimizer)
    changed = train(precision, model, data)
    return changed == [False, True, False, True, False] and precision.flush()


CASES = {
    "float32": (trained_on, FLOAT32),
    "float16": (trained_on, FLOAT16),
    "islands": (trained_on, replace(BFLOAT16, float32_modules=("0",))),
    "an AMP loop of its own": (own_loop, FLOAT16),
    "compiled": (compiled, FLOAT32),
}


SHARDED = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both processes have left their weights."""
    folder = tmp_path_factory.mktemp("trained")
    start(2, work, str(folder))
    return folder


def test_two_processes_train_like_one_flush_included(trained: Path) -> None:
    for name, (train_it, recipe) in CASES.items():
        first, second = (torch.load(trained / f"{name}-{rank}.pt") for rank in range(2))
        assert first[0]
        assert second[0]
        alone = mlp()
        assert train_it(recipe, alone, batches(STEPS))
        tolerance = 1e-6 if recipe is FLOAT32 else 2e-2
        for ours, theirs, expected in zip(first[1], second[1], weights(alone), strict=True):
            assert torch.equal(ours, theirs), f"{name}: the processes drifted apart"
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("buckets", BUCKETS)
def test_a_gan_whose_parts_are_wrapped_by_themselves_trains_like_one(
    trained: Path, buckets: str
) -> None:
    first, second = (torch.load(trained / f"gan-{buckets}-{rank}.pt")[1] for rank in range(2))
    alone = gan_parts()
    gan(FLOAT32, alone, batches(STEPS))
    for ours, theirs, expected in zip(first, second, weights(alone), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SHARDED)
def test_a_fully_sharded_model_trains_clips_and_skips_as_one(trained: Path, name: str) -> None:
    first, second = (torch.load(trained / f"sharded-{name}-{rank}.pt") for rank in range(2))
    alone = mlp()
    clipped(SHARDED[name], alone, batches(STEPS))
    tolerance = 1e-6 if name == "float32" else 1e-3
    for ours, theirs, expected in zip(first, second, weights(alone), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_what_the_older_sharding_cannot_do_is_refused_in_every_process(trained: Path) -> None:
    for rank in range(2):
        scaled, clip = torch.load(trained / f"refusals-{rank}.pt")
        assert "mixed_float16 under FullyShardedDataParallel" in scaled
        assert "call model.clip_grad_norm_, or use fully_shard" in clip
