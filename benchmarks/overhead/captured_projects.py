"""The projects of examples/trainers as they are tuned: as they stand, and as task files.

The scripts stay as they are; the plain loop gets the function that its page asks for. The task
files are what somebody would write by hand for the same trainings.
"""

from __future__ import annotations

from pathlib import Path

from autoprec.workers.task_source import TaskSource, read_source
from benchmarks.checkout import ROOT

SCRIPTS = ROOT / "examples" / "trainers"

FACTORY = """

def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build():
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(build_data(), batch_size=32, shuffle=True)
    return {
        **{"model": model, "optimizer": optimizer, "loader": loader, "step": step},
        "clip_grad_norm": 1.0,
    }
"""

LIGHTNING = """
import torch
from lightning_before import Classifier, Digits
from torch import nn

BATCH_SIZE, CLIP_GRAD_NORM = 32, 1.0


def build_model():
    torch.manual_seed(0)
    return Classifier().model


def build_data(batch_size):
    digits = Digits(batch_size)
    digits.setup("fit")
    return digits.train_dataloader()


def training_step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.95, 0.999))
"""

TRANSFORMERS = """
import torch
import transformers_before as script
from torch.utils.data import DataLoader

BATCH_SIZE, CLIP_GRAD_NORM = 32, 1.0


def build_model():
    torch.manual_seed(0)
    return script.build_model()


def build_data(batch_size):
    rows = [script.encode(line) for line in script.LINES]
    return DataLoader(rows, batch_size=batch_size, shuffle=True, collate_fn=script.pad)


def training_step(model, batch):
    items = (batch["labels"] != -100).sum()  # as the Trainer counts them of this model
    return model(**batch, num_items_in_batch=items).loss


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
"""

AMP = """
import torch
from amp_before import build_data as data
from amp_before import build_model as model
from torch import nn
from torch.utils.data import DataLoader

BATCH_SIZE, CLIP_GRAD_NORM = 32, 1.0


def build_model():
    torch.manual_seed(0)
    return model()


def build_data(batch_size):
    return DataLoader(data(), batch_size=batch_size, shuffle=True)


def training_step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)
"""

WRITTEN = {"lightning": LIGHTNING, "transformers": TRANSFORMERS, "amp": AMP}


def sources_of(trainer: str, folder: Path) -> tuple[TaskSource, TaskSource]:
    """Copy a project into a folder; return it as it stands, and its task file."""
    script, task = folder / f"{trainer}_before.py", folder / f"{trainer}_task.py"
    text = (SCRIPTS / script.name).read_text("utf-8")
    task.write_text(WRITTEN[trainer].lstrip(), "utf-8")
    if trainer != "amp":
        script.write_text(text, "utf-8")
        return read_source(script), read_source(task)
    script.write_text(text.replace("\n\nif __name__", f"{FACTORY}\n\nif __name__"), "utf-8")
    return read_source(f"{script}:build"), read_source(task)
