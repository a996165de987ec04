"""A graph network moves atoms and adds a 1 / r^12 repulsion. Fails in float16 only: overflow."""

import torch
from torch import nn
from torch.nn.functional import huber_loss
from zoo_parts import adam, batches

loss_fn = huber_loss
ATOMS, KINDS, WIDTH = 6, 4, 32


class Repulsion(nn.Module):
    def forward(self, places):
        apart = places.unsqueeze(2) - places.unsqueeze(1)
        squared = apart.square().sum(-1) + 0.05
        energy = (0.8 / squared) ** 6
        itself = torch.eye(ATOMS, dtype=torch.bool, device=places.device)
        return torch.log1p(energy.masked_fill(itself, 0.0).sum((1, 2)))


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * WIDTH + 1, 48), nn.SiLU(), nn.Linear(48, WIDTH))
        self.node = nn.Sequential(nn.Linear(2 * WIDTH, 48), nn.SiLU(), nn.Linear(48, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden, places):
        apart = (places.unsqueeze(2) - places.unsqueeze(1)).square().sum(-1, keepdim=True)
        here = hidden.unsqueeze(2).expand(-1, -1, ATOMS, -1)
        heard = self.edge(torch.cat([here, here.transpose(1, 2), torch.exp(-apart)], -1)).mean(2)
        return self.norm(hidden + self.node(torch.cat([hidden, heard], -1)))


class Molecule(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds, self.layers = nn.Linear(KINDS, WIDTH), nn.ModuleList([Messages(), Messages()])
        self.frame = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.frame.weight)
        self.repulsion, self.head = Repulsion(), nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        kinds, places = inputs
        places, hidden = self.frame(places), self.kinds(kinds)
        for layer in self.layers:
            hidden = layer(hidden, places)
        return self.head(hidden).sum((1, 2)) + self.repulsion(places)


def build_model():
    return Molecule()


def build_optimizer(model):
    return adam(model, 2e-3)


def build_data(batch_size):
    charges = torch.tensor([1.0, -1.0, 0.5, -0.5])

    def make(n):
        kinds, places = torch.randint(KINDS, (n, ATOMS)), torch.randn(n, ATOMS, 3)
        apart = (places.unsqueeze(2) - places.unsqueeze(1)).square().sum(-1)
        charge = charges[kinds]
        pull = (charge.unsqueeze(2) * charge.unsqueeze(1) * torch.exp(-apart / 2)).sum((1, 2))
        energy = pull + charge.sum(1) + Repulsion()(places)
        return (torch.eye(KINDS)[kinds], places), energy

    return batches(batch_size, make)
