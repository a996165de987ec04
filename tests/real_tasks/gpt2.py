"""A GPT-2 under the library's activation checkpointing; its own loss over shifted labels."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH_SIZE = 16
CLIP_GRAD_NORM = 1.0
CONFIG = GPT2Config(
    vocab_size=48, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)


def build_model():
    model = GPT2LMHeadModel(CONFIG)
    model.activation_checkpointing_enable()
    model.config.use_cache = False
    return model


def build_data(batch_size):
    for _ in range(400):
        start, stride = torch.randint(48, (batch_size, 1)), torch.randint(1, 4, (batch_size, 1))
        words = (start + stride * torch.arange(16)) % 48
        yield {"input_ids": words, "labels": words}


def training_step(model, batch):
    return model(**batch).loss


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)
