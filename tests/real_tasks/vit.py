"""A ViT from its config; only logits are asked of it, the loss is the task's."""

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

BATCH_SIZE = 16
CONFIG = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=16,
    patch_size=4,
    num_channels=3,
    num_labels=4,
)
PATTERNS = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def build_model():
    return ViTForImageClassification(CONFIG)


def build_data(batch_size):
    for _ in range(400):
        labels = torch.randint(4, (batch_size,))
        yield PATTERNS[labels] + torch.randn(batch_size, 3, 16, 16), labels


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs.logits, targets)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
