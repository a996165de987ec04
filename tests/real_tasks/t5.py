"""A T5 that reverses its input: an encoder and a decoder with tied embeddings, labels of -100."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

BATCH_SIZE = 16
CLIP_GRAD_NORM = 1.0
CONFIG = T5Config(
    vocab_size=32,
    d_model=32,
    d_kv=16,
    d_ff=64,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
)


def build_model():
    return T5ForConditionalGeneration(CONFIG)


def build_data(batch_size):
    for _ in range(400):
        words = torch.randint(2, 32, (batch_size, 10))
        lengths = torch.randint(5, 11, (batch_size, 1))
        inside = torch.arange(10) < lengths
        labels = words.flip(1).masked_fill(~inside.flip(1), -100)
        yield {
            "input_ids": words.masked_fill(~inside, 0),
            "attention_mask": inside.long(),
            "labels": labels,
        }


def training_step(model, batch):
    return model(**batch).loss


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)
