"""Total energies of molecules: atoms' shares with large fixed offsets, added inside the model."""

import torch
from field_parts import batches, fixed, perceptron
from torch import nn
from torch.nn.functional import smooth_l1_loss

TRUTH_STEPS = 400


class Energies(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(4, 8)
        self.share = perceptron(12, 32, 1, nn.SiLU)
        self.register_buffer("offsets", torch.tensor([-13.6, -1029.9, -1485.3, -2042.6]))

    def forward(self, batch):
        kinds, around = batch
        inner = self.share(torch.cat([self.kind(kinds), around], -1)).squeeze(-1)
        return (inner + self.offsets[kinds].to(inner.dtype)).sum(-1)


def build_model():
    return Energies()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def build_data(batch_size):
    offsets = torch.tensor([-13.6, -1029.9, -1485.3, -2042.6])

    def make(n):
        kinds, around = torch.randint(4, (n, 6)), torch.randn(n, 6, 4)
        bond = torch.tanh(around @ fixed(4)) * (1 + kinds)
        return (kinds, around), (bond + offsets[kinds]).sum(-1)

    return batches(batch_size, make)


loss_fn = smooth_l1_loss
