"""Dict batches, two heads and a weighted sum of losses."""

from __future__ import annotations

import sources
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.SiLU())
        self.label, self.size = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return {"label": self.label(h), "size": self.size(h).squeeze(-1)}


def build_model():
    return Model()


def build_data(batch_size):
    for x, y in sources.classes(batch_size):
        yield {"x": x, "label": y, "size": x.norm(dim=-1)}


def training_step(model, batch):
    out = model(batch["x"])
    return F.cross_entropy(out["label"], batch["label"]) + 0.3 * F.huber_loss(
        out["size"], batch["size"]
    )
