"""What goes wrong on an accelerator ends in one recipe's result, or in a sentence."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from autoprec.core.dtypes import Policy
from rehearsal import H100, Gpu
from rehearsal.jobs import QUICK, TASKS, Job, forced

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]

FEW = ("--trials", 4, *QUICK[2:])
ILLEGAL = {"op": "addmm", "dtype": "bfloat16", "error": "illegal"}
NARROW = Gpu("NVIDIA L4", "8.9", gib=0.75)
WIDE = forced("wide", "mixed_bfloat16", "cuda", NARROW)
JOBS = {
    "placed": Job("placed", FEW),
    "illegal": Job("mlp", FEW, faults=(ILLEGAL,)),
    "illegal once": replace(forced("mlp", "mixed_bfloat16"), faults=({**ILLEGAL, "once": True},)),
    "lost": replace(forced("mlp", "mixed_bfloat16"), faults=({**ILLEGAL, "error": "lost"},)),
    "not driven": replace(forced("mlp", "float32"), driven=False, named=False),
    "not driven, named": replace(forced("mlp", "float32"), driven=False),
    "one at a time": replace(WIDE, words=(*WIDE.words, "--proof-steps", 8)),
}


def failed(shown: str, policy: str) -> list[str]:
    """How the trials of a policy ended, where they failed."""
    return re.findall(rf"trial +\d+  {policy}, batch \d+: (\w+): ", shown)


def test_an_error_under_a_recipe_alone_is_repaired_by_the_module_that_raises(tuned: Any) -> None:
    shown = tuned("placed").shown
    assert "Index put requires the source and destination dtypes match" in shown
    assert "mixed_bfloat16 runs with the model's own forward kept in float32" in shown
    assert failed(shown, "mixed_bfloat16") == []
    recipe = tuned("placed").profile().recipe
    assert recipe.float32_modules == ("",) if recipe.policy.mixed else not recipe.float32_modules


def test_a_recipe_whose_kernel_faults_twice_is_refused_and_stays_so(tuned: Any) -> None:
    profile = tuned("illegal").profile()
    assert failed(tuned("illegal").shown, "mixed_bfloat16") == ["crashed"]
    assert profile.recipe.policy is not Policy.MIXED_BFLOAT16
    again = tuned("illegal").again()
    assert again.returncode == 0, again.stderr
    assert failed(again.stderr, "mixed_bfloat16") == []


def test_a_fault_that_does_not_come_again_leaves_no_trace(tuned: Any) -> None:
    assert tuned("illegal once").profile().recipe.policy is Policy.MIXED_BFLOAT16


def test_a_device_that_is_lost_ends_the_run_and_says_what_to_do(tuned: Any) -> None:
    done = tuned("lost").done
    assert done.returncode == 1
    assert "the device was lost" in done.stderr.splitlines()[-1]
    assert "run the same command again" in done.stderr.splitlines()[-1]


def test_a_gpu_that_the_installed_framework_cannot_drive_is_skipped(tuned: Any) -> None:
    assert tuned("not driven").profile().device.kind == "cpu"
    (said,) = [line for line in tuned("not driven").shown.splitlines() if "skipped" in line]
    assert "cannot use NVIDIA H100 80GB HBM3 (cuda): as it is installed here it uses cpu" in said
    assert "https://pytorch.org/get-started" in said


def test_where_that_gpu_was_named_it_is_an_error(tuned: Any) -> None:
    ended = tuned("not driven, named")
    assert ended.done.returncode == 2
    assert "or tune for another: --device cpu" in ended.shown.splitlines()[-1]
    assert not ended.path.exists()


def test_a_gpu_whose_driver_does_not_match_its_library_is_not_passed_over(rehearse: Any) -> None:
    """The CPU is tuned where it is named, and not in place of a GPU that waits for a reboot."""
    machine = rehearse("cuda", gpus=[replace(H100, hidden=True)], nvml_error=18)
    done = machine.autoprec("tune", TASKS / "mlp.py", *QUICK)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "reboot this machine" in last
    assert "--device cpu" in last
    assert list(machine.folder.glob("*.yaml")) == []


def test_finalists_that_do_not_fit_together_run_one_at_a_time(tuned: Any) -> None:
    profile = tuned("one at a time").profile()
    budget = profile.evidence.memory_budget_bytes or 0
    peaks = (profile.evidence.baseline.peak_memory_bytes, profile.evidence.chosen.peak_memory_bytes)
    assert max(peaks) < budget < sum(peaks)
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert "out of memory" not in tuned("one at a time").shown


WITHOUT_NVML = """
import json, sys, warnings
import torch
from autoprec import apply_profile
from autoprec.errors import AutoprecWarning

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model.to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    precision = apply_profile(sys.argv[1], model=model, optimizer=optimizer)
with precision.autocast():
    outputs = model(torch.ones(4, 64, device="cuda"))
precision.backward(outputs.square().mean())
precision.step()
assert all(issubclass(w.category, AutoprecWarning) for w in caught), caught
print(json.dumps([precision.policy, [str(w.message) for w in caught]]))
"""


def test_a_gpu_that_nvml_does_not_show_is_taken_by_torchs_word(tuned: Any) -> None:
    tuned("illegal once").profile()
    blind = replace(tuned("illegal once").machine, nvml=False)
    policy, warned = json.loads(blind.python(WITHOUT_NVML, tuned("illegal once").path))
    assert policy == "mixed_bfloat16"
    assert "no probe sees cuda:0" in warned[0]
    assert "NVIDIA H100 80GB HBM3" in warned[0]


OWN_CACHE = """
import torch
from autoprec.backends.torch import devices

device, mib = torch.device("cuda:0"), 2**20
held = torch.empty(150 * mib, dtype=torch.uint8, device=device)
del held                                                  # cached, so not free for the driver
assert torch.cuda.mem_get_info()[0] <= 56 * mib
devices.limit_memory(device)
torch.empty(170 * mib, dtype=torch.uint8, device=device)  # of 0.92 * 206 MiB
try:
    torch.empty(195 * mib, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("no limit")
"""


def test_what_a_process_has_cached_counts_as_free_for_it(rehearse: Any) -> None:
    small = Gpu("NVIDIA L4", "8.9", gib=206 / 1024)
    rehearse("cuda", gpus=[small]).python(OWN_CACHE)


READ_BACK = """
import torch
from autoprec.backends.torch.train.task_runner import move

device = torch.device("cuda:0")
batch = {"images": torch.arange(12.0).reshape(3, 4), "ids": [torch.arange(3)]}
there = move(batch, device)
back = move(there, torch.device("cpu"))
assert there["images"].device == device
assert torch.equal(back["images"], batch["images"])
assert torch.equal(back["ids"][0], batch["ids"][0])
"""


def test_what_comes_back_to_the_cpu_has_arrived(rehearse: Any) -> None:
    rehearse("cuda").python(READ_BACK)
