"""`autoprec tune --plan` on the command line, for devices that are not here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.commands import Run, Write, one_sentence

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]


def test_a_plan_is_printed_on_stdout_and_nothing_is_written(
    write: Write, run: Run, tmp_path: Path
) -> None:
    code, out, err = run(write(), "--plan", "--device", "v100")
    assert (code, err) == (0, "")
    first, second, *_ = out.splitlines()
    assert first.endswith("on NVIDIA V100 (not in this machine, nvidia-v100)")
    assert second.startswith("nothing was measured")
    assert "  mixed_bfloat16 refused: bfloat16 is emulated" in out
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"model_x.py"}


def test_a_plan_as_json(write: Write, run: Run) -> None:
    code, out, _ = run(write(), "--plan", "--device", "v100", "--json", "--batch-sizes", "8,16")
    plan = json.loads(out)
    assert code == 0
    assert plan["device"]["observation"]["hypothetical"]
    assert plan["proposal"]["candidates"][0]["policy"] == "mixed_float16"
    assert plan["space"]["batch_sizes"] == [8, 16]
    assert plan["recipes"] == 12  # two policies, two batches; no padding, to 8 and to 64


def test_without_a_name_the_first_device_here_is_planned_for(write: Write, run: Run) -> None:
    code, out, _ = run(write(), "--plan", "--device", "cpu")
    assert code == 0
    assert " (cpu, " in out.splitlines()[0]


def test_a_plan_takes_no_output_and_no_unknown_device(
    write: Write, run: Run, tmp_path: Path
) -> None:
    code, _, err = run(write(), "--plan", "--output", tmp_path / "p.yaml")
    assert code == 2
    assert "--plan writes no file; omit --output" in one_sentence(err)
    code, _, err = run(write(), "--plan", "--device", "v1oo")
    assert code == 2
    assert "unknown device 'v1oo'" in err


def test_a_device_that_is_not_here_is_only_planned_for(write: Write, run: Run) -> None:
    code, _, err = run(write(), "--device", "v100")
    assert code == 2
    assert "--plan" in one_sentence(err)
