"""keep_memory: what a step frees serves the next one, and is not faulted in anew.

Nothing takes the setting back, so steps are counted in a process of their own, first without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoprec.backends.protocol import Task
from autoprec.backends.shared.process_memory import can_keep_freed_memory
from autoprec.backends.torch.measure.describe import describe
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning
from tests.fork_server import ForkServer

needs_glibc = pytest.mark.skipif(
    not can_keep_freed_memory(), reason="malloc is not glibc's here: there is nothing to set"
)

SCRIPT = """
import resource
import torch
from autoprec.backends.torch.measure.describe import describe
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.recipe import Recipe

inputs = torch.ones(4096, 8)  # 64 MiB of outputs: more than glibc ever keeps

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for keep in (False, True):
    model = torch.nn.Linear(8, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(knobs={"keep_memory": True} if keep else {})
    precision = TorchSurgeon().apply(recipe, model=model, optimizers=[optimizer], device="cpu")
    counts = []
    for step in range(9):
        before = faults()
        loss = model(inputs).square().mean()
        precision.backward(loss)
        precision.step()
        counts.append(faults() - before)
    print(min(counts[3:]), *precision.report.globals_set)
    precision.restore()
"""


@needs_glibc
def test_a_step_faults_no_pages_in_again(forked: ForkServer, tmp_path: Path) -> None:
    """The fewest page faults of a step after the third, without and with the setting.

    Where blocks come to lie differs from process to process: the heap may still grow in one of
    these steps, but what was kept serves most of them.
    """
    (tmp_path / "steps.py").write_text(SCRIPT)
    done = forked.run(tmp_path / "steps.py")
    assert done.returncode == 0, done.stderr
    (given_back, *nothing), (kept, *settings) = map(str.split, done.stdout.splitlines())
    assert nothing == []
    assert settings == ["keep_memory=True"]
    assert int(given_back) >= 64 // 2  # one block of outputs at least, even in huge pages of 2 MiB
    assert int(kept) < int(given_back) / 4


def test_a_process_that_cannot_keep_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "autoprec.backends.torch.apply.process_settings.keep_freed_memory", lambda: False
    )
    with pytest.warns(AutoprecWarning, match="glibc's malloc"):
        precision = TorchSurgeon().apply(
            Recipe(knobs={"keep_memory": True}), model=torch.nn.Linear(2, 2)
        )
    assert precision.report.globals_set == ()


@needs_glibc
def test_a_task_on_the_cpu_says_that_it_can_be_kept() -> None:
    task = Task(
        name="task.py",
        build_model=lambda: torch.nn.Linear(2, 1),
        build_data=lambda size: [(torch.ones(size, 2), torch.ones(size, 1))],
        loss_fn=torch.nn.functional.mse_loss,
    )
    facts = describe(task, device="cpu", seed=0, batch_size=4, report=lambda *_: None, software={})
    assert facts.keepable_memory
