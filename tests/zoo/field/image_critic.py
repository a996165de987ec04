"""A Wasserstein critic of image patches, its penalty from slopes squared, summed and rooted."""

import torch
from field_parts import batches
from torch import nn

TRUTH_STEPS = 200


class Critic(nn.Module):
    def __init__(self, patch=4):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, 16)
        self.head = nn.Sequential(
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(16 * 9, 48),
            nn.LeakyReLU(0.2),
            nn.Linear(48, 1),
        )

    def forward(self, image):
        patches = nn.functional.unfold(image, self.patch, stride=self.patch).transpose(1, 2)
        return self.head(self.embed(patches))


def build_model():
    return Critic()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.9))


def build_data(batch_size):
    line = torch.linspace(-1, 1, 12)

    def make(n):
        middle = 0.5 * torch.randn(n, 2, 1, 1)
        blob = torch.exp(-4 * ((line - middle[:, 0]) ** 2 + (line[:, None] - middle[:, 1]) ** 2))
        return 2 * blob[:, None] - 1, torch.tanh(torch.randn(n, 1, 12, 12)), torch.rand(n, 1, 1, 1)

    return batches(batch_size, make)


def training_step(model, batch):
    real, fake, mix = batch
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    scores = model(between)
    (slope,) = torch.autograd.grad(
        scores, between, grad_outputs=torch.ones_like(scores), create_graph=True
    )
    length = (slope.flatten(1).square().sum(-1) + 1e-12).sqrt()
    return model(fake).mean() - model(real).mean() + 10 * (length - 1).square().mean()
