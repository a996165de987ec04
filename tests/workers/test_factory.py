"""A function of a file is called for what it returns; what is wrong with it is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoprec.errors import TaskError, UsageError
from autoprec.workers.factory import load_source
from autoprec.workers.task_source import TaskSource

FILE = """
import sys

ARGUMENTS = sys.argv[1:]

def build():
    return 3

def build_with(size):
    return 3

def failing():
    raise KeyError("no data here")

if __name__ == "__main__":
    raise RuntimeError("trains")
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "training_script.py"
    path.write_text(FILE, encoding="utf-8")
    before, finders, arguments = list(sys.path), list(sys.meta_path), sys.argv
    yield path
    sys.path[:], sys.meta_path[:], sys.argv = before, finders, arguments
    sys.modules.pop("training_script", None)


def test_a_function_is_called_after_its_file_was_imported_not_run(file: Path) -> None:
    with pytest.raises(UsageError, match=r"training_script.py:build: a builtins.int given, exp"):
        load_source(TaskSource(file, "build", ("--lr", "1e-3")))
    assert sys.modules["training_script"].ARGUMENTS == ["--lr", "1e-3"]


def test_a_function_with_parameters_is_told(file: Path) -> None:
    with pytest.raises(TaskError, match=r"build_with cannot be called without arguments.*size"):
        load_source(TaskSource(file, "build_with"))


def test_a_missing_function_is_told_with_one_that_is_like_it(file: Path) -> None:
    with pytest.raises(TaskError, match=r"buidl is nothing, expected a function.*did you mean"):
        load_source(TaskSource(file, "buidl"))


def test_what_the_function_raises_is_raised_on(file: Path) -> None:
    with pytest.raises(KeyError, match="no data here"):
        load_source(TaskSource(file, "failing"))
