"""DistributedDataParallel, for real: two processes, gloo, tiny models."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from operated import BFLOAT16, FLOAT16, FLOAT32, apply, batches, mlp, train, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoprec.core.recipe import Recipe

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo"),
]

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
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends while they still run


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


def test_two_processes_train_like_one_flush_included(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        work, args=(str(tmp_path),), nprocs=2, start_method="spawn"
    )
    for name, (train_it, recipe) in CASES.items():
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        assert first[0]
        assert second[0]
        alone = mlp()
        assert train_it(recipe, alone, batches(STEPS))
        tolerance = 1e-6 if recipe is FLOAT32 else 2e-2
        for ours, theirs, expected in zip(first[1], second[1], weights(alone), strict=True):
            assert torch.equal(ours, theirs), f"{name}: the processes drifted apart"
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
