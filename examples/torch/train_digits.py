"""Train the digits net twice, in float32 and with its profile, and print the two side by side.

    autoprec tune examples/torch/digits_conv.py
    python examples/torch/train_digits.py

The two trainings take turns step by step, so that both meet the same machine: timed one after the
other, a machine that drifts would decide.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from statistics import median

import torch
from digits_conv import BATCH_SIZE, build_data, build_model, build_optimizer, evaluate, loss_fn

from autoprec import apply_profile

PROFILE = Path(__file__).with_name("digits_conv.profile.yaml")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Batch = tuple[torch.Tensor, torch.Tensor]


def one_epoch(batch_size: int, epoch: int) -> Iterator[Batch]:
    """Yield an epoch's batches; both trainings see the samples in the same order."""
    torch.manual_seed(epoch)
    for inputs, targets in build_data(batch_size):
        yield inputs.to(DEVICE), targets.to(DEVICE)


def train_float32(model: torch.nn.Module, epochs: int) -> Iterator[float]:
    """Train as anyone would; yield the seconds of each step."""
    optimizer = build_optimizer(model)
    for epoch in range(epochs):
        for inputs, targets in one_epoch(BATCH_SIZE, epoch):
            start = time.perf_counter()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for the device
            yield time.perf_counter() - start


def train_tuned(model: torch.nn.Module, epochs: int, profile: Path) -> Iterator[float]:
    """Train with a profile; yield the seconds of each step that changed the weights."""
    optimizer = build_optimizer(model)
    precision = apply_profile(profile, model=model, optimizer=optimizer)
    print(f"recipe: {precision.policy} at batch {precision.batch_size}", flush=True)
    for epoch in range(epochs):
        seconds = 0.0
        for inputs, targets in one_epoch(precision.batch_size, epoch):
            start = time.perf_counter()
            with precision.autocast():
                outputs = model(inputs)
            loss = loss_fn(outputs, targets)
            precision.backward(loss)
            updated = precision.step()
            loss.item()
            seconds += time.perf_counter() - start
            if updated:
                yield seconds
                seconds = 0.0
        precision.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the digits net in float32 and tuned.")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="file or folder of profiles")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="stop after this many steps of each")
    arguments = parser.parse_args()
    if not arguments.profile.exists():
        parser.error(f"no {arguments.profile}: run `autoprec tune examples/torch/digits_conv.py`")

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build_model().to(DEVICE))
    plain, tuned = models
    turns = zip_longest(
        train_float32(plain, arguments.epochs),
        train_tuned(tuned, arguments.epochs, arguments.profile),
    )
    seconds = list(islice(turns, arguments.steps))

    print(f"{'':10}{'time per step':>16}{'test accuracy':>16}")
    for column, (name, model) in enumerate([("float32", plain), ("tuned", tuned)]):
        step = median(pair[column] for pair in seconds if pair[column] is not None)
        print(f"{name:10}{step * 1e3:>13.1f} ms{evaluate(model):>16.1%}")
    ratios = [plain / tuned for plain, tuned in seconds if plain and tuned]
    print(f"tuned is {median(ratios):.2f}x float32 (median over {len(ratios)} pairs of steps)")


if __name__ == "__main__":
    main()
