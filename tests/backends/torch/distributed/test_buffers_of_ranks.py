"""One rank's overflow leaves every rank's buffers as they were: real processes, Gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.torch.apply.wrapping import distribute
from autoprec.core.recipe import Distributed
from tests.backends.torch.distributed.joined import on_two_ranks
from tests.backends.torch.operated import FLOAT16, accumulating, apply, batches

pytestmark = [pytest.mark.torch, pytest.mark.scale]

UPDATES, SKIPPED = 4, (0, 2)


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engine in ("ddp", "fsdp2"):
        for steps in (1, 2):
            found[f"{engine} {steps}"] = train(engine, steps, rank)
    return found


def train(engine: Any, steps: int, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    recipe = replace(accumulating(FLOAT16, steps), distributed=Distributed(engine, 2))
    model = distribute(
        recipe,
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        "cpu",
    )
    precision = apply(recipe, model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept, changed = [], []
    data = batches(2 * steps * UPDATES)[rank::2]
    for update in range(UPDATES):
        before = [buffer.clone() for buffer in model.buffers()]
        for index in range(steps):
            inputs, targets = data[update * steps + index]
            if update in SKIPPED and index == 0 and rank == 1:
                inputs[3] = 1e6
            with precision.autocast():
                outputs = model(inputs)
            precision.backward(nn.functional.cross_entropy(outputs, targets))
            done = precision.step()
        changed.append(done)
        kept.append(all(map(torch.equal, before, model.buffers())))
    finite = all(bool(buffer.isfinite().all()) for buffer in model.buffers())
    return {"changed": changed, "kept": kept, "finite": finite}


def test_all_ranks_skip_together_and_keep_their_buffers(tmp_path: Path) -> None:
    skips = [update in SKIPPED for update in range(UPDATES)]
    for rank in on_two_ranks(work, tmp_path):
        for name, found in rank.items():
            assert found["changed"] == [not skip for skip in skips], name
            assert found["kept"] == skips, name
            assert found["finite"], name
