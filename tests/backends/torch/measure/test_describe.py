"""What one float32 step shows: only the user's own errors end it; what fails besides is unknown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.backends.torch.described import facts
from tests.fork_server import ForkServer

pytestmark = pytest.mark.torch


def test_the_users_own_errors_are_errors() -> None:
    def wrong(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError):
        facts(training_step=wrong)


class Listed(nn.Module):
    """Layers in a list, in a dictionary, and in a sequence that is iterated."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(16, 16)]) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Linear(16, 16)})
        self.rows = nn.Sequential(nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (layer,) in self.blocks:
            x = layer(x)
        for row in self.rows:
            x = row(x)
        found: torch.Tensor = self.named["a"](x)
        return found


def test_operations_below_containers_are_counted_once() -> None:
    """Four products forward, and for the gradients of four weights and three inputs."""
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)]
    found = facts(8, build_model=Listed, build_data=lambda _: data)
    assert found.flops_per_sample == (4 + 4 + 3) * 2 * 16 * 16
    shares = {unit.path: unit.products for unit in found.units if unit.products}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert set(shares) == {"blocks.0.0", "blocks.1.0", "rows.0", "named.a"}


def test_without_time_it_is_left_out_what_explains_a_step() -> None:
    full, hurried = facts(), facts(describing_seconds=0.0)
    assert full.kernels
    assert hurried.kernels == ()
    assert hurried.slow_operator == ""
    assert (hurried.splittable, hurried.saved_bytes_per_sample) == (
        full.splittable,
        full.saved_bytes_per_sample,
    )
    assert "1 batch only" in " ".join(hurried.warnings)


def test_the_part_of_the_update_is_timed_whether_it_could_be_fused_or_not() -> None:
    def own(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), foreach=True)

    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 2**17), nn.Linear(2**17, 1))

    found = facts(8, build_model=large, build_optimizer=own)
    assert 0.0 < found.update_seconds < found.step_seconds
    assert found.optimizer_share == 0.0


PEAKS = """
import os, re, torch
from torch import nn
from autoprec.backends.protocol import Task
from autoprec.backends.torch.measure.describe import describe

def build_model():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))

def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 1024), torch.randn(batch_size, 1024)

def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.01)

def train():
    model = build_model()
    optimizer = build_optimizer(model)
    for _, (inputs, targets) in zip(range(3), build_data(32)):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

def described():
    task = Task("task.py", build_model, build_data, nn.functional.mse_loss, None, build_optimizer)
    facts = describe(
        task, device="cpu", seed=0, batch_size=32, report=lambda *_: None, software={}
    )
    assert facts.splittable and facts.flops_per_sample and facts.saved_bytes_per_sample

def peak():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status).group(1))

for run in (train, described):
    child = os.fork()
    if not child:
        before = peak()
        run()
        print(peak() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/status")
def test_a_task_is_described_in_the_memory_that_training_takes(
    forked: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "peaks.py").write_text(PEAKS)
    ran = forked.run(tmp_path / "peaks.py")
    assert ran.returncode == 0, ran.stderr
    training, described = (int(line) for line in ran.stdout.split())
    copy_of_the_gradients = 16 * 1024 * 1024 * 4 // 1024  # KiB, as the peaks
    assert training > 2 * copy_of_the_gradients
    assert described < training + copy_of_the_gradients
