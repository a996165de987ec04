"""Trains as one of the ranks that torchrun starts, and writes down what it saw as JSON.

Called with the trainer, what to try, and the folder to write to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from autoprec import Policy, Recipe
from autoprec.core.recipe import LossScale
from autoprec.errors import UsageError

RANK = int(os.environ.get("RANK", "0"))
REDUCED: list[int] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)).relu())


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (64,), generator=generator))


def recipe_for(what: str) -> Recipe:
    if what == "sharded":
        return Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, float32_modules=("norm",))
    if what == "alone":
        return Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8, float32_modules=("norm",))
    if what == "sharded float32":
        return Recipe(batch_size=4)
    if what == "disagreement" and RANK == 1:
        return Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, accumulation_steps=4)
    if what == "overflow":
        return Recipe(
            policy=Policy.MIXED_FLOAT16,
            batch_size=4,
            accumulation_steps=4,
            loss_scale=LossScale(initial=1024.0),
        )
    return Recipe(batch_size=4, accumulation_steps=4)


def counted(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
    REDUCED.append(1)
    return allreduce_hook(state, bucket)


def overflow_on_the_second_rank(model: nn.Module) -> None:
    if RANK == 1:
        calls: list[int] = []

        def overflow(grad: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return torch.full_like(grad, torch.inf) if len(calls) == 4 else grad

        model.last.bias.register_hook(overflow)  # type: ignore[union-attr, operator]


def whole(parameter: Any) -> torch.Tensor:
    """Return all of a parameter of which each rank has a part."""
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach()


def with_lightning(what: str, model: Net) -> Any:
    import lightning as pl
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from autoprec.integrations.lightning import plugin

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_start(self) -> None:  # Lightning registers hooks on GPUs only
            if not is_sharded:
                self.trainer.strategy.model.register_comm_hook(None, counted)

        def configure_model(self) -> None:
            if is_sharded:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    is_sharded = what.startswith("sharded")
    sharding = ModelParallelStrategy(2, 1, process_group_backend="gloo")
    ddp = DDPStrategy(process_group_backend="gloo")
    made = plugin(recipe_for(what))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, plugins=[made], logger=False,
        strategy=sharding if is_sharded else ddp, use_distributed_sampler=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    own = DistributedSampler(data(), num_replicas=2, rank=RANK, shuffle=False)
    trainer.fit(Lit(), DataLoader(data(), batch_size=4, sampler=own))
    return made.loop


def with_accelerate(what: str, model: Net) -> Any:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    from autoprec.integrations.accelerate import bind

    accelerator = Accelerator(cpu=True)
    is_sharded = what.startswith("sharded")
    if is_sharded:  # which accelerate leaves to GPUs
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    loop = bind(accelerator, recipe_for(what))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=4)
    )
    if not is_sharded:
        prepared.register_comm_hook(None, counted)
    for inputs, targets in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(nn.functional.cross_entropy(prepared(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return loop


def main(trainer: str, what: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    if what == "overflow":
        overflow_on_the_second_rank(model)
    found: dict[str, Any] = {}
    try:
        loop = {"lightning": with_lightning, "accelerate": with_accelerate}[trainer](what, model)
        found = {"reduced": len(REDUCED), "skipped": loop.skipped, "steps": loop.steps}
        found["weights"] = [whole(p).flatten().tolist() for p in model.parameters()]
        found["checks"] = [(each.problem, each.not_checked) for each in loop.watched]
    except UsageError as error:
        found["error"] = str(error)
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    os._exit(0)  # where ranks disagree, nobody waits for the others


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
