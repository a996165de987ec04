"""An actor and a critic learn from logged random actions, with advantages and entropy. Healthy."""

import torch
from torch import nn
from torch.nn.functional import mse_loss, one_hot
from zoo_parts import batches, teacher

ACTIONS = 4


def loss_fn(outputs, targets):
    logits, values = outputs
    taken, rewards = targets.split([ACTIONS, 1], -1)
    chances = logits.log_softmax(-1)
    ratios = ACTIONS * (chances * taken).sum(-1).exp()
    gains = (rewards - values).squeeze(-1).detach()
    gains = gains / (gains.std() + 1e-3)
    entropy = -(chances.exp() * chances).sum(-1).mean()
    return 0.5 * mse_loss(values, rewards) - (ratios * gains).mean() - 0.02 * entropy


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, ACTIONS), nn.Linear(64, 1)
        nn.init.orthogonal_(self.actor.weight, gain=0.01)

    def forward(self, states):
        hidden = self.trunk(states)
        return self.actor(hidden), self.critic(hidden)


def build_model():
    return ActorCritic()


def build_optimizer(model):
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.99, eps=1e-5)


def build_data(batch_size):
    def make(n):
        states, actions = torch.randn(n, 8), torch.randint(ACTIONS, (n, 1))
        worth = torch.tanh(2 * states @ teacher(8, ACTIONS)) + 0.1 * torch.randn(n, ACTIONS)
        taken = one_hot(actions.squeeze(-1), ACTIONS).float()
        return states, torch.cat([taken, worth.gather(1, actions)], 1)

    return batches(batch_size, make)
