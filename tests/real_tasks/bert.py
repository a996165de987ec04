"""A BERT that classifies padded texts: batches are a tokenizer's, the loss is the library's own."""

import torch
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

BATCH_SIZE = 16
CLIP_GRAD_NORM = 1.0
CONFIG = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    num_labels=3,
)


def build_model():
    return BertForSequenceClassification(CONFIG)


def build_data(batch_size):
    for _ in range(400):
        labels = torch.randint(3, (batch_size,))
        lengths = torch.randint(6, 13, (batch_size,))
        mask = (torch.arange(12) < lengths[:, None]).long()
        words = 20 * labels[:, None] + torch.randint(1, 24, (batch_size, 12))
        yield BatchEncoding({"input_ids": words * mask, "attention_mask": mask, "labels": labels})


def training_step(model, batch):
    return model(**batch).loss


def build_optimizer(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)
