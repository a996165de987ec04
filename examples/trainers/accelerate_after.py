"""Handwritten digits with accelerate: accumulation, clipping, a schedule, a saved state."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec.integrations.accelerate import bind


def build_model():
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))


def build_data():
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
    return TensorDataset(pixels, torch.tensor(digits.target))


if __name__ == "__main__":
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    precision = bind(accelerator, "model.profile.yaml")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
    loader = DataLoader(build_data(), batch_size=precision.batch_size, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state("checkpoints")
    print(f"loss {loss.item():.3f}")
