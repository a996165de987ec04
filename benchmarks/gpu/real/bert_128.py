"""BERT-base guessing hidden words at 128 tokens; see `bert_masked_words`."""

from __future__ import annotations

from bert_masked_words import Bert, adamw, masked_loss, masked_words
from synthetic_data import Batches, sized
from torch import nn

BATCH_SIZE = sized(128, 4)
LENGTH = sized(128, 8)

loss_fn = masked_loss
build_optimizer = adamw


def build_model() -> nn.Module:
    return Bert()


def build_data(batch_size: int) -> Batches:
    return masked_words(batch_size, LENGTH)
