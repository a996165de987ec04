"""A duelling Q network learns from logged moves, with double targets of a slow copy. Healthy."""

import copy

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss
from zoo_parts import batches, teacher

STATES, ACTIONS = 10, 4


class Duelling(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(STATES, width), nn.LayerNorm(width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.value = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, 1))
        self.advantage = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, ACTIONS))

    def forward(self, states):
        hidden = self.second(self.first(states))
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(-1, keepdim=True)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = Duelling()
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def follow(self, rate=0.02):
        for slow, online in zip(self.slow.parameters(), self.online.parameters(), strict=True):
            slow.lerp_(online, rate)

    def forward(self, states, after):
        with torch.no_grad():
            best = self.online(after).argmax(-1, keepdim=True)
            later = self.slow(after).gather(1, best).squeeze(1)
        return self.online(states), later


def build_model():
    return Agent()


def build_optimizer(model):
    return torch.optim.Adam(model.online.parameters(), lr=1e-3)


def training_step(model, batch):
    states, actions, rewards, after = batch
    model.follow()
    values, later = model(states, after)
    chosen = values.gather(1, actions.unsqueeze(1)).squeeze(1)
    return smooth_l1_loss(chosen, rewards + 0.8 * later)


def build_data(batch_size):
    moves, goals = teacher(ACTIONS, STATES, seed=5), 3 * teacher(STATES, ACTIONS, seed=7)

    def make(n):
        states, actions = torch.randn(n, STATES), torch.randint(ACTIONS, (n,))
        rewards = torch.tanh((states @ goals).gather(1, actions.unsqueeze(1)).squeeze(1))
        after = 0.8 * states + 0.5 * moves[actions] + 0.3 * torch.randn(n, STATES)
        return states, actions, rewards, after

    return batches(batch_size, make)
