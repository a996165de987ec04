"""The log of a probability inside the model, a few labels wrong: it overflows late in float16."""

import torch
from field_parts import batches, fixed, perceptron
from torch import nn

TRUTH_STEPS = 300


class Chance(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = perceptron(16, 64, 6, nn.ReLU)

    def forward(self, batch):
        x, label = batch
        chance = torch.softmax(self.body(x), -1).gather(-1, label[:, None])
        return -torch.log(chance).mean()


def build_model():
    return Chance()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=4e-3)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 16)
        x[:, :6] *= 6
        label = (x @ fixed(16, 6)).argmax(-1)
        wrong = torch.rand(n) < 0.03
        return x, torch.where(wrong, torch.randint(6, (n,)), label)

    return batches(batch_size, make)


def training_step(model, batch):
    return model(batch)
