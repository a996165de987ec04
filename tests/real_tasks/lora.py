"""LoRA adapters by PEFT on a frozen GPT-2: only they, and the final norm, are trained."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

BATCH_SIZE = 16
CONFIG = GPT2Config(
    vocab_size=48, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
ADAPTERS = LoraConfig(
    r=4,
    lora_alpha=8,
    lora_dropout=0.05,
    target_modules=["c_attn", "c_fc"],
    fan_in_fan_out=True,
    modules_to_save=["ln_f"],
    task_type="CAUSAL_LM",
)


def build_model():
    return get_peft_model(GPT2LMHeadModel(CONFIG), ADAPTERS)


def build_data(batch_size):
    for _ in range(400):
        start, stride = torch.randint(48, (batch_size, 1)), torch.randint(1, 4, (batch_size, 1))
        words = (start + stride * torch.arange(16)) % 48
        yield {"input_ids": words, "labels": words}


def training_step(model, batch):
    return model(**batch).loss


def build_optimizer(model):
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
