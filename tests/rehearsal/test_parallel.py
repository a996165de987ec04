"""DistributedDataParallel on pretended GPUs: two processes, one GPU each, gloo."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rehearsal import T4

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]

TRAIN = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from autoprec import apply_profile
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
found = {}
if world > 1:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
for policy in (Policy.FLOAT32, Policy.MIXED_FLOAT16):
    for own in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        used = DistributedDataParallel(model, device_ids=[rank]) if world > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        recipe = Recipe(policy=policy, accumulation_steps=2, loss_scale=LossScale(initial=256.0))
        precision = apply_profile(recipe, model=used, optimizer=optimizer)
        data = torch.Generator().manual_seed(1)
        for _ in range(5):
            x = torch.randn(8, 8, generator=data)[rank::world].to(device)
            y = torch.randint(4, (8,), generator=data)[rank::world].to(device)
            with precision.autocast():
                outputs = used(x)
            loss = nn.functional.cross_entropy(outputs, y)
            if own:
                precision.scaler.scale(loss).backward()
                precision.scaler.step(optimizer)
                precision.scaler.update()
                optimizer.zero_grad()
            else:
                precision.backward(loss)
                precision.step()
        if not own:
            assert precision.flush()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        found[f"{policy.value} own={own}"] = weights.tolist()
        precision.restore()
print(json.dumps(found), flush=True)
if world > 1:
    dist.barrier()
os._exit(0)  # torch's threads (gloo's, the pretended device's) may abort a process as it ends
"""


def test_two_processes_with_a_gpu_each_train_like_one(rehearse: Any) -> None:
    machine = rehearse("cuda", gpus=[T4, T4])
    store = machine.folder / "store"

    def train(rank: int, world: int) -> dict[str, list[float]]:
        words = [sys.executable, "-c", TRAIN, str(rank), str(world), str(store)]
        done = machine.run(words, seconds=120)
        assert done.returncode == 0, done.stderr
        trained: dict[str, list[float]] = json.loads(done.stdout)
        return trained

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, (0, 1), (2, 2))
    alone = train(0, 1)
    assert first == second
    for way, weights in alone.items():
        assert first[way] == pytest.approx(weights, abs=1e-6 if "float32" in way else 5e-3), way
