"""Short ways on the globe as arc cosines of dot products near one. Fails in both formats."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss
REACH = 0.01  # radians: about 64 km


def on_globe(offsets):
    latitude, longitude = 0.8 + REACH * offsets[:, 0], 0.3 + REACH * offsets[:, 1]
    level = latitude.cos()
    return torch.stack([level * longitude.cos(), level * longitude.sin(), latitude.sin()], 1)


class ToStations(nn.Module):
    def __init__(self):
        super().__init__()
        places = [[-1, -1], [-1, 1], [1, -1], [1, 1], [0, 0.3], [0.5, -0.2]]
        self.register_buffer("stations", on_globe(torch.tensor(places)).t().contiguous())

    def forward(self, places):
        cosines = places @ self.stations
        return cosines.clamp(-1, 1).acos() / REACH - 1


class Weather(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = ToStations()
        self.body = nn.Sequential(
            nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def forward(self, places):
        return self.body(self.ways(places))


def build_model():
    return Weather()


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        offsets = 2 * torch.rand(n, 2) - 1
        return on_globe(offsets), smooth(2 * offsets)

    return batches(batch_size, make)
