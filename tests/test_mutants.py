"""`make mutants`: every module it names has its tests, and the mutated copy finds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutants


@pytest.mark.parametrize("module", mutants.TESTS_OF)
def test_a_module_that_is_mutated_exists_and_has_tests_of_its_own(module: str) -> None:
    assert (mutants.ROOT / mutants.CORE / f"{module}.py").is_file()
    assert module in mutants.TESTS_OF[module]


def test_the_tests_are_collected_in_the_copy(tmp_path: Path) -> None:
    module = next(iter(mutants.TESTS_OF))
    mutants.copy_package(module, tmp_path)
    names = sorted({name for names in mutants.TESTS_OF.values() for name in names})
    words = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    files = [mutants.file_of_tests(name) for name in names]
    done = subprocess.run(
        [sys.executable, *words, *files], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for each in files:
        assert each in done.stdout
