"""A small diffusion U-Net that is told its noise level; its weights are averaged as it trains."""

import math

import torch
from torch import nn

BATCH_SIZE = 16
CLIP_GRAD_NORM = 1.0
STEPS = 100
KEPT = torch.cos(torch.linspace(0, math.pi / 2 * 0.98, STEPS)) ** 2
PATTERNS = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm = nn.GroupNorm(4, inputs)
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(16, outputs)

    def forward(self, x, time):
        return self.conv(nn.functional.silu(self.norm(x))) + self.time(time)[..., None, None]


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rates", 10.0 ** -torch.linspace(0, 2, 8), persistent=False)
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.down, self.middle, self.up = Block(8, 16), Block(16, 16), Block(24, 8)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x, steps):
        angles = steps[:, None] * self.rates
        time = torch.cat([angles.sin(), angles.cos()], 1)
        whole = self.first(x)
        half = self.down(nn.functional.avg_pool2d(whole, 2), time)
        half = half + self.middle(half, time)
        back = nn.functional.interpolate(half, scale_factor=2)
        return self.last(self.up(torch.cat([whole, back], 1), time))


def build_model():
    return UNet()


def build_data(batch_size):
    for _ in range(400):
        clean = PATTERNS[torch.randint(4, (batch_size,))]
        noise, steps = torch.randn_like(clean), torch.randint(STEPS, (batch_size,))
        kept = KEPT[steps][:, None, None, None]
        yield {"noisy": kept.sqrt() * clean + (1 - kept).sqrt() * noise, "steps": steps}, noise


def training_step(model, batch):
    inputs, noise = batch
    return nn.functional.mse_loss(model(inputs["noisy"], inputs["steps"]), noise)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def build_average(model):
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
