"""Scripts with Lightning's and Transformers' Trainer are tuned as they stand."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from autoprec import tune, verify
from autoprec.core.recipe import Recipe
from autoprec.errors import TaskError, UserCodeError
from autoprec.tuning.events import Event, Note
from autoprec.workers.failures import FailureKind, WorkerFailure
from tests.fork_server import ForkServer
from tests.processes import MARK, survivors
from tests.training_scripts import QUICK, Project

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
]

LIGHTNING = """
import argparse
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import {package} as pl
from autoprec.integrations.lightning import plugin

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, required=True)
parser.add_argument("--width", type=int, default=4)
arguments = parser.parse_args()

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(arguments.width, 2)

    def training_step(self, batch, index):
        self.log("seen", index)
        try:
            if len(batch[0]) > 48:
                raise torch.OutOfMemoryError("out of memory")
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        except torch.OutOfMemoryError:
            return None  # as some do to pass over a long batch

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=arguments.rate)

pl.seed_everything(0)
scale = float(Path("scale").read_text()) if Path("scale").exists() else 1.0
data = TensorDataset(scale * torch.randn(96, arguments.width), torch.arange(96) % 2)

def trainer():
    return pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, gradient_clip_val=1.0, {settings})

if __name__ == "__main__":
    {before}
    try:
        found = trainer()
        found.fit(Module(), DataLoader(data, batch_size=16, shuffle=True))
    except Exception:
        print("swallowed")
    print("after fit")
    with open(os.environ["AUTOPREC_STARTS"], "a") as starts:
        starts.write("after\\n")
    found.save_checkpoint("last.ckpt")
"""

TRANSFORMERS = """
import argparse
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from autoprec.integrations.transformers import apply

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=1e-4)
rate = parser.parse_args().rate

class Tracker(TrainerCallback):
    def on_train_begin(self, *given, **named):
        open("tracked", "w").close()

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, pixels, labels=None):
        logits = self.net(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

class Own(Trainer):
    def train(self, *given, **named):
        print("own train")
        return super().train(*given, **named)

torch.manual_seed(0)
data = [{"pixels": torch.randn(4), "labels": number % 2} for number in range(64)]
arguments = TrainingArguments(
    output_dir="checkpoints",
    use_cpu=True,
    per_device_train_batch_size=8,
    report_to=["all"],
    learning_rate=rate,
)
trainer = Own(model=Classifier(), args=arguments, train_dataset=data, callbacks=[Tracker()])
apply(trainer, "not_yet.profile.yaml")
trainer.train()
print("after train")
with open(os.environ["AUTOPREC_STARTS"], "a") as starts:
    starts.write("after\\n")
trainer.save_model("saved")
"""

LOOPS = """
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from autoprec import apply_profile

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
precision = apply_profile("not_yet.profile.yaml", model=model, optimizer=optimizer)
loader = DataLoader(torch.randn(64, 4), batch_size=precision.batch_size)
for step, batch in enumerate(precision.batches(loader)):
    precision.backward_and_step(precision.forward(batch).mean())
    if step == 5:
        break
Path("train.py").unlink()
"""


def lightning(package: str = "lightning", before: str = "pass", settings: str = "") -> str:
    return (
        LIGHTNING.replace("{package}", package)
        .replace("{before}", before)
        .replace("{settings}", settings)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("workers_with_trainers")
def test_lightnings_fit_is_served_and_a_killed_worker_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default logger and checkpoints are on; neither they nor the last lines write."""
    project = Project(tmp_path, lightning())
    monkeypatch.chdir(project.folder)
    with project.runner("--rate", "1e-3") as runner:
        loaded = runner.load()
        line = project.line("found.fit")
        assert loaded.found == f"train.py:{line} Trainer.fit (Lightning), batch 16, AdamW"
        assert (loaded.batch_size, loaded.clip_grad_norm) == (16, 1.0)
        measured = runner.call("measure", recipe=Recipe(batch_size=32), seed=0, budget=QUICK)
        assert measured.samples_per_step == 32
        first = runner.call("trajectory", recipe=Recipe(batch_size=16), seed=0, steps=2).losses
        os.kill(runner.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerFailure) as lost:
            runner.call("describe", batch_size=16, seed=0)
        assert lost.value.kind is FailureKind.KILLED
        again = runner.call("trajectory", recipe=Recipe(batch_size=16), seed=0, steps=2).losses
        assert again == first  # a dataset of random numbers is the same in every worker
        assert runner.load().fingerprint == loaded.fingerprint
        (project.folder / "scale").write_text("2.0")  # other numbers, of the same shapes
        runner.drop()
        assert runner.load().fingerprint != loaded.fingerprint
        (project.folder / "scale").unlink()
    assert project.said == ["started"] * 3
    assert project.files() == project.before


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured", "workers_with_trainers")
@pytest.mark.parametrize("script", [lightning(), TRANSFORMERS], ids=["lightning", "transformers"])
def test_a_whole_tuning_starts_the_script_a_few_times_and_leaves_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, with_trainers: ForkServer
) -> None:
    """What it is found to be, and what its starts cost, is said; the same command resumes it."""
    assert with_trainers.pid  # it runs before there is a mark to find survivors by
    monkeypatch.setenv("AUTOPREC_CACHE", str(tmp_path / "cache"))
    project = Project(tmp_path, script)
    monkeypatch.setenv("AUTOPREC_STARTS", str(project.starts))
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.chdir(project.folder)
    said: list[str] = []

    def listen(event: Event) -> None:
        said.extend([event.text] if isinstance(event, Note) else [])

    settings: dict[str, Any] = {"device": "cpu", "extras": False, "trials": 2, "rounds": 1}
    settings |= {"proof_steps": 8, "listener": listen, "arguments": ["--rate", "1e-3"]}
    profile = tune("train.py", **settings)
    assert survivors(str(tmp_path), 2.0) == []
    assert profile.task.file == "train.py"
    assert (profile.task.arguments, profile.task.at) == (("--rate", "1e-3"), 1)
    files = project.files()
    assert files.pop("train.profile.yaml")
    assert files == project.before
    assert project.said == ["started"] * project.started
    assert project.started <= 6
    assert any("found train.py:" in each for each in said)
    assert any(each.startswith("its own start took ") for each in said)
    begun = project.started
    with pytest.MonkeyPatch.context() as patch:
        if script != TRANSFORMERS:  # its worker is started as users start them
            patch.setattr(ForkServer, "can_start", lambda server, environment: False)
        assert tune("train.py", **settings) == profile
    assert project.started == begun + 1  # only to see that it is the same training
    said.clear()
    how: dict[str, Any] = {"device": "cpu", "rounds": 1, "listener": listen}
    verify("train.profile.yaml", **how)
    assert not any("this profile was" in each or "has changed" in each for each in said)
    verify("train.profile.yaml", arguments=["--rate", "1"], **how)
    assert (
        "train.py runs with the arguments --rate 1, and this profile was tuned with the arguments "
        "--rate 1e-3"
    ) in said


@pytest.mark.slow
def test_the_second_fit_is_served_and_a_swallowed_lack_of_memory_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the line that applies a profile changes nothing, and needs none to be there."""
    quiet = "logger=False, enable_checkpointing=False, enable_progress_bar=False"
    quiet += ", plugins=[plugin('not_yet.profile.yaml')]"
    warm_up = "trainer().fit(Module(), DataLoader(data, batch_size=48))"
    project = Project(tmp_path, lightning("pytorch_lightning", warm_up, quiet))
    monkeypatch.chdir(project.folder)
    with project.runner("--rate", "1e-3", "--width", "8", at=2) as runner:
        loaded = runner.load()
        assert loaded.found.startswith(f"train.py:{project.line('found.fit')} ")
        facts = runner.call("describe", batch_size=16, seed=0)
        assert facts.parameters == 8 * 2 + 2
        with pytest.raises(WorkerFailure) as swallowed:
            runner.call("measure", recipe=Recipe(batch_size=64), seed=0, budget=QUICK)
        assert swallowed.value.kind is FailureKind.OUT_OF_MEMORY
    assert project.files() == project.before


@pytest.mark.slow
def test_transformers_train_is_served_also_of_a_subclass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, TRANSFORMERS)
    monkeypatch.chdir(project.folder)
    with project.runner() as runner:
        loaded = runner.load()
        line = project.line("super().train")
        assert loaded.found == f"train.py:{line} Trainer.train (Transformers), batch 8, AdamW"
        measured = runner.call("measure", recipe=Recipe(batch_size=16), seed=0, budget=QUICK)
        assert measured.samples_per_step == 16
    assert project.files() == project.before


def test_a_loop_of_its_own_ends_at_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, LOOPS)
    monkeypatch.chdir(project.folder)
    with project.runner() as runner, pytest.raises(TaskError) as told:
        runner.load()
    line = project.line("backward_and_step")
    assert f"train.py:{line} makes an update in a loop of the script's own" in str(told.value)
    assert project.files() == project.before


@pytest.mark.slow
def test_wrong_arguments_and_errors_show_what_the_script_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, lightning(before="data.no_such_name"))
    monkeypatch.chdir(project.folder)
    with project.runner() as runner, pytest.raises(TaskError) as told:
        runner.load()
    assert "the following arguments are required: --rate" in str(told.value)
    assert "`autoprec tune train.py -- --lr 1e-3`" in str(told.value)
    with project.runner("--rate", "1") as runner, pytest.raises(UserCodeError) as raised:
        runner.load()
    assert "train.py raised AttributeError before it trained" in str(raised.value)
    assert "data.no_such_name" in raised.value.frames
    assert "autoprec/" not in raised.value.frames
