"""A recurrent net over an image's rows, time first as nn.LSTM takes it by default."""

import digits
from torch import nn

BATCH_SIZE = 16


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 24)
        self.head = nn.Linear(24, 10)

    def forward(self, rows):
        return self.head(self.lstm(rows)[0][-1])


def build_model():
    return Rows()


def build_data(batch_size):
    for images, classes in digits.batches(batch_size, 8, 8):
        yield images.transpose(0, 1), classes


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
