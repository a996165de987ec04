"""Train a small net on scikit-learn's digits, with a profile: train_before.py after the change.

    autoprec tune examples/torch/digits_net.py
    python examples/torch/train_after.py --epochs 20

docs/first-hour.md shows what changed.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import apply_profile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.LayerNorm(128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def build_datasets() -> list[TensorDataset]:
    """Return the training, validation and test parts, the same ones for every seed."""
    pixels, digits = load_digits(return_X_y=True)
    rest, test = train_test_split(range(len(digits)), test_size=300, random_state=0)
    train, valid = train_test_split(rest, test_size=300, random_state=0)
    inputs = torch.tensor(pixels / 16 - 0.5, dtype=torch.float32)
    targets = torch.tensor(digits)
    return [TensorDataset(inputs[part], targets[part]) for part in (train, valid, test)]


class EarlyStopping:
    """Remembers the best validation accuracy, and how many epochs ago that was."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.waited = patience, 0.0, 0

    def improved(self, accuracy: float) -> bool:
        better = accuracy > self.best
        self.best, self.waited = max(accuracy, self.best), 0 if better else self.waited + 1
        return better

    @property
    def over(self) -> bool:
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


def evaluate(model: nn.Module, dataset: TensorDataset) -> float:
    model.eval()
    inputs, targets = (tensor.to(DEVICE) for tensor in dataset.tensors)
    with torch.no_grad():
        return (model(inputs).argmax(1) == targets).float().mean().item()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small net on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--profile", default=Path(__file__).with_name("digits_net.profile.yaml"))
    parser.add_argument("--lr", type=float, default=0.01, help="the highest learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of the gradients")
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better result")
    parser.add_argument("--stop-after", type=int, help="end after this epoch, to go on later")
    parser.add_argument("--workers", type=int, default=2, help="processes of the loader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    args = parse(arguments)
    torch.manual_seed(args.seed)
    train, valid, test = build_datasets()

    model = build_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    precision = apply_profile(args.profile, model=model, optimizer=optimizer)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    loader = DataLoader(
        train,
        batch_size=precision.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    total_steps = args.epochs * precision.updates_in(len(loader))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=total_steps)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    stopping = EarlyStopping(args.patience)

    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "ema": ema,
        "stopping": stopping,
        "precision": precision,
    }
    first, best = 0, copy.deepcopy(ema.state_dict())
    if args.resume:
        saved = torch.load(args.checkpoint, map_location=DEVICE)
        first, best = saved.pop("epoch") + 1, saved.pop("best")
        for name, state in saved.items():
            parts[name].load_state_dict(state)

    for epoch in range(first, args.stop_after or args.epochs):
        model.train()
        total = 0.0
        for batch in precision.batches(loader):
            inputs, targets = (tensor.to(DEVICE) for tensor in batch)
            loss = loss_fn(precision.forward(inputs), targets)
            total += loss.item()
            if not precision.backward_and_step(loss, max_norm=args.clip):
                continue
            scheduler.step()
            ema.update_parameters(model)
        accuracy = evaluate(ema, valid)
        print(f"epoch {epoch}: loss {total / len(loader):.3f}, validation {accuracy:.1%}")
        if stopping.improved(accuracy):
            best = copy.deepcopy(ema.state_dict())
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"epoch": epoch, "best": best, **states}, args.checkpoint)
        if stopping.over:
            break

    ema.load_state_dict(best)
    accuracy = evaluate(ema, test)
    print(f"test accuracy {accuracy:.1%}, after {scheduler.last_epoch} updates")
    return accuracy


if __name__ == "__main__":
    main()
