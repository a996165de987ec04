"""log(1 + exp(x)) and a softmax by hand: exponentials of a dozen overflow float16.

Under a profile they are float32's, as the model's own code ends in log_softmax: the zoo calls the
tuner wrong, whose verdict is of the profile. The truth is of a loop by hand.
"""

import torch
from torch import nn
from torch.nn.functional import nll_loss
from zoo_parts import adam, batches, labels


class OwnSoftmax(nn.Module):
    def forward(self, x):
        exponentials = torch.exp(3.0 * x)
        return exponentials / exponentials.sum(-1, keepdim=True)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(12, 24), nn.Linear(12, 24)
        self.softmax = OwnSoftmax()
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        return torch.log_softmax(self.head(self.softmax(self.gate(x)) * self.value(x) * 8.0), -1)


def build_model():
    return Attentive()


def loss_fn(outputs, targets):
    return nll_loss(outputs, targets)


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        x = 3.0 * torch.randn(n, 12)
        return x, labels(x)

    return batches(batch_size, make)
