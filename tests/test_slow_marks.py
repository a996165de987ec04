"""What uses much processor time is told of, unless it is marked as slow."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
from tests import slow_marks

slow_marks.LIMIT_SECONDS = 0.05

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: of a test")
    config.pluginmanager.register(slow_marks.SlowMarks({strict}))
"""
TESTS = """
import os, subprocess, sys, time, pytest

def busy():
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass

def test_here():
    busy()

def test_in_a_child():
    text = "import time\\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", text], check=True)

@pytest.mark.slow
def test_marked():
    busy()

def test_waiting():
    time.sleep(0.2)
"""


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_tests_without_the_mark_are_told_of(
    strict: bool, code: int, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(CONFTEST.format(strict=strict))
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == code
    said = result.stdout.str().partition("of processor time without `slow`")[2]
    assert "::test_here" in said
    assert "::test_in_a_child" in said
    assert "::test_marked" not in said
    assert "::test_waiting" not in said
