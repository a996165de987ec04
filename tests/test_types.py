"""What a type checker knows of the public functions, and so what an editor completes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

SCRIPT = """
from typing import Any, Protocol, assert_type

import torch
from torch import nn

from autoprec import apply_profile, tune
from autoprec.backends.keras.apply.precision import Precision as KerasPrecision
from autoprec.backends.protocol import Precision
from autoprec.backends.torch.apply.precision import Precision as TorchPrecision


class Net(nn.Module):
    pass


class LikeKeras(Protocol):
    def __call__(self, x: Any) -> Any: ...

    @property
    def trainable_variables(self) -> list[Any]: ...


def check(model: Net, optimizer: torch.optim.Optimizer, keras_model: LikeKeras) -> None:
    assert_type(apply_profile("p.yaml", model=model, optimizer=optimizer), TorchPrecision)
    assert_type(apply_profile("p.yaml", model=torch.compile(model)), TorchPrecision)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert_type(apply_profile("off", model=wrapped, optimizer=[optimizer]), TorchPrecision)
    assert_type(apply_profile("p.yaml", fallback="rules"), KerasPrecision)
    assert_type(apply_profile(None, model=keras_model, strict=True), KerasPrecision)
    with apply_profile("p.yaml", model=model) as precision:
        assert_type(precision, TorchPrecision)
        assert_type(precision.step(), bool)
    shared: Precision = precision
    shared = apply_profile("p.yaml")
    assert_type(shared.skipped, int)
    tune("task.py", policies=["bf16"], batch_sizes="16-64", output="p.yaml", trials=3)
    precision.bachward(torch.zeros(1))  # is a mistake that is seen
    apply_profile("p.yaml", model=model, fallback="bf16")  # so is this
    tune("task.py", trails=3)  # and this
    tune("task.py", trials="3")  # and this
    tune(task="task.py", batch_sizes=64)  # and this
"""


def test_a_type_checker_knows_what_the_public_functions_take_and_return(tmp_path: Path) -> None:
    """With the cache of `make types`, which runs before the tests, this takes two seconds."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(found) == 5, done.stdout + done.stderr
    assert '"Precision" has no attribute "bachward"; maybe "backward"?' in found[0]
    assert "No overload variant" in found[1]
    assert 'Unexpected keyword argument "trails" for "tune"' in found[2]
    assert 'Argument "trials" to "tune" has incompatible type "str"' in found[3]
    assert 'Argument "batch_sizes" to "tune" has incompatible type "int"' in found[4]
