"""A small language model with Hugging Face's Trainer: padding, accumulation, warm-up, resume."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LINES = [f"{a} plus {b} is {a + b}." for a in range(24) for b in range(a + 1)]
PAD, VOCABULARY = 0, 128


def encode(line):
    return {"input_ids": [ord(letter) for letter in line]}


def pad(rows):
    """Pad a batch to its longest row; what is padding gets no loss."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    labels = ids.masked_fill(ids == PAD, -100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def build_model():
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config)


if __name__ == "__main__":
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir="checkpoints",
        max_steps=10,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        warmup_steps=5,
        save_steps=5,
        logging_steps=5,
        report_to=[],
    )
    trainer = Trainer(
        model=build_model(),
        args=arguments,
        train_dataset=[encode(line) for line in LINES],
        data_collator=pad,
    )
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)
    print(f"loss {trainer.state.log_history[-1]['train_loss']:.3f}")
