"""Whole tunings on pretended accelerators, from the command line, as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import MARK, survivors

from autoprec.core.dtypes import Policy
from autoprec.profiles import load_profile
from rehearsal import GIB, T4, Gpu, Rehearsal
from rehearsal.jobs import QUICK, TASKS, Job, Tuned, forced

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]

L4 = Gpu("NVIDIA L4", "8.9", gib=1.0, others_gib=0.25)
BUSY = Gpu("NVIDIA L4", "8.9", gib=8.0, others_gib=3.0)
GRID = ("--policies", "float32", "--batch-sizes", "8-256", "--sampler", "grid", "--rounds", 1)
JOBS = {
    "mlp": replace(forced("mlp", "mixed_float16", "cuda", BUSY), forked=""),  # as a user's do
    "conv": forced("conv", "mixed_bfloat16"),
    "lstm": forced("lstm", "mixed_float16"),
    "transformer": forced("transformer", "mixed_bfloat16"),
    "gpt2": forced("gpt2", "mixed_bfloat16"),
    "probabilities": forced("probabilities", "mixed_bfloat16"),
    "rocm": forced("mlp", "mixed_float16", "rocm"),
    "xpu": forced("mlp", "mixed_float16", "xpu"),
    "mps": forced("own_norm", "mixed_float16", "mps"),
    "own_norm": forced("own_norm", "mixed_float16"),
    "wide": Job("wide", (*GRID, "--no-extras"), gpus=(L4,)),
    "left_on_the_cpu": Job("left_on_the_cpu"),
}

APPLY = """
import json, sys, warnings
import torch
from autoprec import apply_profile
warnings.simplefilter("error")
warnings.filterwarnings("ignore", ".*tuning was inconclusive")  # no time here is real
sys.path.insert(0, sys.argv[1])
import importlib
task = importlib.import_module(sys.argv[2])
torch.manual_seed(0)
model = task.build_model().to(sys.argv[4])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
names = {name: tuple(value.shape) for name, value in model.state_dict().items()}
precision = apply_profile(sys.argv[3], model=model, optimizer=optimizer)
losses = []
data = task.build_data(precision.batch_size)
for _ in range(20 * precision.accumulation_steps):
    batch = next(data)
    if hasattr(task, "training_step"):
        with precision.autocast():
            loss = task.training_step(model, {k: v.to(sys.argv[4]) for k, v in batch.items()})
    else:
        inputs, targets = (each.to(sys.argv[4]) for each in batch)
        with precision.autocast():
            outputs = model(inputs)
        loss = task.loss_fn(outputs, targets)
    precision.backward(loss)
    precision.clip_grad_norm_(1.0)
    precision.step()
    losses.append(loss.item())
assert precision.steps + precision.skipped == 20
assert names == {name: tuple(value.shape) for name, value in model.state_dict().items()}
print(json.dumps([precision.policy, losses, precision.skipped]))
"""


def trained(tuning: Tuned, task: str, device: str = "cuda") -> tuple[str, list[float], int]:
    """Train 20 steps in a fresh process with the profile that was tuned."""
    printed = tuning.machine.python(APPLY, TASKS, task, tuning.path, device)
    policy, losses, skipped = json.loads(printed)
    return policy, losses, skipped


@pytest.mark.parametrize("task", ["mlp", "conv", "lstm", "transformer", "gpt2", "probabilities"])
def test_a_task_is_tuned_and_its_profile_trains_in_a_fresh_process(tuned: Any, task: str) -> None:
    profile = tuned(task).profile()
    policy = str(JOBS[task].words[1])
    assert profile.recipe.policy == policy
    assert profile.evidence.parity.verdict == "equal", profile.evidence.parity
    assert (profile.evidence.loss_scale is not None) == (policy == "mixed_float16")
    there, losses, skipped = trained(tuned(task), task)
    assert (there, skipped) == (policy, 0)
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("kind", ["rocm", "xpu", "mps"])
def test_every_kind_of_accelerator_is_probed_tuned_and_applied(tuned: Any, kind: str) -> None:
    probed = json.loads(tuned(kind).machine.autoprec("probe", "--json").stdout)
    assert probed["devices"][0]["facts"]["observation"]["kind"] == kind
    profile = tuned(kind).profile()
    assert profile.device.kind == kind
    assert profile.recipe.policy is Policy.MIXED_FLOAT16
    scale = profile.evidence.loss_scale
    assert scale is not None
    assert (scale.note, scale.batches) == ("", 8)  # measured, without float64 too
    policy, losses, skipped = trained(
        tuned(kind), JOBS[kind].task, "cuda" if kind == "rocm" else kind
    )
    assert (policy, skipped) == ("mixed_float16", 0)
    assert losses[-1] < losses[0]


def test_float8_is_refused_by_width_and_it_is_said(tuned: Any) -> None:
    reason = "no linear layer between the first and the last is 2048 or more wide on both"
    refused = {each.candidate: each.reason for each in tuned("mlp").profile().evidence.refusals}
    assert refused["float8"].startswith(reason)
    assert f"refused: float8: {reason}" in tuned("mlp").shown
    checked = tuned("mlp").machine.autoprec("check", tuned("mlp").path)
    assert f"  float8 refused: {reason}" in checked.stdout


def test_float8_is_refused_by_capability_in_a_plan(tmp_path: Path) -> None:
    machine = Rehearsal(tmp_path, "cuda", gpus=[T4])
    plan = machine.autoprec("tune", TASKS / "mlp.py", "--plan", "--device", "cuda")
    assert plan.returncode == 0, plan.stderr
    why = "its Tensor Cores begin at compute capability 8.9"
    assert f"float8 refused: float8 is absent on this device: {why}" in plan.stdout


def test_an_island_is_found_under_cudas_rules(tuned: Any) -> None:
    profile = tuned("own_norm").profile()
    assert profile.recipe.float32_modules == ("1",)
    assert profile.evidence.parity.verdict == "equal"


def test_the_largest_batch_that_fits_is_found_without_a_crash(tuned: Any) -> None:
    shown, profile = tuned("wide").shown, tuned("wide").profile()
    runs = re.findall(r"float32, batch (\d+): ran, (\d+) MiB", shown)
    ran = [int(batch) for batch, _ in runs]
    left_out = re.findall(r"batch (\d+): (?:out of memory|would not fit)", shown)
    assert ran
    assert left_out
    assert max(ran) < min(int(n) for n in left_out)
    plan = ("tune", TASKS / "wide.py", "--plan", "--device", "cuda", "--json")
    memory = json.loads(tuned("wide").machine.autoprec(*plan).stdout)["memory"]
    foreseen = memory["fixed_bytes"] + max(ran) * memory["bytes_per_sample"]
    assert foreseen == pytest.approx(max(int(mib) for _, mib in runs) * 2**20, rel=0.25)
    budget = profile.evidence.memory_budget_bytes or 0  # of what is free, not of all there is
    assert max(int(mib) for _, mib in runs) * 2**20 > budget / 2
    assert budget == pytest.approx(0.92 * 0.75 * GIB, rel=0.01)


def test_strangers_on_the_gpu_are_told_of(tuned: Any) -> None:
    tuned("mlp").profile()
    assert "other processes hold 3.0 GiB of this device" in tuned("mlp").shown


def test_a_tensor_left_on_the_cpu_is_the_users_error_with_its_line_and_the_fix(
    tuned: Any,
) -> None:
    done = tuned("left_on_the_cpu").done
    assert done.returncode == 1
    assert "self.layer(images * torch.linspace(0, 1, 64))" in done.stderr
    assert "device=" in done.stderr.splitlines()[-1]
    assert f"{os.sep}autoprec{os.sep}backends" not in done.stderr
    assert not tuned("left_on_the_cpu").path.exists()


def test_a_killed_tuning_goes_on_where_it_stopped(rehearse: Any) -> None:
    machine = rehearse("cuda")
    profile, storage = machine.folder / "p.yaml", machine.folder / "s.journal"
    words = ["--device", "cuda", "--output", profile, "--storage", storage, *QUICK]
    words += ["--policies", "mixed_bfloat16"]
    command = [sys.executable, "-m", "autoprec", "tune", TASKS / "mlp.py", *words]
    with subprocess.Popen(
        [str(word) for word in command],
        env={**machine.variables(), MARK: str(machine.folder)},
        cwd=machine.folder,
        stderr=subprocess.PIPE,
        text=True,
    ) as first:
        for line in first.stderr or ():
            if "trial  2" in line:
                first.send_signal(signal.SIGKILL)
                break
    assert survivors(str(machine.folder)) == []
    done = machine.autoprec("tune", TASKS / "mlp.py", *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"resuming after [2-9] finished trials", done.stderr)
    assert "trial  2" not in done.stderr
    assert load_profile(profile).recipe.policy is Policy.MIXED_BFLOAT16


def test_a_rehearsals_profile_is_refused_elsewhere(tuned: Any) -> None:
    tuned("mlp").profile()
    real = {k: v for k, v in os.environ.items() if not k.startswith("REHEARSAL")}
    real["PYTHONPATH"] = str(Path(__file__).parents[2])
    code = (
        "import torch, sys; from autoprec import apply_profile; "
        "apply_profile(sys.argv[1], model=torch.nn.Linear(2, 2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tuned("mlp").path],
        env=real,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ProfileMismatch" in done.stderr
    assert "made in a rehearsal" in done.stderr
