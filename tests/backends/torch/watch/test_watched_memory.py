"""Where memory is limited to little more than training needs, a check takes fewer samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from autoprec.backends.torch.watch.caught_call import CallCatcher
from benchmarks.numerics.late_breaks import BFLOAT16
from benchmarks.numerics.late_breaks_torch import train

pytestmark = pytest.mark.torch

BATCH = 131072

LIMITED = """
import contextlib, gc, json, resource
import torch
from torch import nn

from autoprec import Policy, Recipe, apply_profile

torch.set_num_threads(1)
RECIPE = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=131072)
MIB = 2**20


def trained(watch):
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())])
    optimizer = torch.optim.Adam(model.parameters())
    precision = apply_profile(
        RECIPE, model=model, optimizer=optimizer, device="cpu", watch=watch, watch_every=1
    )
    for seed in range(2):
        inputs = torch.randn(131072, 64, generator=torch.Generator().manual_seed(seed))
        precision.backward(nn.functional.mse_loss(precision.forward(inputs), inputs))
        precision.step()
    return [p.detach() for p in model.parameters()], precision.watched


def run(watch, size):
    gc.collect()
    status = open("/proc/self/status").read().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (used + size, hard))
    try:
        return trained(watch)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def fits(size):
    try:
        run(False, size)
    except (RuntimeError, MemoryError):
        return False
    return True


trained("warn")  # what is imported, and what libraries keep, is there from here on
alone, _ = trained(False)
least, most = 224 * MIB, 448 * MIB
assert fits(most) and not fits(least)
while most - least > 8 * MIB:
    middle = (least + most) // 2
    least, most = (least, middle) if fits(middle) else (middle, most)
watched, checks = run("warn", int(1.05 * most))
said = [[c.samples, c.problem, c.not_checked] for c in checks]
print(json.dumps([all(map(torch.equal, alone, watched)), most, said]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts on Linux only")
def test_a_check_leaves_training_the_memory_that_it_needs() -> None:
    """Of what training adds to a process, a twentieth is left: less than a batch takes."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # freed tensors go back at once
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    same, needed, checks = json.loads(done.stdout.splitlines()[-1])
    assert same
    assert 0.05 * needed < BATCH * 64 * 4
    assert len(checks) == 2
    for samples, problem, not_checked in checks:
        assert samples < BATCH
        assert not problem
        assert "memory" in not_checked


class WritesToInputs(nn.Module):
    """Doubles what it is given in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inside(given.mul_(2))
        return found


def test_inputs_are_held_without_a_copy_until_something_writes_to_them() -> None:
    inputs, model = torch.ones(4, 8), nn.Linear(8, 2)
    catcher = CallCatcher(model, model, "cpu")
    for written in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16):
            model(inputs).float().sum().backward()
        call = catcher.call
        assert call is not None
        if written:
            inputs.add_(1)
        assert call.is_written is written
        assert catcher.has_all is not written
        held = call.args[0].data_ptr() == inputs.data_ptr()
        catcher.drop()
    assert not held, "after a write the next call's inputs are copied"


def test_a_model_that_writes_to_its_inputs_is_checked_on_what_it_was_given() -> None:
    torch.manual_seed(0)
    precision, _ = train(WritesToInputs(), BFLOAT16, updates=6, every=2)
    made = [each for each in precision.watched if each.samples]
    assert made
    assert not any(each.problem or each.not_checked for each in precision.watched)
    assert all((each.outputs or 0.0) < 0.05 for each in made), made
