"""A voice adds up its phase over 160 samples for eight harmonics. Fails in both, silent."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import batches

loss_fn = mse_loss
SAMPLES, HARMONICS, VOWELS = 160, 8, 5


class Oscillators(nn.Module):
    """Sines of whole multiples of a phase, which is the running sum of frequencies."""

    def forward(self, frequency, loudness):
        phase = torch.cumsum(frequency, 1)
        sound = torch.zeros_like(phase)
        for harmonic in range(HARMONICS):
            sound = sound + loudness[:, harmonic : harmonic + 1] * torch.sin((harmonic + 1) * phase)
        return sound


class Voice(nn.Module):
    def __init__(self):
        super().__init__()
        self.pitch = nn.Conv1d(1, 1, 1)
        nn.init.constant_(self.pitch.weight, 0.1)
        nn.init.constant_(self.pitch.bias, 0.25)
        self.pitch.requires_grad_(False)
        self.vowel = nn.Embedding(VOWELS, 32)
        self.body = nn.Sequential(
            nn.Linear(33, 96),
            nn.LayerNorm(96),
            nn.SiLU(),
            nn.Linear(96, 96),
            nn.LayerNorm(96),
            nn.SiLU(),
            nn.Linear(96, HARMONICS),
        )
        self.oscillators = Oscillators()

    def forward(self, inputs):
        vowels, notes = inputs
        condition = torch.cat([self.vowel(vowels), notes.mean(1, keepdim=True)], 1)
        frequency = self.pitch(notes.unsqueeze(1)).squeeze(1)
        return self.oscillators(frequency, self.body(condition))


def build_model():
    return Voice()


def build_optimizer(model):
    return torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=3e-3)


def build_data(batch_size):
    spectra = torch.rand(VOWELS, HARMONICS, generator=torch.Generator().manual_seed(8))

    def make(n):
        vowels = torch.randint(VOWELS, (n,))
        turn = torch.linspace(0, 1, SAMPLES)
        notes = 2 * torch.rand(n, 1) - 1 + 0.3 * torch.sin(12 * turn + 6.28 * torch.rand(n, 1))
        phase = (0.25 + 0.1 * notes).cumsum(1).unsqueeze(1)
        waves = torch.sin(torch.arange(1, HARMONICS + 1).view(1, -1, 1) * phase)
        return (vowels, notes), (spectra[vowels].unsqueeze(-1) * waves).sum(1)

    return batches(batch_size, make)
