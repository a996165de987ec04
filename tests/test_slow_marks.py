"""What uses much processor time is told of, unless it is marked as slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.slow_marks import SlowMarks

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from tests import fork_server, slow_marks

slow_marks.LIMIT_SECONDS = 0.05

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: of a test")
    config.pluginmanager.register(slow_marks.SlowMarks(True))

@pytest.fixture(scope="session", autouse=True)
def forked(tmp_path_factory):
    server = fork_server.ForkServer(())
    ready = tmp_path_factory.mktemp("empty") / "ready.py"
    ready.touch()
    server.run(ready)  # what it imports is no test's time
    yield server
    server.stop()
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

def test_in_a_forked_process(forked, tmp_path):
    script = tmp_path / "busy.py"
    script.write_text("import time\\nwhile time.process_time() < 0.4: pass")
    forked.run(script)

@pytest.mark.slow
def test_marked():
    busy()

def test_waiting():
    time.sleep(0.2)
"""


def test_tests_without_the_mark_are_told_of(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == 1
    said = result.stdout.str().partition("of processor time without `slow`")[2]
    assert "::test_here" in said
    assert "::test_in_a_child" in said
    assert "::test_in_a_forked_process" in said
    assert "::test_marked" not in said
    assert "::test_waiting" not in said


@pytest.mark.parametrize(
    ("strict", "found", "ended", "code"),
    [(True, True, 0, 1), (True, False, 0, 0), (True, True, 2, 2), (False, True, 0, 0)],
)
def test_they_fail_a_strict_run_that_passes_otherwise_and_no_other(
    strict: bool, found: bool, ended: int, code: int
) -> None:
    marks = SlowMarks(strict)
    marks.found = {"a test": 11.0} if found else {}
    session: Any = SimpleNamespace(exitstatus=ended)
    marks.pytest_sessionfinish(session, ended)
    assert session.exitstatus == code
