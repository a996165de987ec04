"""Task files of a simulated model, and the command line run on them in this process."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from autoprec.cli import main
from tests.cli.commands import Run, Write

MODEL = """
from simulated import SimulatedModel

def build_model():
    return SimulatedModel({arguments})

def build_data(batch_size):
    return []
"""

#: What a device that gains from bfloat16 would take; the rest of the machine is this one.
FAST = {
    "overhead": {"float32": 0.004, "mixed_bfloat16": 0.006, "mixed_float16": 0.006},
    "per_sample": {"float32": 0.0005, "mixed_bfloat16": 0.0002, "mixed_float16": 0.0003},
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a task file; keyword arguments are the simulated model's fields."""

    def task(text: str | None = None, name: str = "model_x.py", **fields: Any) -> Path:
        path = tmp_path / name
        arguments = ", ".join(f"{key}={value!r}" for key, value in {**FAST, **fields}.items())
        path.write_text(
            MODEL.format(arguments=arguments) if text is None else textwrap.dedent(text)
        )
        return path

    return task


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; return the exit code, stdout and stderr."""

    def tune(*words: object) -> tuple[int, str, str]:
        try:
            code = main(["tune", *(str(word) for word in words)])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        out, err = capfd.readouterr()
        return code, out, err

    return tune
