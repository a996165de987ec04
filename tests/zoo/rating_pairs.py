"""Chess-like ratings near 2900, games decided by differences of five. Silent in bfloat16 only."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from zoo_parts import adam, batches, smooth

loss_fn = binary_cross_entropy_with_logits


class Rating(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        nn.init.constant_(self.body[2].bias, 2900.0)

    def forward(self, player):
        return self.body(player).squeeze(-1)


class Game(nn.Module):
    def __init__(self):
        super().__init__()
        self.rating = Rating()

    def forward(self, inputs):
        white, black = inputs
        return (self.rating(white) - self.rating(black)) / 5.0


def build_model():
    return Game()


def build_optimizer(model):
    return adam(model, 2e-2)


def build_data(batch_size):
    def make(n):
        white, black = torch.randn(2, n, 8)
        advantage = 3.0 * (smooth(white) - smooth(black)).squeeze(-1)
        won = torch.rand(n) < torch.sigmoid(advantage)
        return (white, black), won.to(white.dtype)

    return batches(batch_size, make)
