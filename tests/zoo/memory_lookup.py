"""Cross attention from a noisy query to a memory of eight keys and values. Healthy."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches

loss_fn = mse_loss


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.match = nn.Linear(8, 16)
        self.value = nn.Linear(3, 16)
        self.head = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 3))

    def forward(self, inputs):
        query, memory = inputs
        keys, values = self.match(memory[..., :8]), self.value(memory[..., 8:])
        scores = self.match(query).unsqueeze(1) @ keys.transpose(1, 2) / 4.0
        return self.head((torch.softmax(scores, -1) @ values).squeeze(1))


def build_model():
    return Lookup()


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        memory, chosen = torch.randn(n, 8, 11), torch.randint(8, (n,))
        item = memory[torch.arange(n), chosen]
        query = item[:, :8] + 0.4 * torch.randn(n, 8)
        return (query, memory), item[:, 8:] + 0.2 * torch.randn(n, 3)

    return batches(batch_size, make)
