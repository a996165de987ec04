"""On a pretended GPU whose memory training fills, a check takes as many samples as fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rehearsal import Gpu

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]

WATCHED = """
import gc, json
import torch
from torch import nn

from autoprec import Policy, Recipe, apply_profile

RECIPE = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4096)


def trained(watch):
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(128, 128), nn.GELU())])
    model.to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    precision = apply_profile(
        RECIPE, model=model, optimizer=optimizer, device="cuda", watch=watch, watch_every=1
    )
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(4096, 128, generator=generator).to("cuda")
        precision.backward(nn.functional.mse_loss(precision.forward(inputs), inputs))
        precision.step()
    return [p.detach().cpu() for p in model.parameters()], precision.watched


def emptied():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


emptied()
alone, _ = trained(False)
needed = torch.cuda.max_memory_allocated()
emptied()
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(1.05 * needed / total)
watched, checks = trained("warn")
same = all(map(torch.equal, alone, watched))
print(json.dumps([same, needed, [[c.samples, c.problem, c.not_checked] for c in checks]]))
"""


def test_a_check_never_takes_what_training_needs(rehearse: Any) -> None:
    said = rehearse("cuda", gpus=[Gpu("NVIDIA L4", "8.9", gib=1.0)]).python(WATCHED)
    same, needed, checks = json.loads(said.splitlines()[-1])
    assert same
    assert needed > 10 * 2**20
    assert len(checks) == 3
    for samples, problem, not_checked in checks:
        assert samples < 4096
        assert not problem
        assert "memory" in not_checked
