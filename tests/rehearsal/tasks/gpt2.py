"""transformers' GPT-2, built from a small configuration, over the characters of a Python module."""

import string as text_source
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH_SIZE = 4
LENGTH = 16


def build_model():
    config = GPT2Config(
        vocab_size=128, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
    )
    return GPT2LMHeadModel(config)


def build_data(batch_size):
    text = torch.tensor([min(ord(c), 127) for c in Path(text_source.__file__).read_text()])
    while True:
        starts = torch.randint(len(text) - LENGTH, (batch_size, 1))
        ids = text[starts + torch.arange(LENGTH)]
        yield {"input_ids": ids, "labels": ids}


def training_step(model, batch):
    return model(**batch).loss
