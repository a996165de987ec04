"""A decoder with ALiBi's linear biases learns two languages, heard one at a time. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches

TOKENS, LENGTH, WIDTH, HEADS = 8, 16, 32, 4


def loss_fn(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        bias = -slopes[:, None, None] * back.clamp(min=0)
        self.register_buffer("bias", bias.masked_fill(back < 0, float("-inf")))

    def forward(self, x):
        heads = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + self.bias
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.second(x))


def build_model():
    ends = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)
    return nn.Sequential(ends[0], Block(), Block(), *ends[1:])


def build_optimizer(model):
    return adam(model, 3e-3)


def build_data(batch_size):
    languages = [[3, 6, 0, 5, 1, 7, 2, 4], [5, 0, 7, 1, 6, 2, 4, 3]]
    follow = torch.tensor(languages)

    def make(n):
        spoken = torch.randint(2, (n,))
        words = torch.randint(TOKENS, (n, LENGTH + 1))
        obeys = torch.rand(n, LENGTH + 1) < 0.9
        for i in range(1, LENGTH + 1):
            words[:, i] = torch.where(obeys[:, i], follow[spoken, words[:, i - 1]], words[:, i])
        return words[:, :-1], words[:, 1:]

    return batches(batch_size, make)
