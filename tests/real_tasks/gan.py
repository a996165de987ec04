"""A GAN in one module; its discriminator has the spectral norm that is made by a hook.

Tuned, both losses are one step of one optimizer; trained, each has its own.
"""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.nn.utils import spectral_norm

BATCH_SIZE = 32


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 6)
        )
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Linear(6, 32)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(32, 1))
        )

    def forward(self, part, inputs):
        return self.get_submodule(part)(inputs)


def build_model():
    return Gan()


def build_data(batch_size):
    mix = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(400):
        yield {"real": torch.tanh(torch.randn(batch_size, 6) @ mix)}


def discriminator_loss(model, real, made):
    return (
        softplus(-model("discriminator", real).float()).mean()
        + softplus(model("discriminator", made.detach()).float()).mean()
    )


def generator_loss(model, made):
    return softplus(-model("discriminator", made).float()).mean()


def noise(batch):
    return torch.randn(len(batch["real"]), 8, device=batch["real"].device)


def training_step(model, batch):
    made = model("generator", noise(batch))
    loss = discriminator_loss(model, batch["real"], made)
    model.discriminator.requires_grad_(False)
    try:
        return loss + generator_loss(model, made)
    finally:
        model.discriminator.requires_grad_(True)


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.99))


def losses(model, batch, autocast):
    """The discriminator's loss and, after its step, the generator's, each for its optimizer."""
    with autocast():
        made = model("generator", noise(batch))
        loss = discriminator_loss(model, batch["real"], made)
    yield 0, loss
    with autocast():
        loss = generator_loss(model, made)
    yield 1, loss


def build_optimizers(model):
    parts = (model.discriminator, model.generator)
    return [torch.optim.Adam(p.parameters(), lr=1e-3, betas=(0.5, 0.99)) for p in parts]
