"""The same faults with PyTorch in the worker: too much memory, crashes, and the user's mistakes.

Nothing here imports torch: it runs in the workers.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from autoprec import api
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Status
from autoprec.errors import TaskError
from autoprec.tuning.events import Event, TrialFinished
from autoprec.tuning.options import Options
from autoprec.workers.failures import FailureKind, WorkerFailure

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's"),
]

MIB = 2**20

MODEL = """
import torch

def build_model():
    return torch.nn.Linear(8, 2)

def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 8), torch.randint(0, 2, (batch_size,))

def loss_fn(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)
"""

#: A sample's activations take 1.9 MiB: a batch of 4096 would need 7.5 GiB.
GROWS = """
import torch

class Grows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 16384)
        self.last = torch.nn.Linear(16384, 2)

    def forward(self, x):
        x = self.first(x)
        for _ in range(29):
            x = torch.sigmoid(x)
        return self.last(x)

def build_model():
    return Grows()

def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 4), torch.randint(0, 2, (batch_size,))

def loss_fn(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)
"""


@pytest.fixture
def task(tmp_path: Path) -> Any:
    def write(text: str, name: str = "torch_task.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["cost", "grid"])
def test_memory_that_grows_without_bound_is_tuned_within_the_budget(
    sampler: str, task: Any
) -> None:
    """The search never asks for what would not fit, and the grid's wishes are refused."""
    budget = 1200 * MIB
    seen: list[TrialFinished] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            seen.append(event)

    from autoprec.core.dtypes import Policy

    profile = api.tune(
        task(GROWS),
        options=Options(
            policies=(Policy.FLOAT32,),
            batch_sizes=(8, 16, 32, 1024, 4096),
            memory_bytes=budget,
            sampler=sampler,
            rounds=1,
            extras=False,
        ),
        listener=listen,
    )
    outcomes = {event.recipe.batch_size: event.outcome for event in seen}
    good = [o for o in outcomes.values() if o.measurement is not None]
    assert good
    assert all(o.measurement.peak_memory_bytes <= budget for o in good)
    fine = {Status.OK, Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT}
    assert {o.status for o in outcomes.values()} <= fine
    asked = {4096: outcomes[4096].status} if 4096 in outcomes else {}
    assert asked == ({4096: Status.WOULD_NOT_FIT} if sampler == "grid" else {})
    chosen = profile.evidence.chosen
    assert chosen.peak_memory_bytes <= budget
    assert profile.evidence.memory_budget_bytes == budget
    assert profile.recipe.batch_size < 1024


def test_a_batch_that_cannot_fit_is_an_exception_and_kills_nothing(task: Any, start: Any) -> None:
    worker = start(task(GROWS), memory_bytes=1200 * MIB)
    worker.load()
    for batch in (4096, 1024):
        with pytest.raises(WorkerFailure) as info:
            worker.call("measure", recipe=Recipe(batch_size=batch), seed=0, budget=TimingBudget())
        assert info.value.kind == FailureKind.OUT_OF_MEMORY
        assert "DefaultCPUAllocator" in info.value.message
    assert worker.alive
    measured = worker.call(
        "measure", recipe=Recipe(batch_size=8), seed=0, budget=TimingBudget(max_steps=3)
    )
    assert 0 < measured.peak_memory_bytes <= 1200 * MIB


FATAL = {
    "too much memory": (
        "torch.zeros(1 << 40)",
        FailureKind.OUT_OF_MEMORY,
        "DefaultCPUAllocator",
    ),
    "no kernel for the dtype": (
        "torch.linalg.cholesky(torch.eye(3, dtype=torch.bfloat16))",
        FailureKind.UNSUPPORTED,
        "not implemented for 'BFloat16'",
    ),
    "dtypes mixed": (
        "torch.nn.Linear(3, 3).bfloat16()(torch.ones(2, 3))",
        FailureKind.UNSUPPORTED,
        "same dtype",
    ),
    "wrong shapes": (
        "torch.ones(2, 3) @ torch.ones(2, 3)",
        FailureKind.USER_ERROR,
        "shapes cannot be multiplied",
    ),
    "nan found by anomaly mode": (
        """
        torch.autograd.set_detect_anomaly(True)
        x = torch.zeros(2, requires_grad=True)
        (torch.sqrt(x) * 0).sum().backward()
        """,
        FailureKind.NONFINITE,
        "nan values",
    ),
    "a crash in C": (
        "torch._C._from_dlpack if False else __import__('ctypes').string_at(0)",
        FailureKind.SEGFAULT,
        "SIGSEGV",
    ),
    "an abort in C": ("os.abort()", FailureKind.SEGFAULT, "SIGABRT"),
}


@pytest.mark.parametrize(("code", "kind", "said"), FATAL.values(), ids=FATAL)
def test_a_real_failure_is_told_apart(
    code: str, kind: FailureKind, said: str, task: Any, start: Any
) -> None:
    body = textwrap.indent(textwrap.dedent(code).strip(), "    ")
    text = "import os\n" + MODEL.replace(
        "    return torch.nn.Linear", f"{body}\n    return torch.nn.Linear"
    )
    worker = start(task(text), memory_bytes=2048 * MIB)
    with pytest.raises(WorkerFailure) as info:
        worker.load()
    assert info.value.kind == kind
    assert said in info.value.message
    assert "torch_task.py" in info.value.frames


def test_a_loaders_processes_end_with_the_worker(task: Any, start: Any) -> None:
    text = MODEL.replace(
        """    while True:
        yield torch.randn(batch_size, 8), torch.randint(0, 2, (batch_size,))
""",
        """    from torch.utils.data import DataLoader, TensorDataset
    data = TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))
    return DataLoader(data, batch_size, num_workers=2, persistent_workers=True)
""",
    )
    worker = start(task(text))
    worker.load()
    worker.call("open", name="a", recipe=Recipe(), seed=0)
    measured = worker.call("time", name="a", budget=TimingBudget())
    assert measured.samples_per_step == 32
    worker.kill()  # the fixture looks for survivors


# What the user got wrong, at the command line ----------------------------------------------------

WRONG = {
    "no data": (
        "    return []",
        "yielded no batches",
    ),
    "data that is no data": ("    return 3", "expected an iterable of batches"),
    "batches of three": (
        "    return [(torch.ones(4, 8),) * 3]",
        r"of 3 items, expected \(inputs, targets\)",
    ),
    "the wrong shape": (
        "    return [(torch.ones(batch_size, 7), torch.zeros(batch_size).long())] * 9",
        "shapes cannot be multiplied",
    ),
}


@pytest.mark.parametrize(("data", "said"), WRONG.values(), ids=WRONG)
def test_wrong_data_is_said_in_one_sentence(
    data: str, said: str, task: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = MODEL[: MODEL.index("    while True")] + data + "\n" + MODEL[MODEL.index("\ndef loss") :]
    check(task(text), said, capfd, tmp_path)


LOSSES = {
    "no scalar": (
        "return torch.nn.functional.cross_entropy(outputs, targets, reduction='none')",
        r"tensor of shape \(\d+,\), expected a scalar",
    ),
    "no tensor": ("return 1.0", "returned a float, expected a scalar tensor"),
    "nothing": ("pass", "returned None, expected a scalar tensor"),
    "no gradient": (
        "return torch.nn.functional.cross_entropy(outputs, targets).detach()",
        "without a gradient",
    ),
    "a mistake": ("return outputs.no_such_method()", "no_such_method"),
}


@pytest.mark.parametrize(("loss", "said"), LOSSES.values(), ids=LOSSES)
def test_a_wrong_loss_is_said_in_one_sentence(
    loss: str, said: str, task: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = MODEL.replace("return torch.nn.functional.cross_entropy(outputs, targets)", loss)
    check(task(text), said, capfd, tmp_path)


def check(path: Path, said: str, capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    import re

    from autoprec.cli import main

    assert main(["tune", str(path), "--policies", "float32"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("autoprec: ")
    assert re.search(said, last)
    assert "Traceback (most recent call last)" not in err
    assert f"autoprec{os.sep}tuning" not in err
    assert f"autoprec{os.sep}backends" not in err
    assert not list(folder.glob("*.yaml"))


def test_json_is_json_with_a_real_framework(task: Any, capfd: pytest.CaptureFixture[str]) -> None:
    from autoprec.cli import main

    words = ["--policies", "float32", "--batch-sizes", "32", "--no-extras", "--quiet"]
    code = main(["tune", str(task(MODEL)), *words, "--json"])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert json.loads(out)["task"]["framework"] == "torch"


NAN_LATER = """
import torch
from torch import nn

BATCH_SIZE = 16

def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

def build_data(batch_size):
    inputs = torch.randn(8 * batch_size, 8)
    inputs[{sample}, 3] = torch.nan
    targets = torch.randint(0, 2, (len(inputs),))
    return list(zip(inputs.split(batch_size), targets.split(batch_size)))

loss_fn = nn.functional.cross_entropy
"""


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (5, "in inputs, first in sample 5"),
        (20, "in float32 the loss became inf or NaN within the first steps at batch 16"),
    ],
)
def test_data_with_nan_end_the_tuning_and_leave_no_profile(
    sample: int, said: str, task: Any, tmp_path: Path
) -> None:
    path = task(NAN_LATER.replace("{sample}", str(sample)))
    with pytest.raises(TaskError, match=said):
        api.tune(path, trials=2, rounds=1, extras=False)
    assert not list(tmp_path.glob("*.yaml"))
