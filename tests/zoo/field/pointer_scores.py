"""A pointer to one of ten rows by unscaled products; two channels are as large as outliers."""

import torch
from field_parts import batches, fixed
from torch import nn
from torch.nn.functional import mse_loss

TRUTH_STEPS = 200


class Pointer(nn.Module):
    def __init__(self, inputs=8, width=64):
        super().__init__()
        self.query, self.key = nn.Linear(inputs, width), nn.Linear(inputs, width)

    def forward(self, batch):
        asked, rows, values = batch
        scores = torch.einsum("nd,nkd->nk", self.query(asked), self.key(rows))
        return (torch.softmax(scores, -1) * values).sum(-1)


def build_model():
    return Pointer()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=5e-3)


def build_data(batch_size):
    def make(n):
        rows = torch.randn(n, 10, 8)
        rows[..., :2] += 40
        chosen, values = torch.randint(10, (n,)), torch.randn(n, 10)
        asked = rows[torch.arange(n), chosen, 2:] @ fixed(6, 8) / 3 + 0.02 * torch.randn(n, 8)
        return (asked, rows, values), values[torch.arange(n), chosen]

    return batches(batch_size, make)


loss_fn = mse_loss
