"""The truth is of other code than what is judged by it: nothing of it imports the judge."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable

import pytest

from benchmarks.checkout import ROOT

#: What a truth may have of autoprec: tasks are loaded, and recipes and losses are plain values.
ALLOWED = {
    "autoprec.backends.protocol",
    "autoprec.backends.registry",
    "autoprec.core.numerics.traces",
    "autoprec.errors",
    "autoprec.version",
    "autoprec.workers.task_file",
}

JUDGING = tuple(f"autoprec.{part}." for part in ("core.numerics", "backends", "tuning", "workers"))


def judging(modules: Iterable[str]) -> list[str]:
    """The modules that no truth may use; packages alone, and core's plain values, are none."""
    own = [name for name in modules if name.startswith(("autoprec.", "benchmarks.numerics."))]
    packages = {name.rpartition(".")[0] for name in own}
    return sorted(
        name
        for name in set(own) - packages - ALLOWED
        if name == "benchmarks.numerics.judge" or name.startswith(JUDGING)
    )


def imported_by(path: str) -> set[str]:
    """Every module here that it imports, or one of those does, those inside functions included."""
    found: set[str] = set()
    waiting = {ROOT / path}
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}", *(f"{node.module}.{name}" for name in names)]
            files = {name: ROOT / f"{name.replace('.', '/')}.py" for name in names}
            waiting |= {file for name, file in files.items() if name not in found and file.exists()}
            found |= {name for name, file in files.items() if file.exists()}
    return found


@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.parametrize("part", ["truth", "loops"])
def test_no_truth_imports_what_is_judged_by_it(part: str, framework: str) -> None:
    found = imported_by(f"benchmarks/numerics/{part}_{framework}.py")
    assert "autoprec.backends.protocol" in found
    assert judging(found) == []


def test_the_judge_would_be_found() -> None:
    found = judging(imported_by("benchmarks/numerics/noise_placement.py"))
    assert "autoprec.backends.torch.train.model_state" in found
    assert "autoprec.tuning.proof.recipe_proof" in found
    assert "benchmarks.numerics.judge" in found


MEASURED = """
import json, sys
from pathlib import Path
from autoprec.workers.task_file import load_task
from benchmarks.numerics.truth_torch import truth_of
found = truth_of(load_task(Path("tests/zoo/line_fit.py").resolve()), seeds=(2, 2))
print(json.dumps([found["float16"]["label"], found["steps"], list(sys.modules)]))
"""


@pytest.mark.torch
def test_no_truth_is_measured_with_what_is_judged_by_it() -> None:
    """What is imported by name, as backends are, is found only while a truth is measured."""
    run = [sys.executable, "-c", MEASURED]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    label, steps, modules = json.loads(done.stdout.splitlines()[-1])
    assert (label, steps) == ("broken", 200)
    assert "torch" in modules
    assert judging(modules) == []
