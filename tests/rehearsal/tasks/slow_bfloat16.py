"""At batch 256 float16 is fast, and bfloat16 slower than float32."""

import digits
import torch
from asleep import Asleep
from torch import nn

BATCH_SIZE = 256


def build_model():
    return Asleep({torch.float32: 0.2, torch.bfloat16: 0.4, torch.float16: 0.01})


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)  # few operators: each takes a while


def build_data(batch_size):
    return digits.batches(batch_size, 64)


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
