"""Every task of the zoo trains on a GPU: none leaves a tensor on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]

ZOO = Path(__file__).parents[1] / "zoo"

TRAIN = """
import json, sys
from pathlib import Path
from autoprec.backends.torch.trace.tracer import torch_tracer
from autoprec.core.recipe import Recipe
from autoprec.workers.task_file import load_task

failed, ran = {}, 0
for folder in map(Path, sys.argv[1:]):
    sys.path.insert(0, str(folder))
    for path in sorted(folder.glob("*.py")):
        if "def build_model(" not in path.read_text():
            continue
        try:
            trace = torch_tracer(load_task(path), device="cuda", seed=0, report=lambda *_: None)
            trace.trajectory(recipe=Recipe(batch_size=8), seed=0, steps=2)
            ran += 1
        except Exception as error:
            failed[path.stem] = f"{type(error).__name__}: {error}"
print(json.dumps([failed, ran]))
"""


def test_every_task_trains_on_a_gpu(rehearse: Any) -> None:
    shown = rehearse("cuda").python(TRAIN, ZOO, ZOO / "field", seconds=240)
    failed, ran = json.loads(shown.splitlines()[-1])
    assert failed == {}
    assert ran > 100
