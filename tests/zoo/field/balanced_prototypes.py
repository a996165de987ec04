"""SwAV: two views swap assignments that Sinkhorn balances from exp of scores over 0.05."""

import torch
from field_parts import batches, fixed, perceptron
from torch import nn
from torch.nn.functional import log_softmax, normalize

TRUTH_STEPS = 200


@torch.no_grad()
def sinkhorn(scores, rounds=3):
    q = torch.exp(scores / 0.05).T
    q = q / q.sum()
    for _ in range(rounds):
        q = q / q.sum(1, keepdim=True) / q.shape[0]
        q = q / q.sum(0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = perceptron(32, 96, 64, nn.ReLU)
        self.prototypes = nn.Linear(64, 20, bias=False)

    def forward(self, view):
        return self.prototypes(normalize(self.body(view), dim=-1))


def build_model():
    return Prototypes()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def build_data(batch_size):
    def make(n):
        kind = torch.randint(12, (2 * n,))
        clean = 1.5 * fixed(12, 32)[kind]
        return clean + torch.randn(2 * n, 32), clean + torch.randn(2 * n, 32)

    return batches(batch_size, make)


def training_step(model, batch):
    with torch.no_grad():
        model.prototypes.weight.copy_(normalize(model.prototypes.weight, dim=-1))
    one, two = model(batch[0]), model(batch[1])
    swapped = sinkhorn(one) * log_softmax(two / 0.1, -1) + sinkhorn(two) * log_softmax(
        one / 0.1, -1
    )
    return -swapped.sum(-1).mean() / 2
