"""Sets are matched by Sinkhorn's scaling of exp(-cost / 0.05), not in logs. Fails in float16."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from zoo_parts import adam, batches, teacher

POINTS, WIDTH = 6, 8


def loss_fn(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Sinkhorn(nn.Module):
    def forward(self, left, right):
        kernel = torch.exp((left @ right.transpose(1, 2) - 1) / 0.05)
        columns = torch.ones_like(kernel[:, :1]).transpose(1, 2)
        for _ in range(5):
            rows = 1 / (kernel @ columns)
            columns = 1 / (kernel.transpose(1, 2) @ rows)
        return rows * kernel * columns.transpose(1, 2)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinkhorn = Sinkhorn()

    def forward(self, sets):
        left, right = sets.unbind(1)
        left, right = normalize(self.left(left), dim=-1), normalize(self.right(right), dim=-1)
        return torch.log(self.sinkhorn(left, right) + 1e-12)


def build_model():
    return Matcher()


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    turn = torch.linalg.qr(teacher(WIDTH, WIDTH, seed=29))[0]

    def make(n):
        order = torch.rand(n, POINTS).argsort(1)
        right = torch.randn(n, POINTS, WIDTH)
        left = right.gather(1, order.unsqueeze(-1).expand(-1, -1, WIDTH)) @ turn
        return torch.stack([left, right + 0.1 * torch.randn_like(right)], 1), order

    return batches(batch_size, make)
