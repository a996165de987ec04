"""Scripts that are hard to capture train what a task file of the same trains, or say the way out.

Others of their kind are in test_scripts_torch.py: a second fit, a fit inside `try`, a loop of its
own, a lack of memory that is swallowed, a worker that is killed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autoprec.core.recipe import Recipe
from autoprec.errors import TaskError
from autoprec.workers.client import WorkerSettings
from autoprec.workers.runner import Runner
from autoprec.workers.task_source import TaskSource, read_source
from tests.training_scripts import QUICK, Project

pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.release,
    pytest.mark.slow,
    pytest.mark.usefixtures("workers_with_trainers"),
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
]

PARTS = '''
import threading
import warnings

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

warnings.simplefilter("ignore")


class Texts(Dataset):
    """Sequences of 1 to 5 vectors."""

    def __len__(self):
        return 96

    def __getitem__(self, place):
        made = torch.Generator().manual_seed(place)
        return torch.randn(1 + place % 5, 4, generator=made), place % 2


def padded(samples):
    """Pad with what is no zero: a padded place counts."""
    texts = pad_sequence([text for text, _ in samples], batch_first=True, padding_value=3.0)
    return texts, torch.tensor([target for _, target in samples])


class Buckets:
    """A batch sampler of its own, whose size nothing can set."""

    def __init__(self, size):
        self._size = size

    def __iter__(self):
        order = sorted(range(96), key=lambda place: place % 5)
        return (order[start : start + self._size] for start in range(0, 96, self._size))

    def __len__(self):
        return 96 // self._size


class Streaming(IterableDataset):
    """Yields whole batches."""

    def __init__(self, size):
        self._size = size

    def __iter__(self):
        texts, targets = padded([(Texts()[0][0].expand(2, 4), place % 2) for place in range(96)])
        texts = texts * torch.arange(96).reshape(96, 1, 1) / 96
        for start in range(0, 96, self._size):
            span = slice(start, start + self._size)
            yield texts[span], targets[span]


class Net(nn.Module):
    def __init__(self, normed=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        if normed:
            nn.utils.weight_norm(self.first)

    def forward(self, texts):
        return self.last(self.first(texts).tanh().mean(1))


class Locked(Net):
    """Cannot be deep-copied."""

    def __init__(self, *given):
        super().__init__(*given)
        self.lock, self.first.log = threading.Lock(), open("/dev/null", "w")

    def forward(self, texts):
        with self.lock:
            print("seen", len(texts), file=self.first.log)
            return super().forward(texts)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def plain(size):
    return DataLoader(Texts(), batch_size=size, collate_fn=padded, shuffle=True)


def bucketed(size):
    return DataLoader(Texts(), batch_sampler=Buckets(size), collate_fn=padded)


def streamed(size):
    return DataLoader(Streaming(size), batch_size=None)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def grouped(model):
    """Groups of other rates, and a frozen layer."""
    model.first.bias.requires_grad_(False)
    groups = [
        {"params": [model.first.weight], "lr": 0.3, "weight_decay": 0.0},
        {"params": model.last.parameters()},
    ]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1)
'''

SCRIPT = """
import lightning as pl
import parts

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = {model}
        self.automatic_optimization = {automatic}

    def training_step(self, batch, index):
        return parts.loss_of(self.net, batch)

    def configure_optimizers(self):
        return parts.{optimizer}(self.net)

pl.Trainer(max_epochs=1, accelerator="cpu", devices=1).fit(Lit(), parts.{loader}(8))
"""

WRITTEN = """
import parts

BATCH_SIZE = 8

def build_model():
    return {model}

def build_data(batch_size):
    return parts.{loader}(batch_size)

def training_step(model, batch):
    return parts.loss_of(model, batch)

def build_optimizer(model):
    return parts.{optimizer}(model)
"""

PLAIN = {
    "model": "parts.Net()",
    "loader": "plain",
    "optimizer": "adam",
    "automatic": "True",
}
CASES = {
    "a padding collator": {},
    "a batch sampler of its own": {"loader": "bucketed"},
    "a data set that streams whole batches": {"loader": "streamed"},
    "parts that cannot be copied": {"model": "parts.Locked()"},
    "a weight that is computed": {"model": "parts.Net(normed=True)"},
    "both": {"model": "parts.Locked(True)"},
    "groups and a frozen layer": {"optimizer": "grouped"},
}


def losses(runner: Runner, batch_size: int) -> Sequence[float]:
    recipe = Recipe(batch_size=batch_size)
    found: Any = runner.call("trajectory", recipe=recipe, seed=0, steps=3)
    return tuple(found.losses)


@pytest.mark.parametrize("case", list(CASES))
def test_it_trains_what_a_task_file_trains(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**PLAIN, **CASES[case]}
    project = Project(tmp_path, SCRIPT.format(**settings), **{"parts.py": PARTS})
    written = project.folder / "task.py"
    written.write_text(WRITTEN.format(**settings))
    monkeypatch.chdir(project.folder)
    task = WorkerSettings(read_source(written), environment={"CUDA_VISIBLE_DEVICES": ""})
    with project.runner() as captured, Runner(task, None) as by_hand:
        assert captured.load().batch_size == 8
        for size in (8, 32):
            assert losses(captured, size) == pytest.approx(losses(by_hand, size), rel=1e-6)
        timed = captured.call("measure", recipe=Recipe(batch_size=32), seed=0, budget=QUICK)
        assert timed.samples_per_step == 32


def test_manual_optimization_is_refused_and_names_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCRIPT.format(**{**PLAIN, "automatic": "False"})
    project = Project(tmp_path, text, **{"parts.py": PARTS})
    monkeypatch.chdir(project.folder)
    with project.runner() as runner, pytest.raises(TaskError) as told:
        runner.load()
    assert "Lit optimizes manually" in str(told.value)
    assert "return (model, optimizer, loader, step) from a function" in str(told.value)
    assert project.files() == project.before


SEVERAL = '''
import torch
from parts import padded, Texts, Net, adam, loss_of

def build():
    """Batches that were padded before: nothing can join them."""
    rows = [padded([Texts()[s + i] for i in range(4)]) for s in (0, 1, 8, 20)]
    model = Net()
    return model, adam(model), rows, loss_of
'''


def test_batches_that_are_padded_already_are_never_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, SEVERAL, **{"parts.py": PARTS})
    monkeypatch.chdir(project.folder)
    source = TaskSource(project.script, "build")
    environment = {"AUTOPREC_STARTS": str(project.starts), "CUDA_VISIBLE_DEVICES": ""}
    with Runner(WorkerSettings(source, environment=environment), None) as runner:
        assert runner.load().batch_size == 4
        facts = runner.call("describe", batch_size=4, seed=0)
        assert facts.fixed_batch
        assert "pads each batch by itself" in facts.split_reason
        assert losses(runner, 32) == losses(runner, 4)
