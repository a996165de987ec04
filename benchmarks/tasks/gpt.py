"""A small GPT with GPT-2's vocabulary of 50257: the logits, not the speed, limit the batch."""

from collections.abc import Iterator

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH = 50257, 128, 32


class Decoder(nn.Module):
    """Two causal blocks between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.positions, mask=mask, is_causal=True)
        out: torch.Tensor = self.head(self.norm(hidden))
        return out


def build_model() -> nn.Module:
    return Decoder()


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        tokens = torch.randint(VOCABULARY, (batch_size, LENGTH + 1))
        yield tokens[:, :-1], tokens[:, 1:]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
