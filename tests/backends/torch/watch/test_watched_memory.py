"""A check never takes memory that training needs: in 5 % more than that, training goes on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.checkout import child_environment

pytestmark = [
    pytest.mark.torch,
    pytest.mark.release,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's"),
]

LIMITED = """
import gc, json, os, resource, sys

import torch
from torch import nn

from autoprec import apply_profile
from benchmarks.numerics.late_breaks import BFLOAT16

MIB = 2**20
torch.set_num_threads(1)


def trained(watch):
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    precision = apply_profile(
        BFLOAT16, model=model, optimizer=optimizer, watch=watch, watch_every=1
    )
    for _ in range(3):
        inputs = torch.randn(16384, 128)
        precision.backward(nn.functional.mse_loss(precision.forward(inputs), inputs))
        precision.step()
    return precision


def held():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024


def fits(more, watch):
    # In a process of its own that may hold so many bytes more than now: the checks, or None.
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        limit = held() + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            found = [vars(each) for each in trained(watch).watched]
            os.write(writes, json.dumps(found).encode())
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads, "rb") as result:
        said = result.read()
    return json.loads(said) if os.waitpid(child, 0)[1] == 0 else None


trained("warn")  # what is made once is there
gc.collect()
low, high = 0, 512 * MIB
assert fits(high, False) is not None
while high - low > MIB:
    middle = (low + high) // 2
    low, high = (low, middle) if fits(middle, False) is not None else (middle, high)
print(json.dumps([high, fits(high * 105 // 100, "warn")]))
"""


def test_a_cpu_whose_memory_training_fills_trains_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    needed, checks = json.loads(done.stdout.splitlines()[-1])
    assert needed > 30 * 2**20
    assert checks is not None, "out of memory"
    assert len(checks) == 3
    assert not any(each["problem"] for each in checks)
    assert all(each["samples"] < 16384 and each["not_checked"] for each in checks), checks
