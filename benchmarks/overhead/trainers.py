"""What a profile costs in a trainer's update, against the trainer's own precision.

    python -m benchmarks.overhead.trainers [--processes 6] [--rounds 5] [--updates 100]

The same model, batches and optimizer by the profile and by the trainer's own flag, in turns in one
process, which gives one pair of medians; printed are the medians over processes with their 95 %
intervals. Promised is at most 1 % or 50 microseconds an update, and kept where the upper end of
either is within. The exit code is 1 where neither is. One thread: see `compare`. The first updates
are left out, of which each is looked into for models beside the trained one.
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
from statistics import median
from typing import Any

from benchmarks.checkout import child_environment
from benchmarks.overhead.fit import interval

PROMISED_RATIO, PROMISED_SECONDS = 1.01, 50e-6
WARM_UP = 40
BATCH, WIDTH, LAYERS = 64, 256, 4
POLICIES = {"float32": "no", "mixed_bfloat16": "bf16"}


def stamped_model() -> Any:
    """A model that notes when it is called, and returns its loss with labels."""
    import torch
    from torch import nn

    class Stamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inside = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
            self.inside, self.stamps = nn.Sequential(*inside), list[float]()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
            self.stamps.append(time.perf_counter())
            return {"loss": nn.functional.cross_entropy(self.inside(inputs), labels)}

    torch.manual_seed(0)
    return Stamped()


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
            return self.model(**batch)["loss"]

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
        accelerator.backward(prepared(**batch)["loss"])
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
    model = stamped_model()
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
    found: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 * rounds):
            ours = (turn + turn // 2) % 2 == 0  # ABBA
            model = TRAINERS[trainer](recipe if ours else None, POLICIES[policy], updates, folder)
            lasted = [after - before for before, after in pairwise(model.stamps)]
            found[ours].append(median(lasted[WARM_UP:]))
    return median(found[True]), median(found[False])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether the promise is kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
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
