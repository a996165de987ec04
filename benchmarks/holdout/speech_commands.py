"""Keyword spotting on spectrograms: a stack of strided 1-D convolutions and a bidirectional GRU."""

from collections.abc import Iterator

import torch
from torch import nn

MELS, FRAMES, WORDS = 40, 98, 12


class KeywordNet(nn.Module):
    """Convolutions over time, a recurrent layer, and attention over its outputs."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = MELS
        for width, stride in ((96, 2), (128, 1), (160, 2)):
            layers += [
                nn.Conv1d(channels, width, 5, stride, 2, bias=False),
                nn.BatchNorm1d(width),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
            ]
            channels = width
        self.features = nn.Sequential(*layers)
        self.recurrent = nn.GRU(channels, 96, batch_first=True, bidirectional=True)
        self.score = nn.Linear(192, 1)
        self.head = nn.Linear(192, WORDS)

    def forward(self, spectrograms: torch.Tensor) -> torch.Tensor:
        over_time = self.features(spectrograms).transpose(1, 2)
        states, _ = self.recurrent(over_time)
        weights = self.score(states).softmax(dim=1)
        out: torch.Tensor = self.head((weights * states).sum(dim=1))
        return out


def build_model() -> nn.Module:
    return KeywordNet()


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    patterns = torch.randn(WORDS, MELS, FRAMES, generator=torch.Generator().manual_seed(3))
    while True:
        words = torch.randint(WORDS, (batch_size,))
        noise = torch.randn(batch_size, MELS, FRAMES)
        yield 0.5 * patterns[words] + noise, words


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.05)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
