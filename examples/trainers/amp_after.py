"""Handwritten digits in a loop with its own AMP, an average of the weights, and resume."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import apply_profile


def build_model():
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))


def build_data():
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
    return TensorDataset(pixels, torch.tensor(digits.target))


if __name__ == "__main__":
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    autocast, scaler = apply_profile("model.profile.yaml", model=model, optimizer=optimizer).amp
    parts = {"model": model, "optimizer": optimizer, "average": average, "scaler": scaler}
    if "--resume" in sys.argv:
        for name, state in torch.load("last.pt", weights_only=True).items():
            parts[name].load_state_dict(state)
    for _ in range(2):
        for batch in DataLoader(build_data(), batch_size=32, shuffle=True):
            inputs, targets = (each.to(device) for each in batch)
            with autocast():
                loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update_parameters(model)
        torch.save({name: part.state_dict() for name, part in parts.items()}, "last.pt")
    print(f"loss {loss.item():.3f}")
