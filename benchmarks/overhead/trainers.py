"""What a profile costs in a trainer's update, against the trainer's own precision.

    python -m benchmarks.overhead.trainers [--processes 6] [--rounds 9] [--updates 100]

The same model, batches and optimizer by the profile and by the trainer's own flag, in turns in one
process, which gives one pair of times; printed are the medians over processes with their 95 %
intervals. Promised is at most 1 % or 50 microseconds an update, and kept where the upper end of
either is within. The exit code is 1 where neither is. One thread: see `compare`. The first updates
are left out, of which each is looked into for models beside the trained one.

A turn's time is the lower quartile of its updates, since what else the machine does can only
lengthen one, and the two of a pair follow one another. Each loss is computed where the trainer's
users compute it: in `training_step` and in the loop of accelerate, of what the model returns; by
Transformers' models themselves. The model is small: what a profile costs are calls, and a longer
update would hide them in its noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from benchmarks.checkout import child_environment
from benchmarks.overhead.fit import interval

PROMISED_RATIO, PROMISED_SECONDS = 1.01, 50e-6
WARM_UP, WARM_UP_TURNS = 40, 1
BATCH, WIDTH, LAYERS = 16, 64, 4
POLICIES = {"float32": "no", "mixed_bfloat16": "bf16"}


def stamped_model(*, has_loss: bool = False) -> Any:
    """A model that notes when it is called; with its loss it takes labels as well."""
    import torch
    from torch import nn

    class Stamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inside = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
            self.inside, self.stamps = nn.Sequential(*inside), list[float]()

        def forward(self, inputs: torch.Tensor) -> Any:
            self.stamps.append(time.perf_counter())
            return self.inside(inputs)

    class WithLoss(Stamped):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            return {"loss": nn.functional.cross_entropy(super().forward(inputs), labels)}

    torch.manual_seed(0)
    return WithLoss() if has_loss else Stamped()


def samples(updates: int) -> list[dict[str, Any]]:
    """Rows of one batch that is seen again and again."""
    import torch

    rows = [{"inputs": torch.randn(WIDTH), "labels": torch.tensor(n % 10)} for n in range(BATCH)]
    return rows * updates


def by_lightning(recipe: Any, flag: str, updates: int, folder: str) -> Any:
    """Train by Lightning's Trainer."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from autoprec.integrations.lightning import plugin

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = stamped_model()

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.model(batch["inputs"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    own = {"precision": "bf16-mixed"} if flag == "bf16" and recipe is None else {}
    lit = Lit()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=updates, logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[] if recipe is None else [plugin(recipe)], **own,
    )  # fmt: skip
    trainer.fit(lit, DataLoader(samples(updates), batch_size=BATCH))
    return lit.model


def by_accelerate(recipe: Any, flag: str, updates: int, folder: str) -> Any:
    """Train by a loop with an Accelerator."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader

    from autoprec.integrations.accelerate import bind

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision=flag)
    if recipe is not None:
        bind(accelerator, recipe)
    model = stamped_model()
    prepared, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        DataLoader(samples(updates), batch_size=BATCH),
    )
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(prepared(batch["inputs"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def by_transformers(recipe: Any, flag: str, updates: int, folder: str) -> Any:
    """Train by Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    from autoprec.integrations.transformers import apply

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", per_device_train_batch_size=BATCH, max_steps=updates,
        bf16=flag == "bf16",
    )  # fmt: skip
    model = stamped_model(has_loss=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=samples(updates))
    if recipe is not None:
        apply(trainer, recipe)
    trainer.train()
    return model


TRAINERS: dict[str, Callable[[Any, str, int, str], Any]] = {
    "Lightning": by_lightning,
    "accelerate": by_accelerate,
    "transformers": by_transformers,
}


def in_this_process(trainer: str, policy: str, rounds: int, updates: int) -> tuple[float, float]:
    """Seconds of an update by the profile and by the trainer's own precision, in turns."""
    import torch

    from autoprec import Policy, Recipe

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    recipe = Recipe(policy=Policy(policy), batch_size=BATCH)
    pairs: list[dict[bool, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(WARM_UP_TURNS + rounds):
            pairs.append({})
            for ours in (True, False) if len(pairs) % 2 else (False, True):
                model = TRAINERS[trainer](
                    recipe if ours else None, POLICIES[policy], updates, folder
                )
                stamps = model.stamps[WARM_UP:]
                lasted = [after - before for before, after in pairwise(stamps)]
                pairs[-1][ours] = quantiles(lasted, n=4)[0]
    del pairs[:WARM_UP_TURNS]
    theirs = median(pair[False] for pair in pairs)
    return theirs + median(pair[True] - pair[False] for pair in pairs), theirs


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether the promise is kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(in_this_process(*arguments.child, arguments.rounds, arguments.updates)))
        return 0
    kept = True
    for trainer in TRAINERS:
        for policy in POLICIES:
            pairs = [measured(trainer, policy, arguments) for _ in range(arguments.processes)]
            ratio = interval([ours / theirs for ours, theirs in pairs])
            more = interval([ours - theirs for ours, theirs in pairs])
            kept &= ratio.high <= PROMISED_RATIO or more.high <= PROMISED_SECONDS
            own = median(theirs for _, theirs in pairs)
            times = f"{ratio.middle:.3f}x ({ratio.low:.3f}-{ratio.high:.3f})"
            us = [f"{each * 1e6:+.0f}" for each in (more.middle, more.low, more.high)]
            print(
                f"{trainer}, {policy}: {own * 1e3:.2f} ms an update; by the profile {times}, "
                f"{us[0]} us ({us[1]} to {us[2]})",
                flush=True,
            )
    return 0 if kept else 1


def measured(trainer: str, policy: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """The pair of one process."""
    asked = ["--rounds", str(arguments.rounds), "--updates", str(arguments.updates)]
    command = [sys.executable, "-m", "benchmarks.overhead.trainers", "--child", trainer, policy]
    done = subprocess.run(
        [*command, *asked], env=child_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{trainer}, {policy}: {done.stderr}")
    ours, theirs = json.loads(done.stdout.splitlines()[-1])
    return ours, theirs


if __name__ == "__main__":
    sys.exit(main())
