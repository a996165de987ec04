"""The examples are what users copy: task files stand alone, and the index names every file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.py"))
TASKS = [
    path
    for path in SCRIPTS
    if path.parent.name != "trainers" and not path.name.startswith("train_")
]


def name_of(path: Path) -> str:
    return path.relative_to(EXAMPLES).as_posix()


def test_there_are_examples_for_both_frameworks() -> None:
    assert {path.parent.name for path in TASKS} == {"torch", "keras"}


@pytest.mark.parametrize("path", TASKS, ids=name_of)
def test_a_task_file_imports_nothing_of_autoprec_or_its_neighbours(path: Path) -> None:
    beside = {neighbour.stem for neighbour in path.parent.glob("*.py")}
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported.isdisjoint({"autoprec", *beside})


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_the_index_names_every_file(path: Path) -> None:
    assert name_of(path) in (EXAMPLES / "README.md").read_text(encoding="utf-8")
