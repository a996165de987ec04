"""Two tasks on one trunk, weighted by learned uncertainties, on raw but normed columns. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from zoo_parts import batches, labels, smooth


def loss_fn(outputs, targets):
    value, logits, spread = outputs
    wanted, kinds = targets[:, :1], targets[:, 1].long()
    losses = torch.stack([0.5 * mse_loss(value, wanted), cross_entropy(logits, kinds)])
    return (torch.exp(-spread) * losses + 0.5 * spread).sum()


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.BatchNorm1d(10),
            nn.Linear(10, 48),
            nn.BatchNorm1d(48),
            nn.LeakyReLU(0.1),
            nn.Linear(48, 32),
            nn.LeakyReLU(0.1),
        )
        self.value, self.kind = nn.Linear(32, 1), nn.Linear(32, 3)
        self.spread = nn.Parameter(torch.zeros(2))

    def forward(self, columns):
        hidden = self.trunk(columns)
        return self.value(hidden), self.kind(hidden), self.spread


def build_model():
    return TwoTasks()


def build_optimizer(model):
    groups = [
        {"params": [p for name, p in model.named_parameters() if name != "spread"]},
        {"params": [model.spread], "lr": 2e-3},
    ]
    return torch.optim.Adam(groups, lr=6e-3, amsgrad=True)


def build_data(batch_size):
    scales = torch.tensor([20.0, 5.0, 0.1, 300.0, 1.0, 8.0, 0.5, 40.0, 2.0, 100.0])

    def make(n):
        plain = torch.randn(n, 10)
        targets = torch.cat([smooth(plain), labels(plain, 3, seed=13).unsqueeze(1)], 1)
        return (plain + 1.5) * scales, targets

    return batches(batch_size, make)
